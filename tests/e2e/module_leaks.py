"""A fixture for modules whose tests restart processes: it looks for leftovers at the end of the module.

A restarted process has other descriptors, which the check after each test would
take for leftovers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.leaks import Holdings, left_since


@pytest.fixture(autouse=True, scope="module")
def _leaves_nothing_behind() -> Iterator[None]:
    before = Holdings()
    yield
    left = left_since(before)
    assert left == [], left
