"""What a project needs to test that it uses this library well.

Checkpoints of any dialect and geometry, stubs for everything that converts or computes, and an
observer with assertions. ``loader_pytest`` gives the same as fixtures of pytest, which nothing here
needs.
"""

from loader.testing.call import Call, Seen
from loader.testing.checkpoint import PRESETS, TinyCheckpoint, tiny_checkpoint
from loader.testing.dialect import DIALECTS
from loader.testing.family import FAMILIES
from loader.testing.recorder import LifecycleRecorder, lifecycle_recorder
from loader.testing.spec import Settings
from loader.testing.stubs import Stubs, stub_converters, stub_kernels
from loader.testing.values import Codes

__all__ = [
    "DIALECTS",
    "FAMILIES",
    "PRESETS",
    "Call",
    "Codes",
    "LifecycleRecorder",
    "Seen",
    "Settings",
    "Stubs",
    "TinyCheckpoint",
    "lifecycle_recorder",
    "stub_converters",
    "stub_kernels",
    "tiny_checkpoint",
]
