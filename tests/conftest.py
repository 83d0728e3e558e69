"""Shared by all tests: this folder is on the path, so that its helpers can be imported below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import raise_sites
import torch

from loader import native

# Tests run in several processes: threads within an operator would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(params=["direct", "ahead", "reference"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How a load takes its bytes: native code from descriptors, or chunks that are read ahead.

    The chunks are converted by what serves the host, or under ``reference`` by the reference.
    """
    if request.param == "direct" and native.HOST is None:
        pytest.skip("the native core is not built")
    by_reference = request.param == "reference"
    with native.serving(native.REFERENCE) if by_reference else nullcontext():
        yield request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--raise-sites", metavar="DIR", help="record which error messages are reached")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--raise-sites")
    if folder:
        reached = raise_sites.Reached()
        raise_sites.record(reached)
        raise_sites.follow_children(Path(folder))
        config.add_cleanup(lambda: reached.write(Path(folder)))
