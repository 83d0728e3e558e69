"""qpn-loader: 4-bit Mixture-of-Experts checkpoints, layer by layer, into QPN banks.

``plan`` says from headers alone what a card will hold; ``load`` streams a checkpoint into banks;
``verify`` checks the result against the checkpoint by independent code; ``prepare_module``
converts a module that already holds checkpoint-format parameters.
"""

from loader.checkpoint.family import FAMILIES, Family
from loader.errors import (
    CapacityError,
    CheckpointError,
    ConversionError,
    LifecycleError,
    LoaderError,
    PolicyError,
    ShardError,
    UnsupportedError,
)
from loader.experts import LoadedExperts, PreparedExperts
from loader.inplace import prepare_module
from loader.lifecycle import LayerEvent
from loader.pipeline import load

# The functions `plan` and `verify` take the names of their modules on purpose.
from loader.plan import Plan, plan
from loader.policy import Policy
from loader.report import LoadReport
from loader.shard import Shard
from loader.verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "CapacityError",
    "CheckpointError",
    "ConversionError",
    "Family",
    "LayerEvent",
    "LifecycleError",
    "LoadReport",
    "LoadedExperts",
    "LoaderError",
    "Plan",
    "Policy",
    "PolicyError",
    "PreparedExperts",
    "Shard",
    "ShardError",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "load",
    "plan",
    "prepare_module",
    "verify",
]
