"""Fixtures of the tests of devices."""

from __future__ import annotations

import pytest
from tests.gpu.cards import Fake, card, fake, fake_library, gpu
from tests.gpu.late import fake_region, region, very_late
from tests.runtime.devices.conftest import card_host, fake_host, host

__all__ = [
    "card",
    "card_host",
    "fake",
    "fake_host",
    "fake_library",
    "fake_region",
    "gpu",
    "host",
    "region",
    "very_late",
]


@pytest.fixture(params=["fake", pytest.param("card", marks=pytest.mark.gpu)])
def environment(request: pytest.FixtureRequest) -> dict[str, str] | None:
    """An environment in which a process finds a device: the fake one, or the machine's own where it has one."""
    found = request.getfixturevalue(request.param)
    return found.environment() if isinstance(found, Fake) else None
