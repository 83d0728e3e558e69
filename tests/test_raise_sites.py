"""The tool that says which error messages a run never reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import raise_sites

from loader import Policy, PolicyError
from loader.errors import LoaderError


def test_every_place_is_found_once() -> None:
    found = raise_sites.sites()
    assert len(found) > 150
    assert len({(site.file, site.first) for site in found}) == len(found)
    assert {"policy.py", "checkpoint/header.py", "checkpoint/tables.py"} <= {s.file for s in found}
    assert all(key in {site.key for site in found} for key in raise_sites.UNREACHED)


def test_what_a_run_reached_is_no_longer_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoaderError, "__init__", LoaderError.__init__)  # put back at the end
    reached: set[tuple[str, int]] = set()
    raise_sites.record(reached)
    with pytest.raises(PolicyError):
        Policy(grouped_max_tokens=1)
    raise_sites.write(reached, tmp_path)
    assert json.loads(next(tmp_path.glob("*.json")).read_text())
    assert raise_sites.main(tmp_path) == 1
    missed = capsys.readouterr().out
    assert (
        missed.count("loader/policy.py")
        == sum(site.file == "policy.py" for site in raise_sites.sites()) - 1
    )
