"""For modules whose tests have processes restarted: what is left is looked for at the end of the module.

A process that is there again is another one, with other descriptors, which the check after each test would
take for something left behind.
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
