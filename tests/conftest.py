"""What holds for every test."""

from __future__ import annotations

import pytest
from tests import sandbox_level
from tests.chaos import seed
from tests.chaos.seed import pytest_report_header
from tests.leaks import _leaves_nothing_behind
from tests.sandbox_level import (
    _models_share_the_folder_of_a_test,
    pytest_collection_modifyitems,
)

__all__ = [
    "_leaves_nothing_behind",
    "_models_share_the_folder_of_a_test",
    "pytest_collection_modifyitems",
    "pytest_report_header",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    sandbox_level.pytest_addoption(parser)
    seed.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    sandbox_level.pytest_configure(config)
    seed.draw(config)
