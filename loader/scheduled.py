"""Scheduled: one chunk in the order of a load, and what converting it found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from loader.chunks import Chunk
from loader.core import DescriptorError
from loader.errors import ConversionError
from loader.pieces import Pieces, descriptors_of


class Scheduled(NamedTuple):
    """One chunk in the order of a load: its layer, and whether it is the layer's last."""

    layer: int | None
    chunk: Chunk
    last: bool


NameOf = Callable[[int], str]
"""Name of a source tensor by the row that pieces call it by."""

Found = tuple[torch.Tensor, Pieces]
"""Findings of one call, and the pieces whose indices they count."""


def found_by(call: Callable[..., torch.Tensor], pieces: Pieces, name_of: NameOf) -> Found:
    """One call of the converter; a descriptor that does not fit is named by its tensor."""
    try:
        return call(descriptors=torch.from_numpy(descriptors_of(pieces))), pieces
    except DescriptorError as error:
        raise ConversionError(
            f"a piece does not fit its buffers: {error}",
            tensor=name_of(int(pieces["tensor"][error.subject])),
        ) from error
