"""Every kind of fault at every state of a layer: the load ends as it must, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_cells import make_checkpoint, run_cell
from fault_inplace import INPLACE_KINDS, InPlace, run_inplace_cell
from fault_kinds import KINDS, STATES, Kind

from loader import native


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    make_checkpoint(folder)
    return folder


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in KINDS for way in kind.ways],
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Kind) else value,
)
def test_a_fault_leaves_nothing_behind(
    good: Path, tmp_path: Path, kind: Kind, way: str, state: str
) -> None:
    if way == "direct" and native.HOST is None:
        pytest.skip("the native core is not built")
    outcome = run_cell(good, tmp_path, kind, state, way)
    assert not outcome.wrong, outcome


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> InPlace:
    return InPlace(tmp_path_factory.mktemp("inplace") / "checkpoint")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", ["direct", "reference"])
@pytest.mark.parametrize("kind", INPLACE_KINDS, ids=lambda kind: kind.name.replace(" ", "-"))
def test_a_module_has_its_sources_or_the_result(
    bed: InPlace, kind: Kind, way: str, state: str
) -> None:
    if way == "direct" and native.HOST is None:
        pytest.skip("the native core is not built")
    outcome = run_inplace_cell(bed, kind, state, way)
    assert not outcome.wrong, outcome
