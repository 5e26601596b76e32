"""Both sides over a repository that tests write themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.triton.answers import Failure, LogLine
from tests.triton.conftest import SIDES, load_all
from tests.triton.moonpool_side import MoonpoolSide
from tests.triton.server import interpreter, running
from tests.triton.triton_side import TritonSide

CACHE_BYTES = 1 << 20


class Core:
    """Both sides, and the repository, in which each test writes its models."""

    def __init__(self, repository: Path, triton: TritonSide, moonpool: MoonpoolSide) -> None:
        self.repository = repository
        self.triton = triton
        self.moonpool = moonpool

    def write(self, name: str, config: str, code: str, **files: bytes) -> None:
        """Write a model. Files are of its folder `warmup`."""
        folder = self.repository / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        (folder / "1" / "model.py").write_text(code)
        for file, content in files.items():
            (folder / "warmup").mkdir(exist_ok=True)
            (folder / "warmup" / file).write_bytes(content)


class Loads:
    """Models of a module, which the first test that asks for one loads on both sides at once, because Triton waits for seconds in each load."""

    def __init__(self, core: Core, names: Sequence[str]) -> None:
        """The models are written already."""
        self._core = core
        self._names = names
        self._outcomes: dict[str, tuple[Failure | None, Failure | None]] = {}
        self._lines: tuple[list[LogLine], list[LogLine]] = ([], [])

    def of(self, name: str) -> tuple[Failure | None, Failure | None]:
        """Return what hindered the load of this model, if anything did, in Triton and in moonpool."""
        if not self._outcomes:
            core = self._core
            core.triton.log(), core.moonpool.log()
            self._outcomes = load_all(core.triton, core.moonpool, self._names)
        return self._outcomes[name]

    def log(self) -> tuple[list[LogLine], list[LogLine]]:
        """Return the lines that all models have logged so far, in Triton and in moonpool."""
        for lines, side in zip(self._lines, (self._core.triton, self._core.moonpool), strict=True):
            lines.extend(side.log())
        return self._lines

    def unload(self) -> None:
        for name, failures in self._outcomes.items():
            for side, failure in zip(
                (self._core.triton, self._core.moonpool), failures, strict=True
            ):
                if failure is None:
                    side.unload(name)


@pytest.fixture(scope="session")
def core(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Core]:
    """A tritonserver of its own, and a runtime."""
    repository = tmp_path_factory.mktemp("core") / "repository"
    repository.mkdir()
    options = [f"--cache-config=local,size={CACHE_BYTES}"]
    folder = tmp_path_factory.mktemp("server")
    with running(interpreter(), repository, folder, options=options) as server:
        triton = TritonSide(server)
        moonpool = MoonpoolSide(repository, response_cache_bytes=CACHE_BYTES)
        request.session.stash.setdefault(SIDES, {})["core"] = triton
        try:
            yield Core(repository, triton, moonpool)
        finally:
            moonpool.close()
            triton.close()
