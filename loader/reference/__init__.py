"""Reference: conversion and routes in PyTorch operators, the oracle of every faster implementation.

Nothing here is tuned; temporaries are bounded by blocks of ``BLOCK_BYTES`` so that the memory
bounds of docs/memory.md hold.
"""

BLOCK_BYTES = 1 << 20
"""Source bytes that the reference converter takes at a time."""

TEMPORARY_BYTES = 12 * BLOCK_BYTES
"""Upper bound of the reference converter's temporaries at any moment, for the plan's peak."""
