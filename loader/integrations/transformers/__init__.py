"""Transformers: one call gives a model ready to ``generate`` from a 4-bit MoE checkpoint.

Nothing here imports Transformers before :func:`from_pretrained` is called.
"""

from loader.integrations.transformers.door import from_pretrained
from loader.integrations.transformers.report import ModelReport

__all__ = ["ModelReport", "from_pretrained"]
