"""Fixtures and hooks for the whole suite."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# OpenBLAS's threads spin while numpy is imported, which takes a third of it, and an ordinary user may not move a
# process with threads into other namespaces. CI's part `strict` and the tests of templates turn these threads on, so
# that they are tested too.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A process that waits for the next model would count as left behind by the test that loaded the last one.
os.environ.setdefault("MOONPOOL_SPARES", "0")

import pytest
from tests import on_spares, sandbox_level, settings_of_hypothesis, workers
from tests.chaos import seed
from tests.gpu import cards
from tests.leaks import GRACE_S, _leaves_nothing_behind
from tests.runtime.cli.shell import cli, forks
from tests.runtime.recorder import tensor
from tests.sandbox_level import _models_share_the_folder_of_a_test, pytest_collection_modifyitems
from tests.thorough import pytest_itemcollected
from tests.triton import recording
from tests.workers import pytest_xdist_make_scheduler, pytest_xdist_setupnodes

import moonpool
from moonpool.runtime.log import flush
from moonpool.runtime.process import blank_templates

# Tests start thousands of processes, which inherit these variables. Without bytecode every stub compiles moonpool
# again, which takes half of the processor time of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A template that waits for the next model would count as left behind by the test that unloaded the last one.
blank_templates.KEEP_S = 0.0
# Until all tests are collected: there is much to look through, and nothing to find.
gc.disable()
# Workers share the modules of tests that pytest has rewritten.
sys.dont_write_bytecode = False

__all__ = [
    "_leaves_nothing_behind",
    "_models_share_the_folder_of_a_test",
    "caplog",
    "cli",
    "forks",
    "pytest_collection_modifyitems",
    "pytest_itemcollected",
    "pytest_xdist_make_scheduler",
    "pytest_xdist_setupnodes",
]


class _Flushed(pytest.LogCaptureFixture):  # type: ignore[misc]
    """Shows what was logged until somebody looks: records of the runtime get there on a thread of their own."""

    @property
    def handler(self) -> Any:
        flush(GRACE_S)
        return super().handler


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    # What was logged before the test is no part of it.
    flush(GRACE_S)
    caplog.__class__ = _Flushed
    return caplog


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        # A machine with a card may lack the plug-in, and has no network to install it from.
        parser.addini("timeout", "of pytest-timeout, which is not here: nothing ends a test that hangs")
    sandbox_level.pytest_addoption(parser)
    on_spares.pytest_addoption(parser)
    recording.pytest_addoption(parser)
    seed.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not here")
    sandbox_level.pytest_configure(config)
    on_spares.pytest_configure(config)
    recording.pytest_configure(config)
    seed.draw(config)
    settings_of_hypothesis.load(config)
    workers.give_namespaces(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [seed.header(config), workers.header(config)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    _hide_from_collector()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _begins_with_little_to_collect() -> None:
    _hide_from_collector()


@pytest.fixture(autouse=True, scope="session")
def _keeps_a_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep a stub that was forked from a template, and so the template, for all runtimes of this process: numpy is
    imported once.
    """
    file = tmp_path_factory.mktemp("kept") / "model.py"
    file.write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [None for _ in requests]\n"
    )
    with moonpool.Runtime() as runtime:
        config = {"input": [tensor("X", "FP32", 1)], "output": [tensor("Y", "FP32", 1)]}
        runtime.load("kept", file, config=config, sandbox="standard")
        yield


@pytest.fixture(autouse=True, scope="session")
def _servers_are_forked(request: pytest.FixtureRequest) -> None:
    """Let servers be forked, if a test may start one."""
    if running := sys.modules.get("tests.server.running"):
        running.forks = request.getfixturevalue("forks")  # type: ignore[attr-defined]


def _hide_from_collector() -> None:
    """Hide from the collector of garbage what is there: to look through 13,000 tests and what they import takes a third
    of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        cards.warm()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with tests for a GPU if `-m gpu` is given: such a machine may lack what others need."""
    if config.option.markexpr != "gpu" or config.rootpath not in collection_path.parents:
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return None if any(_has_gpu_tests(file.read_text()) for file in files) else True


def _has_gpu_tests(source: str) -> bool:
    # A GPU test has the mark, or a fixture for a device of either kind.
    return any(words in source for words in ("mark.gpu", "tests.gpu", "host: Host"))
