"""Names: which module of the checkpoint is gate, up or down of one expert of one layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loader.errors import CheckpointError
from loader.verify.layer import Projection

Names = Callable[[int, int, Projection], str]

# (pattern of the gate, up and down module below "layers.{layer}.", fused or not)
_TABLE: tuple[tuple[dict[Projection, str], bool], ...] = tuple(
    (
        {
            "gate": f"{block}.experts.{gate}",
            "up": f"{block}.experts.{up}",
            "down": f"{block}.experts.{down}",
        },
        fused,
    )
    for block, gate, up, down, fused in (
        ("mlp", "{e}.gate_proj", "{e}.up_proj", "{e}.down_proj", False),
        ("block_sparse_moe", "{e}.w1", "{e}.w3", "{e}.w2", False),
        ("block_sparse_moe", "{e}.gate_proj", "{e}.up_proj", "{e}.down_proj", False),
        ("mlp", "gate_up_proj", "gate_up_proj", "down_proj", True),
        ("block_sparse_moe", "gate_up_proj", "gate_up_proj", "down_proj", True),
    )
)
_EXPERTS = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)layers\.\d+\.(?:mlp|block_sparse_moe)\.experts\.")
# Draft models travel in the same files and count their layers from 0 again.
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn|draft|eagle|medusa)[^.]*\.")


@dataclass(frozen=True)
class ModuleRef:
    """Where one projection of one expert lies.

    ``lead`` is the index along a leading expert axis (None: a module of its own); ``half`` is 0
    for the first and 1 for the second half of the output columns (None: all of them).
    """

    name: str
    lead: int | None = None
    half: int | None = None


class Resolver:
    """Finds modules by the table above, or by the caller's own ``names``."""

    def __init__(self, modules: Iterable[str], names: Names | None) -> None:
        self._modules = frozenset(modules)
        self._names = names
        self._prefix = "" if names is not None else self._find_prefix()

    def resolve(self, layer: int, expert: int, projection: Projection) -> ModuleRef:
        """The one module that is ``projection`` of ``expert``; :class:`CheckpointError` if none."""
        if self._names is not None:
            gate, up = self._names(layer, expert, "gate"), self._names(layer, expert, "up")
            candidates = [self._ref(self._names(layer, expert, projection), gate == up, expert)]
        else:
            candidates = [
                self._ref(
                    f"{self._prefix}layers.{layer}.{names[projection].format(e=expert)}",
                    fused,
                    expert,
                )
                for names, fused in _TABLE
            ]
        refs = [self._halved(ref, projection) for ref in candidates if ref.name in self._modules]
        if len(refs) != 1:
            raise CheckpointError(
                f"the {projection} projection of an expert is not to be found"
                if not refs
                else f"the {projection} projection of an expert is there under two names",
                layer=layer,
                experts=str(expert),
                expected="one of " + ", ".join(ref.name for ref in candidates),
                found=", ".join(ref.name for ref in refs) or "none of them",
            )
        return refs[0]

    @staticmethod
    def _ref(name: str, fused: bool, expert: int) -> ModuleRef:
        return ModuleRef(name, lead=expert if fused else None)

    @staticmethod
    def _halved(ref: ModuleRef, projection: Projection) -> ModuleRef:
        if ref.lead is None or projection == "down":
            return ref
        return ModuleRef(ref.name, ref.lead, 0 if projection == "gate" else 1)

    def _find_prefix(self) -> str:
        matches = (_EXPERTS.match(name) for name in self._modules)
        prefixes = {match["prefix"] for match in matches if match}
        models = sorted(prefix for prefix in prefixes if not _DRAFT.search(prefix))
        if len(models) != 1:
            raise CheckpointError(
                "the experts of the model cannot be told by their names; pass names=",
                expected="one prefix before 'layers.{layer}.mlp.experts' or '.block_sparse_moe'",
                found=", ".join(map(repr, models)) or f"{len(prefixes)} drafts and no model",
            )
        return models[0]
