"""Crossover table: up to which token count ``qpn_grouped`` beats ``legacy``, card by card.

What decides is how many rows an active expert has: a pass over its words serves eight, while
``legacy`` unpacks an expert once however many rows there are. Other sizes move the two alike. So a
row says, for one architecture and one kind of codes, at how many rows of each expert
(tokens x top-k / experts) grouped was not slower in any geometry that was measured.

``python benchmarks/cuda_crossover.py`` measures a card and prints its rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownCrossover:
    """One row. ``architecture`` 90 is SM 9.0; ``most_tokens`` is where measuring stopped."""

    architecture: int
    kind: str
    rows_per_expert: float
    most_tokens: int
    measured_on: str

    def tokens(self, rows_per_token: float) -> int:
        """Last token count of ``qpn_grouped`` where a token gives an expert so many rows."""
        return max(2, min(self.most_tokens, int(self.rows_per_expert / rows_per_token)))


_H200 = "NVIDIA H200, 2026-12-01"

KNOWN: tuple[KnownCrossover, ...] = (
    KnownCrossover(90, "int4", 32.0, 512, _H200),
    KnownCrossover(90, "e2m1", 32.0, 512, _H200),
)


def known_crossover(architecture: int, kind: str) -> KnownCrossover | None:
    """The row of an architecture and a kind of codes; None where nothing was measured."""
    return next(
        (row for row in KNOWN if (row.architecture, row.kind) == (architecture, kind)), None
    )
