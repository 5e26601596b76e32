"""Both sides, once for a run, with all models of the zoo."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.leaks import LASTING_PATHS

pytest.register_assert_rewrite("tests.triton.both")

from tests.triton.both import Both  # noqa: E402 - its assertions are to be rewritten
from tests.triton.moonpool_side import MoonpoolSide  # noqa: E402
from tests.triton.server import REGIONS, interpreter, running  # noqa: E402
from tests.triton.triton_side import TritonSide  # noqa: E402

MODELS = Path(__file__).parent / "models"
LASTING_PATHS[f"/dev/shm/{REGIONS}"] = "Triton's server has them open until it is stopped"


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own, which holds the zoo and what tests add to it."""
    return Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("triton") / "repository"))


@pytest.fixture(scope="session")
def both(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Both sides, with the zoo loaded."""
    with running(interpreter(), repository, tmp_path_factory.mktemp("server")) as server:
        triton, moonpool = TritonSide(server), MoonpoolSide(repository)
        try:
            _load_zoo(triton, moonpool)
            yield Both(triton, moonpool)
        finally:
            moonpool.close()
            triton.close()


def _load_zoo(triton: TritonSide, moonpool: MoonpoolSide) -> None:
    """Triton waits a second in each load, so all are under way at once."""
    names = sorted(path.name for path in MODELS.iterdir())
    with ThreadPoolExecutor(len(names)) as threads:
        failures = dict(zip(names, threads.map(triton.load, names), strict=True))
    failures |= {f"{name} in moonpool": moonpool.load(name) for name in names}
    assert {name: failure for name, failure in failures.items() if failure} == {}
