"""What the decode benchmark hands to peers: rows by expert, codes in Marlin's order."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")


def on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for module in ("decode_layer", "peers", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    module = __import__(name)
    monkeypatch.setattr(module, "CARD", CPU, raising=False)
    return module


def test_rows_are_padded_to_blocks_of_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = on_the_host("peers", monkeypatch)
    rows = peers.rows_by_expert(torch.tensor([[0, 2], [2, 1], [2, 3]]), 5, 2)
    assert rows.rows.tolist() == [0, 6, 3, 6, 1, 2, 4, 6, 5, 6]
    assert rows.experts.tolist() == [0, 1, 2, 2, 3]
    assert rows.padded.tolist() == [10] and rows.block == 2


def test_marlin_words_hold_every_code_where_a_lane_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marlin = on_the_host("marlin_peer", monkeypatch)
    k, n = 32, 128
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    numbers = sys.modules["decode_layer"].Numbers(
        codes, torch.rand(2, n).half(), torch.randint(0, 16, (2, n), dtype=torch.uint8)
    )
    bank = marlin._MarlinBank([numbers])
    assert bank.words.shape == (1, k // 16, n * 2)
    order = marlin.order_of_codes()
    assert sorted(order.tolist()) == list(range(1024))
    # Lane 5 of a warp: column 1 of each tile of 16, rows 2, 3, 10, 11; nibbles even places first.
    word = int(bank.words[0, 1, 5 * 4 + 2]) & 0xFFFFFFFF
    found = [word >> (4 * i) & 15 for i in range(8)]
    rows, columns = [16 + 2, 16 + 3, 16 + 10, 16 + 11], [2 * 16 + 1, 2 * 16 + 9]
    held = [int(codes[row, column]) for column in columns for row in rows]
    assert found == [held[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]


def test_an_odd_matrix_is_absent_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    marlin = on_the_host("marlin_peer", monkeypatch)
    numbers = sys.modules["decode_layer"].Numbers(
        torch.zeros((32, 40), dtype=torch.uint8), torch.ones(1, 40), torch.zeros(1, 40)
    )
    with pytest.raises(sys.modules["peers"].Absent, match="32 x 40"):
        marlin._MarlinBank([numbers])


@pytest.mark.parametrize(("module", "peer"), [("marlin_peer", "Marlin"), ("triton_peer", "Triton")])
def test_a_peer_that_is_not_there_says_why(
    module: str, peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = getattr(on_the_host(module, monkeypatch), peer)
    for path in (None, tmp_path / "nothing.so"):
        with pytest.raises(sys.modules["peers"].Absent):
            make(path)
