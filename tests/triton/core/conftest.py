"""Both sides over a repository that tests write themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.triton.answers import Failure
from tests.triton.conftest import SIDES, load_all
from tests.triton.moonpool_side import MoonpoolSide
from tests.triton.recording import RECORDING
from tests.triton.triton_side import TritonSide, asked

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
    """Models of a module, loaded on both sides."""

    def __init__(self, core: Core, module: str, names: Sequence[str]) -> None:
        """The models are written already."""
        self._core = core
        core.moonpool.forget_log()
        core.triton.forget_log()
        with RECORDING.at(module, "loads"):
            self._both = load_all(core.triton, core.moonpool, names)

    def of(self, name: str) -> tuple[Failure | None, Failure | None]:
        """Return what hindered the load of this model, if anything did, in Triton and in moonpool."""
        return self._both[name]

    def unload(self) -> None:
        """Unload all that could be loaded."""
        self._core.triton.unload_all([name for name, (theirs, _) in self._both.items() if not theirs])
        for name, (_, ours) in self._both.items():
            if ours is None:
                self._core.moonpool.unload(name)


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Core]:
    """A tritonserver of its own, and a runtime."""
    repository = tmp_path_factory.mktemp("core") / "repository"
    repository.mkdir()
    options = [f"--cache-config=local,size={CACHE_BYTES}"]
    folder = tmp_path_factory.mktemp("server")
    with asked(repository, folder, options) as triton:
        moonpool = MoonpoolSide(repository, response_cache_bytes=CACHE_BYTES)
        request.session.stash.setdefault(SIDES, {})["core"] = triton
        try:
            yield Core(repository, triton, moonpool)
        finally:
            moonpool.close()
