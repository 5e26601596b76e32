"""What holds for every test."""

from __future__ import annotations

from tests.leaks import _leaves_nothing_behind
from tests.sandbox_level import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
)

__all__ = [
    "_leaves_nothing_behind",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
]
