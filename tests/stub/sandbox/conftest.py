"""Fixtures for processes that try to leave the sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stub.sandbox.children import Identity, identities, open_copy, python_for


@pytest.fixture(scope="session")
def code() -> Iterator[Path]:
    with open_copy() as folder:
        yield folder


@pytest.fixture(params=identities(), ids=lambda uid: "root" if uid == 0 else "user")
def identity(request: pytest.FixtureRequest, code: Path) -> Identity:
    """Root, and a user without rights."""
    return Identity(request.param, python_for(request.param), code)
