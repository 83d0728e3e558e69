"""AWQ ``gemm`` checkpoints, as AutoAWQ and GPTQModel write them.

Source of the format: AutoAWQ ``awq/modules/linear/gemm.py`` and ``awq/utils/packing_utils.py``.
``qweight`` and ``qzeros`` hold eight neighbouring output columns in a word, in the order
0, 2, 4, 6, 1, 3, 5, 7; zero points are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from loader.checkpoint.model import CONFIG
from loader.checkpoint.scheme import AWQ_PARTS, IntegerSettings, Scheme, Unhandled
from loader.checkpoint.wildcard import Numbered, loosen
from loader.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True)
class AwqDialect:
    """One scheme for the whole model, and ``modules_to_not_convert``."""

    everywhere: Scheme
    ignore: tuple[str, ...]
    name: str = "awq"

    @cached_property
    def _numbered(self) -> Numbered:
        # Either reading finds the entry, without dots at its ends, in the name.
        return Numbered.of(loosen(entry.strip("."), whole=False) for entry in self.ignore)

    def scheme(self, module: str) -> Scheme | Unhandled:
        """The one scheme of the checkpoint."""
        return self.everywhere

    def excluded(self, module: str) -> frozenset[bool]:
        """AutoAWQ means a substring; other writers of the key mean dotted components."""
        if not self.ignore:
            return frozenset((False,))
        substring = any(entry in module for entry in self.ignore)
        dotted = f".{module}."
        components = any(f".{entry.strip('.')}." in dotted for entry in self.ignore)
        return frozenset((substring, components))

    def tells_apart(self, module: str) -> bool:
        """Where an entry with a number in it may be found in the name."""
        return self._numbered.tell_apart(module)


def read_awq(quantization: Mapping[str, Any]) -> AwqDialect:
    """Build the dialect from ``quantization_config``; refusals name what is not loaded."""
    # AutoAWQ's key, and GPTQModel's two.
    for key in ("version", "format", "checkpoint_format"):
        label = str(quantization.get(key, "gemm")).lower()
        if label != "gemm":
            raise UnsupportedError(
                "this AWQ packing is not loaded",
                file=CONFIG,
                expected=f"{key} gemm",
                found=label,
            )
    if quantization.get("desc_act"):
        raise UnsupportedError(
            "desc_act (activation order) is not supported",
            file=CONFIG,
            expected="desc_act false",
            found="desc_act true",
        )
    bits = quantization.get("bits", quantization.get("w_bit"))
    group = IntegerSettings(
        bits, quantization.get("group_size", quantization.get("q_group_size", 128)), CONFIG
    ).checked_group()
    zero_point = quantization.get("zero_point", True)
    if not isinstance(zero_point, bool):
        raise CheckpointError(
            "zero_point is not true or false",
            file=CONFIG,
            expected="a boolean",
            found=repr(zero_point),
        )
    parts = dict(AWQ_PARTS)
    parts["qzeros"] = replace(parts["qzeros"], required=zero_point)
    scheme = Scheme("awq-gemm", "int4", group, parts, "stored" if zero_point else "eight")
    return AwqDialect(scheme, _names(quantization.get("modules_to_not_convert")))


def _names(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(str(entry) for entry in value if entry)
    raise CheckpointError(
        "modules_to_not_convert is not a list of names",
        file=CONFIG,
        expected="a list or null",
        found=repr(value),
    )
