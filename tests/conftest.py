"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import sandbox_level, settings_of_hypothesis
from tests.chaos import seed
from tests.chaos.seed import pytest_report_header
from tests.gpu import cards
from tests.leaks import _leaves_nothing_behind
from tests.sandbox_level import (
    _models_share_the_folder_of_a_test,
    pytest_collection_modifyitems,
)
from tests.workers import pytest_xdist_make_scheduler

__all__ = [
    "_leaves_nothing_behind",
    "_models_share_the_folder_of_a_test",
    "pytest_collection_modifyitems",
    "pytest_report_header",
    "pytest_xdist_make_scheduler",
]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        # A machine with a device has what it has, and no network.
        parser.addini(
            "timeout", "of pytest-timeout, which is not here: nothing ends a test that hangs"
        )
    sandbox_level.pytest_addoption(parser)
    seed.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not here")
    sandbox_level.pytest_configure(config)
    seed.draw(config)
    settings_of_hypothesis.load(config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        cards.warm()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, what has no such test is not imported: a machine with a device may lack what it needs."""
    if config.option.markexpr != "gpu" or config.rootpath not in collection_path.parents:
        return None
    files = [collection_path] if collection_path.is_file() else collection_path.rglob("test_*.py")
    return None if any(_has_gpu_tests(file.read_text()) for file in files) else True


def _has_gpu_tests(source: str) -> bool:
    # By the mark, or by the fixtures that are a device of either kind.
    return any(words in source for words in ("mark.gpu", "tests.gpu", "host: Host"))
