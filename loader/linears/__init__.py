"""Linears: quantized modules outside the routed experts, served from a bank or dequantized.

``find_linears`` (``loader/checkpoint/linears.py``) says which there are, ``plan_linear`` how each
is served and why, :class:`LinearLoader` streams them.
"""

from loader.linears.load import LinearLoader
from loader.linears.module import PreparedLinear
from loader.linears.plan import LinearPlan, LinearSlice, plan_linear

__all__ = ["LinearLoader", "LinearPlan", "LinearSlice", "PreparedLinear", "plan_linear"]
