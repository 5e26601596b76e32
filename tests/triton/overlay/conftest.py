"""A tritonserver beside one in which moonpool is `python`, in the place of moonpool alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.triton.library import library
from tests.triton.answers import Inputs, Outcome
from tests.triton.both import Both, without_id
from tests.triton.broken import BROKEN
from tests.triton.conftest import APART, MODELS, SIDES
from tests.triton.server import TritonServer, interpreter
from tests.triton.triton_side import TritonSide

from moonpool.runtime.triton import install


class OverlayServer(TritonServer):
    """A tritonserver in which moonpool runs all Python models."""

    def _lay_out_backend(self) -> None:
        super()._lay_out_backend()
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
def both(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Both]:
    """Both servers, with the zoo loaded."""
    with ExitStack() as stack:
        sides: list[Any] = []
        for server_type, side_type in ((TritonServer, TritonSide), (OverlayServer, OverlaySide)):
            server = server_type(interpreter(), repository, tmp_path_factory.mktemp("server"))
            stack.callback(server.stop)
            server.start()
            sides.append(side_type(server))
            stack.callback(sides[-1].close)
        zoo = set(os.listdir(MODELS)) - APART
        names = sorted(zoo | set(BROKEN))
        both = Both(*sides)
        request.session.stash.setdefault(SIDES, {})["both"] = both.triton
        with ThreadPoolExecutor(32) as threads:
            asked = [[threads.submit(side.load, name) for side in sides] for name in names]
            for name, (theirs, ours) in zip(names, asked, strict=True):
                both.loads[name] = theirs.result(), ours.result()
        assert {both.loads[name] for name in zoo} == {(None, None)}
        yield both
