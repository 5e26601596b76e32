"""A tritonserver in which moonpool is `python`, in the place of moonpool alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.triton.library import library
from tests.triton.answers import Inputs, Outcome
from tests.triton.both import Both, without_id
from tests.triton.broken import BROKEN
from tests.triton.conftest import APART, MODELS
from tests.triton.recording import RECORDING
from tests.triton.server import TritonServer, interpreter
from tests.triton.triton_side import TritonSide

from moonpool.runtime.triton import install


class OverlayServer(TritonServer):
    """A tritonserver in which moonpool runs all Python models."""

    def lay_out_backend(self) -> None:
        super().lay_out_backend()
        stock = self._backends
        self._backends = install.overlay(stock, library(), stock.parent / "overlay" / stock.name)


class OverlaySide(TritonSide):
    """Such a server, asked over gRPC."""

    def infer(self, model: str, inputs: Inputs, **options: Any) -> Outcome:
        return without_id(super().infer(model, inputs, **options))


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test waits until both servers have loaded all models."""
    if item.path.parent == Path(__file__).parent:
        item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def both(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Return what was recorded of one server, and the other one, with the zoo loaded."""
    RECORDING.name(repository)
    server = OverlayServer(interpreter(), repository, tmp_path_factory.mktemp("server"))
    server.start()
    try:
        both = Both(TritonSide(None, RECORDING), OverlaySide(server))  # type: ignore[arg-type]
        zoo = set(os.listdir(MODELS)) - APART
        names = sorted(zoo | set(BROKEN))
        ours = both.moonpool.load_all(names)  # type: ignore[attr-defined]
        with RECORDING.at("both", "zoo"):
            both.loads = {name: (theirs, ours[name]) for name, theirs in both.triton.load_all(names).items()}
        assert {both.loads[name] for name in zoo} == {(None, None)}
        yield both
        both.moonpool.close()
    finally:
        server.stop()
