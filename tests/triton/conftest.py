"""Both sides, once for a run, with all models of the zoo."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

pytest.register_assert_rewrite("tests.triton.both")

from tests.triton.answers import Failure  # noqa: E402 - below, assertions are to be rewritten
from tests.triton.both import Both  # noqa: E402
from tests.triton.broken import BROKEN, CONFIG  # noqa: E402
from tests.triton.moonpool_side import MoonpoolSide  # noqa: E402
from tests.triton.recording import RECORDING  # noqa: E402
from tests.triton.triton_side import TritonSide, asked  # noqa: E402

# Triton's own servers, by the fixture that started each.
SIDES = pytest.StashKey[dict[str, TritonSide]]()
MODELS = Path(__file__).parent / "models"
# Loaded and unloaded by the tests that use them.
APART = {"finalizes", "finalize_raises"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test waits until all models are loaded."""
    if item.path.parent == MODELS.parent:
        item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test in which Triton itself died, as it does now and then, is begun again with another one, twice at most."""
    used = [name for name in ("both", "core") if name in getattr(item, "fixturenames", ())]
    if not RECORDING.is_live or not used:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for _ in range(2):
        side = item.session.stash.setdefault(SIDES, {}).get(used[0])
        if side is None or not side.has_died:
            break
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(f"\ntritonserver died in {item.nodeid}:\n{side.server.log()[-4000:]}\n")
        side.restart()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
def both(repository: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Both]:
    """Both sides, with the zoo loaded."""
    with asked(repository, tmp_path_factory.mktemp("server")) as triton:
        request.session.stash.setdefault(SIDES, {})["both"] = triton
        moonpool = MoonpoolSide(repository)
        try:
            both = Both(triton, moonpool)
            zoo = set(os.listdir(MODELS)) - APART
            with RECORDING.at("both", "zoo"):
                both.loads = load_all(triton, moonpool, sorted(zoo | set(BROKEN)))
            assert {both.loads[name] for name in zoo} == {(None, None)}
            # Whichever test is first, what models logged when they were loaded is none of its lines.
            both.forget_log()
            yield both
        finally:
            moonpool.close()


@pytest.fixture(autouse=True)
def _looks_for_its_answers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test find what was recorded for it."""
    RECORDING.begin(request.function.__module__, request.node.name)
    RECORDING.paths[str(request.getfixturevalue("tmp_path"))] = "{folder}"
    yield
    del RECORDING.paths[str(request.getfixturevalue("tmp_path"))]


def pytest_sessionfinish() -> None:
    RECORDING.write()


def load_all(
    triton: TritonSide, moonpool: MoonpoolSide, names: Sequence[str]
) -> dict[str, tuple[Failure | None, Failure | None]]:
    """Load models on both sides, and return the errors: Triton's, then moonpool's."""
    theirs = triton.load_all(names)
    return {name: (theirs[name], moonpool.load(name)) for name in names}
