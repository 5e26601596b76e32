"""The workers that a test has started end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonpool.runtime.sandboxes.pool import close_pool


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_pool()
