"""Both sides, once for a run, with all models of the zoo."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.triton.both")

from tests.triton.answers import Failure  # noqa: E402 - below, assertions are to be rewritten
from tests.triton.both import Both  # noqa: E402
from tests.triton.broken import BROKEN, CONFIG  # noqa: E402
from tests.triton.moonpool_side import MoonpoolSide  # noqa: E402
from tests.triton.server import interpreter, running  # noqa: E402
from tests.triton.triton_side import TritonSide  # noqa: E402

MODELS = Path(__file__).parent / "models"
# Loaded and unloaded by the tests that use them.
APART = {"finalizes", "finalize_raises"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test waits until all models are loaded."""
    if item.path.parent == MODELS.parent:
        item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own, which holds the zoo, the broken ones, and what tests add to it."""
    folder = Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("triton") / "repository"))
    for name, text in BROKEN.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG)
        (folder / name / "1" / "model.py").write_text(text)
    return folder


@pytest.fixture(scope="session")
def both(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Both sides, with the zoo loaded."""
    with running(interpreter(), repository, tmp_path_factory.mktemp("server")) as server:
        triton, moonpool = TritonSide(server), MoonpoolSide(repository)
        try:
            both = Both(triton, moonpool)
            zoo = set(os.listdir(MODELS)) - APART
            both.loads = _loads(triton, moonpool, sorted(zoo | set(BROKEN)))
            assert {both.loads[name] for name in zoo} == {(None, None)}
            yield both
        finally:
            moonpool.close()
            triton.close()


def _loads(
    triton: TritonSide, moonpool: MoonpoolSide, names: list[str]
) -> dict[str, tuple[Failure | None, Failure | None]]:
    """What hindered each load. Triton waits a second in each, so all are under way at once."""
    with ThreadPoolExecutor(16) as threads:
        theirs = list(threads.map(triton.load, names))
        ours = list(threads.map(moonpool.load, names))
    return dict(zip(names, zip(theirs, ours, strict=True), strict=True))
