"""A device whose work starts late, so that what is not ordered goes wrong every time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from tests.gpu.cards import Fake, settle

from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion

SIZE = 4096
DELAY_US = 20_000


@pytest.fixture
def late(fake: Fake) -> Fake:
    """The fake driver, whose work starts late."""
    fake.delay(DELAY_US)
    return fake


@pytest.fixture
def region(late: Fake) -> Iterator[DeviceRegion]:
    late.delay(0)
    made = DeviceRegion.create(7, SIZE, device(0))
    late.delay(DELAY_US)
    yield made
    made.close()
    settle(device(0))


def fill(region: DeviceRegion, value: int, stream: int) -> None:
    """Queue what sets the first bytes of a region."""
    with region.device as here:
        here.driver.cuMemsetD8Async(region.address, value, SIZE, stream)


def peek(region: DeviceRegion) -> int:
    """The first byte as it is now: memory of the fake is the processor's."""
    return ctypes.c_uint8.from_address(region.address).value


def nobody(_: object) -> None:
    """Takes back a block."""


def block(region: DeviceRegion, lane: Lane | None = None) -> DeviceLease:
    return region.lease(0, SIZE, nobody, "block", lane)
