"""The release of a layer's cache: once, in its turn, and never after a failure."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lifecycle_fakes import DIALECTS, checkpoint
from load_fakes import (
    TINY_STAGING,
    Raiser,
    module_of,
    quantization_of,
    recorded,
)

import loader
from loader import LayerEvent, LoaderError, Policy, native
from loader.converter import ConversionCache

# The release


class ReleaseSpy:
    """Checks at each release what must be gone and what must be there; counts discards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.direct = False
        read = native.read

        def spy_read(*args: Any) -> Any:
            self.direct = True
            return read(*args)

        monkeypatch.setattr(native, "read", spy_read)
        self.chunks: list[weakref.ref[torch.Tensor]] = []
        self.extra: list[weakref.ref[torch.Tensor]] = []
        self.prepared: list[torch.Tensor] = []
        write, finish = native.write, native.finish
        release, discard = ConversionCache.release, ConversionCache.discard

        def spy_write(chunk: torch.Tensor, *rest: Any) -> Any:
            self.chunks.append(weakref.ref(chunk))
            return write(chunk, *rest)

        def spy_finish(banks: list[torch.Tensor], *rest: Any) -> Any:
            self.order.append("finish")
            self.prepared = list(banks)
            return finish(banks, *rest)

        def spy_release(cache: ConversionCache) -> int:
            assert (self.chunks or self.direct) and not any(
                ref() is not None for ref in self.chunks
            )
            assert not any(ref() is not None for ref in self.extra)
            assert self.order[-2:] == ["finish", "prepared"]
            self.order.append("release")
            return release(cache)

        def spy_discard(cache: ConversionCache) -> None:
            self.order.append("discard")
            discard(cache)

        monkeypatch.setattr(native, "write", spy_write)
        monkeypatch.setattr(native, "finish", spy_finish)
        monkeypatch.setattr(ConversionCache, "release", spy_release)
        monkeypatch.setattr(ConversionCache, "discard", spy_discard)

    def __call__(self, event: LayerEvent) -> None:
        if event.state == "reading":
            assert not any(ref() is not None for ref in self.chunks), "what was consumed is let go"
        if event.state not in ("planned", "reading", "converting"):
            self.order.append(event.state)
        if event.state == "prepared":
            assert self.prepared and event.bytes == sum(t.nbytes for t in self.prepared)


WHOLE = ["finish", "prepared", "release", "released", "ready"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_release_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, dialect: str
) -> None:
    checkpoint(tmp_path, dialect, layers=2)
    spy = ReleaseSpy(monkeypatch)
    with recorded(tmp_path, way, monkeypatch) as source:
        experts = loader.load(source, observers=[spy], staging_bytes=TINY_STAGING)
    assert spy.direct == (way == "direct")
    assert spy.order == WHOLE * 2
    assert all(a is b for a, b in zip(spy.prepared, experts[1].banks(), strict=True))


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_release_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, buffers: bool
) -> None:
    made = checkpoint(tmp_path, dialect, layers=1)
    module = module_of(made, buffers=buffers)
    spy = ReleaseSpy(monkeypatch)
    tensors = [*module.parameters(), *module.buffers()]
    spy.extra = [weakref.ref(tensor) for tensor in tensors]
    sources = sum(tensor.nbytes for tensor in tensors)
    del tensors
    raiser = Raiser()
    loader.prepare_module(module, quantization=quantization_of(made), observers=[spy, raiser])
    assert spy.order == WHOLE
    released = [event.bytes for event in raiser.events if event.state == "released"]
    assert released == [sources], "what went back: the sources, and an empty cache"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stage", ["write", "finish"])
def test_no_release_after_a_failed_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, in_place: bool, stage: str
) -> None:
    made = checkpoint(tmp_path, layers=2)
    spy = ReleaseSpy(monkeypatch)
    source = recorded(tmp_path, way, monkeypatch)
    if stage == "write" and way == "direct" and not in_place:
        stage = "read"
    done = getattr(native, stage)
    calls: list[int] = []

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 - in_place:
            raise RuntimeError("no such instruction")
        return done(*args)

    monkeypatch.setattr(native, stage, broken)
    with pytest.raises(LoaderError, match="no such instruction") as caught:
        if in_place:
            loader.prepare_module(
                module_of(made), quantization=quantization_of(made), observers=[spy]
            )
        else:
            loader.load(source, observers=[spy])
    source.close()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert spy.order == (
        ["discard", "failed"] if in_place else [*WHOLE, "discard", *["failed"] * 2]
    )


def test_a_cache_is_released_once(tmp_path: Path) -> None:
    checkpoint(tmp_path, "modelopt-nvfp4")
    spec = loader.plan(tmp_path, policy=Policy(layout="wide")).layers[0].spec
    cache = ConversionCache(spec, torch.device("cpu"))
    assert cache.release() == cache.nbytes > 0
    with pytest.raises(AssertionError, match="released twice"):
        cache.release()
    assert cache.released == 1
