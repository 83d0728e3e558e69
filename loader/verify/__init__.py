"""An independent check of a finished load against the checkpoint it came from.

What verifies never imports what it verifies: this package reads files, names, formats and values
by its own code, and takes nothing from the rest of the library but its errors.
"""

from __future__ import annotations

from loader.verify.report import ForwardCase, Mismatch, VerifyReport
from loader.verify.run import verify

__all__ = ["ForwardCase", "Mismatch", "VerifyReport", "verify"]
