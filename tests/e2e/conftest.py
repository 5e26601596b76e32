"""What tests of whole runtimes share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, hosted

import moonpool
from moonpool.runtime.loading import HostingRules


@pytest.fixture(scope="module")
def completes() -> bool:
    """Whether models of `runtime` are asked to complete their configuration, which takes every load another process.

    Modules in which it matters say so with a fixture of their own.
    """
    return False


@pytest.fixture(scope="module")
def runtime(completes: bool) -> Iterator[moonpool.Runtime]:
    """A runtime for the whole module; its tests load and unload their models."""
    with moonpool.Runtime(drain_timeout_s=10.0) as runtime:
        runtime.registry.rules = HostingRules(completes=completes)
        yield runtime


class Sibling:
    """Another model of the same runtime, asked all the time, which must not notice anything."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        self._runtime = runtime
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers = 0
        self.errors: list[BaseException] = []

    def _ask(self) -> None:
        x = np.arange(4, dtype=np.float32)
        while True:
            try:
                y = self._runtime.infer("sibling", {"X": x}, timeout_s=30.0)["OUT_X"]
                if not np.array_equal(x, y):
                    raise ValueError(f"{x} came back as {y}")
                self.answers += 1
            except BaseException as error:
                self.errors.append(error)
            if self._stop.wait(0.01):
                return

    def __enter__(self) -> Sibling:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def sibling_model(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "sibling", MODELS / "echo.py", ECHO):
        yield


@pytest.fixture
def undisturbed(
    runtime: moonpool.Runtime,
    sibling_model: None,  # noqa: ARG001 - to be loaded
) -> Iterator[Sibling]:
    """Fails the test when another model of the runtime was disturbed while it ran."""
    before = runtime.instances("sibling")
    with Sibling(runtime) as sibling:
        yield sibling
    assert sibling.errors == []
    assert sibling.answers >= 1
    assert runtime.instances("sibling") == before


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the text of a model to a file."""

    def write(text: str) -> Path:
        file = tmp_path / "model.py"
        file.write_text(text)
        return file

    return write
