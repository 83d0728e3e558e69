"""Shard: which experts, and which slice of each, one card holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

from loader.errors import ShardError

#: A cut of the intermediate axis must fall on a multiple of this many features (docs/bank.md).
PHASE_MULTIPLE = 16

_MOST_EXPERTS = 1 << 20
"""Ids that a choice may name: a slip must not fill the memory."""


@dataclass(frozen=True)
class Shard:
    """Tensor parallel (TP) slice of the intermediate size, expert parallel (EP) choice of experts.

    EP gives contiguous blocks; the first ``experts % ep_size`` ranks hold one more.
    ``expert_ids`` names the experts outright, in the order of their slots.

    Raises :class:`ShardError` for ranks outside their size or an empty or repeated choice.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    expert_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for rank, size in (("tp_rank", "tp_size"), ("ep_rank", "ep_size")):
            for name in (rank, size):
                object.__setattr__(self, name, _whole(name, getattr(self, name)))
            rank_value, size_value = getattr(self, rank), getattr(self, size)
            if size_value < 1:
                raise ShardError(f"{size} is not valid", expected="at least 1", found=size_value)
            if not 0 <= rank_value < size_value:
                raise ShardError(
                    f"{rank} is outside {size}", expected=f"0 to {size_value - 1}", found=rank_value
                )
        if self.expert_ids is None:
            return
        if self.ep_size != 1:
            raise ShardError(
                "expert_ids and ep_size exclude each other",
                expected="ep_size=1",
                found=f"ep_size={self.ep_size}",
            )
        try:
            given = list(islice(self.expert_ids, _MOST_EXPERTS + 1))
        except TypeError:
            raise ShardError(
                "expert_ids is not valid", expected="ids", found=repr(self.expert_ids)
            ) from None
        if len(given) > _MOST_EXPERTS:
            raise ShardError(
                "expert_ids is not a choice of experts", expected=f"at most {_MOST_EXPERTS} ids"
            )
        ids = tuple(_whole("expert_ids", expert) for expert in given)
        object.__setattr__(self, "expert_ids", ids)
        if not ids or len(set(ids)) != len(ids):
            raise ShardError(
                "expert_ids is not a choice of experts",
                expected="one or more distinct ids",
                found=list(ids),
            )

    def experts_of(self, experts: int) -> tuple[int, ...]:
        """Global ids that this card holds, in slot order, of ``experts`` in all.

        Raises :class:`ShardError` for ids beyond the model or more EP ranks than experts.
        """
        if self.expert_ids is not None:
            outside = [expert for expert in self.expert_ids if not 0 <= expert < experts]
            if outside:
                raise ShardError(
                    "expert_ids names experts that the model does not have",
                    expected=f"0 to {experts - 1}",
                    found=outside[:8],
                )
            return tuple(self.expert_ids)
        if self.ep_size > experts:
            raise ShardError(
                "some EP ranks would hold no expert",
                expected=f"ep_size of at most {experts}",
                found=f"ep_size={self.ep_size}",
            )
        base, more = divmod(experts, self.ep_size)
        first = self.ep_rank * base + min(self.ep_rank, more)
        return tuple(range(first, first + self.count_of(experts)))

    def count_of(self, experts: int) -> int:
        """How many of ``experts`` this card holds."""
        if self.expert_ids is not None:
            return len(self.expert_ids)
        base, more = divmod(experts, self.ep_size)
        return base + (self.ep_rank < more)

    def slice_of(self, intermediate: int, group: int, layer: int | None = None) -> tuple[int, int]:
        """First feature and feature count of this card's slice of the intermediate size.

        All ranks of ``tp_size`` are checked on every rank: a cut must divide the size and fall on
        a multiple of 16. ``group`` is the W2 group, named in the error.
        """
        if self.tp_size == 1:
            return 0, intermediate
        local, rest = divmod(intermediate, self.tp_size)
        if rest or local % PHASE_MULTIPLE:
            cut = (
                f"cuts every {intermediate / self.tp_size:g} features"
                if rest
                else f"cuts every {local} features (phase {local % group} in the first cut group)"
            )
            raise ShardError(
                f"tp_size={self.tp_size} cannot slice intermediate size {intermediate} "
                f"with group {group}",
                layer=layer,
                expected=f"cuts at multiples of {PHASE_MULTIPLE}; "
                f"tp sizes that work: {', '.join(map(str, tensor_parallel_sizes(intermediate)))}",
                found=cut,
            )
        return self.tp_rank * local, local

    def to_dict(self) -> dict[str, Any]:
        """The settings as they were given."""
        return {
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "ep_rank": self.ep_rank,
            "ep_size": self.ep_size,
            "expert_ids": None if self.expert_ids is None else list(self.expert_ids),
        }


def _whole(name: str, value: Any) -> int:
    """``value`` as a plain int (numpy's is one too); ``int`` would cut a float without a word."""
    try:
        return index(value)
    except TypeError:
        raise ShardError(
            f"{name} is not valid", expected="a whole number", found=repr(value)
        ) from None


def tensor_parallel_sizes(intermediate: int, most: int = 64) -> list[int]:
    """TP sizes up to ``most`` that can slice ``intermediate`` features."""
    return [
        size
        for size in range(1, most + 1)
        if size == 1 or (intermediate % size == 0 and (intermediate // size) % PHASE_MULTIPLE == 0)
    ]
