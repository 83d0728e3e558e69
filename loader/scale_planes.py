"""Scale planes: int4 scales that the checkpoint keeps in 32 bits, stored in 16 without loss.

Only the payload tells which 16-bit format holds every scale of a bank. A bank begins in fp16. At
the first scale that fp16 does not hold exactly, its plane is rewritten as bf16 in place, which is
exact as long as bf16 holds all that came before, and the chunk at hand is converted once more.
Where neither format holds them all, that is an error. No plane is held twice, none is widened.

A card does the same where the bytes are (``csrc/device/formats.cuh``), without asking the host;
what its banks became is read with the rest of what it counted, once for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from loader.converter import LayerConverter
from loader.pieces import Pieces
from loader.reference.findings import Kind
from loader.spots import counts_of

Found = tuple[torch.Tensor, Pieces]
"""Findings of one call, and the pieces whose indices they count."""

_INEXACT = (Kind.NOT_FP16, Kind.NOT_BF16)


class ScalePlanes:
    """The formats that the two banks of one layer can still have; changes the banks' own."""

    def __init__(self, converter: LayerConverter) -> None:
        self._converter = converter
        self._only_fp16 = [False, False]  # a scale was seen that bf16 does not hold

    def settle(self, convert: Callable[[], list[Found]]) -> list[Found]:
        """Convert a chunk, and again where a bank turned out to need bf16.

        Returns the findings that are left to judge: a scale that the format of its bank does not
        hold is among them only where the other format cannot be had either.
        """
        found = convert()
        if not any(len(findings) for findings, _ in found):
            return found
        inexact = {kind: self._banks_with(kind, found) for kind in _INEXACT}
        turned = False
        for bank in (0, 1):
            self._only_fp16[bank] |= inexact[Kind.NOT_BF16][bank]
            needs_bf16 = inexact[Kind.NOT_FP16][bank] and not self._is_bf16(bank)
            if needs_bf16 and not self._only_fp16[bank]:
                _turn_to_bf16(self._converter, bank)
                turned = True
        if turned:
            found = convert()
        return [(self._faults(findings, pieces), pieces) for findings, pieces in found]

    def spots(self) -> torch.Tensor | None:
        """What a card counted in the whole layer, whose banks get their formats from it here.

        Returns the table of ``loader/spots.py`` without what is no fault; None for nothing found,
        and on the host.
        """
        table = self._converter.spots()
        if table is None:
            return None
        experts = self._converter.banks.spec.w2.experts
        for bank in (0, 1):
            inexact = [counts_of(table, kind, bank, experts) for kind in _INEXACT]
            not_fp16, not_bf16 = (int(counts.sum()) for counts in inexact)
            if not_fp16 and not not_bf16:
                _call_it_bf16(self._converter, bank)
            # Where neither holds them all, the fewer values are the ones to name.
            kept = 0 if not_fp16 <= not_bf16 else 1
            inexact[1 - kept].zero_()
            if not (not_fp16 and not_bf16):
                inexact[kept].zero_()
        return table

    def _is_bf16(self, bank: int) -> bool:
        return self._converter.banks.spec.banks[bank].scale_dtype == torch.bfloat16

    def _banks_with(self, kind: Kind, found: list[Found]) -> list[bool]:
        banks = {
            int(pieces[subject]["bank"])
            for findings, pieces in found
            for subject, one in findings[:, :2].tolist()
            if one == kind
        }
        return [bank in banks for bank in (0, 1)]

    def _faults(self, findings: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        """Without what the other format does not hold: that is no fault of this one."""
        kept = [
            kind not in _INEXACT
            or (kind == Kind.NOT_BF16) == self._is_bf16(int(pieces[subject]["bank"]))
            for subject, kind in findings[:, :2].tolist()
        ]
        return (
            findings[torch.tensor(kept, dtype=torch.bool, device=findings.device)]
            if kept
            else findings
        )


def _turn_to_bf16(converter: LayerConverter, bank: int) -> None:
    """Rewrite the scale plane of one bank in place, an expert at a time."""
    old = converter.banks.tensors[_place(converter, bank)]
    _call_it_bf16(converter, bank)
    new = converter.banks.tensors[_place(converter, bank)]
    for slot in range(len(old)):
        new[slot] = old[slot].float().to(torch.bfloat16)


def _call_it_bf16(converter: LayerConverter, bank: int) -> None:
    """Take the bytes of a scale plane for bf16 from now on."""
    banks = converter.banks
    at = _place(converter, bank)
    banks.tensors[at] = banks.tensors[at].view(torch.bfloat16)
    changed = replace(banks.spec.banks[bank], scale_dtype=torch.bfloat16)
    both = (banks.spec.w13, changed) if bank else (changed, banks.spec.w2)
    converter.reshape(replace(banks.spec, w13=both[0], w2=both[1]))


def _place(converter: LayerConverter, bank: int) -> int:
    """Where the scale plane of a bank stands among the tensors of the layer."""
    spec = converter.banks.spec
    at = [tensor.name for tensor in spec.banks[bank].tensors()].index("scales")
    return at + len(spec.w13.tensors()) * bank
