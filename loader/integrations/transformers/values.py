"""Values: tensors of a checkpoint that are read when Transformers asks for them, not before.

Transformers takes a mapping of names to lazy slices, asks each one that its model has for its
values, in the dtype and on the device that it wants, and never touches the others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType

import torch

Read = Callable[[torch.dtype, torch.device], torch.Tensor]


class Unread:
    """One tensor that is read at most once, straight into its dtype on its device.

    Stands where Transformers expects a slice of a file: ``tensor[...]`` and then ``.to(...)``.
    ``failed`` gets the error of a read, since Transformers keeps errors for a summary of its own.
    """

    def __init__(
        self,
        read: Read,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        failed: Callable[[Exception], None],
    ) -> None:
        self._read = read
        self._failed = failed
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.read_as: torch.dtype | None = None  #: None until the values were taken

    def __getitem__(self, key: EllipsisType) -> Unread:
        """The whole of it, still unread: only ``to`` knows the dtype that is wanted."""
        return self

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The values; the caller owns them."""
        where = torch.device("cpu") if device is None else torch.device(device)
        try:
            value = self._read(dtype or self.dtype, where)
        except Exception as error:
            self._failed(error)
            raise
        self.read_as = value.dtype
        return value

    def is_floating_point(self) -> bool:
        """Whether the numbers are floats."""
        return self.dtype.is_floating_point
