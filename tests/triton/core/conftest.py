"""Both sides over a repository that tests write themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.triton.answers import Failure, LogLine
from tests.triton.conftest import SIDES
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
    """Models of a module, loaded on both sides: in moonpool at once, since no test may leave processes behind, and in
    Triton by the first test that asks for one, which is begun again if Triton dies. Triton waits for seconds in each
    load, so it loads them together.
    """

    def __init__(self, core: Core, names: Sequence[str]) -> None:
        """The models are written already."""
        self._core = core
        core.moonpool.log()
        self._ours = {name: core.moonpool.load(name) for name in names}
        self._theirs: dict[str, Failure | None] = {}
        self._lines: tuple[list[LogLine], list[LogLine]] = ([], [])

    def of(self, name: str) -> tuple[Failure | None, Failure | None]:
        """Return what hindered the load of this model, if anything did, in Triton and in moonpool."""
        if not self._theirs:
            triton = self._core.triton
            # If it died in this load before, `restart` has loaded some of them, and their lines would be missed below.
            triton.unload_all([name for name in self._ours if name in triton.loaded])
            triton.log()
            self._theirs = triton.load_all(list(self._ours))
        return self._theirs[name], self._ours[name]

    def log(self) -> tuple[list[LogLine], list[LogLine]]:
        """Return the lines that all models have logged so far, in Triton and in moonpool."""
        theirs, ours = self._lines
        theirs.extend(self._core.triton.log())
        ours.extend(self._core.moonpool.log())
        return theirs, ours

    def unload(self) -> None:
        """Unload all that could be loaded."""
        self._core.triton.unload_all(
            [name for name, failure in self._theirs.items() if not failure]
        )
        for name, failure in self._ours.items():
            if failure is None:
                self._core.moonpool.unload(name)


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
