"""Synthetic checkpoints for tests, demo and benchmarks, by code that shares nothing with a load."""
