"""The suite on spares: `pytest --spares tests/hostile`.

Every model that could get a process that waited for it gets one: it is made right before it is taken. Without this
option there are no spares, but where a test asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moonpool.runtime.isolation import spares
from moonpool.runtime.isolation.spares import Spares
from moonpool.runtime.process.child import ChildProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spares", action="store_true", help="start contained models from spares wherever that is possible"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--spares"):
        return
    take = Spares.take

    def made_and_taken(
        self: Spares, python: str, environment: Mapping[str, str], *arguments: Any, **more: Any
    ) -> ChildProcess | None:
        count = self.count
        # Of a runtime that has none otherwise, as no spare is to wait when a test ends.
        self.count = count or 1
        make(self, python, environment)
        process = take(self, python, environment, *arguments, **more)
        self.count = count
        return process

    # This is never undone, because the option is for the whole process.
    Spares.take = made_and_taken  # type: ignore[method-assign]


def make(pool: Spares, python: str, environment: Mapping[str, str]) -> None:
    """Make a spare for processes with this interpreter and these variables, and wait until it is ready, or is none."""
    key = spares._key_of(python, environment)
    with pool._lock:
        made = pool._begin(key)
    pool._make(key, made)
