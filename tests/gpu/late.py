"""A device on which single pieces of work start late, so that what does not wait for them goes wrong every time.

All other work is done at once: whoever forgets to wait is always too early.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.gpu.cards import Fake, settle

from moonpool.ipc.cuda import driver
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion

SIZE = 4096
LATE_US = 150_000


@contextmanager
def late() -> Iterator[None]:
    """What is queued meanwhile starts late. The fake driver alone can do that."""
    fake = ctypes.CDLL(driver.LIBRARY)
    fake.fakeDelay(ctypes.c_long(LATE_US), 0)
    try:
        yield
    finally:
        fake.fakeDelay(ctypes.c_long(0), 0)


@pytest.fixture
def region(fake: Fake) -> Iterator[DeviceRegion]:  # noqa: ARG001 - it drives the device
    made = DeviceRegion.create(7, SIZE, device(0))
    yield made
    made.close()
    settle(device(0))


def fill(region: DeviceRegion, value: int, stream: int) -> None:
    """Queue what sets the first bytes of a region, late."""
    with late(), region.device as here:
        here.driver.cuMemsetD8Async(region.address, value, SIZE, stream)


def fill_at_once(region: DeviceRegion, value: int, stream: int) -> None:
    """Queue what sets the first bytes of a region as soon as the stream comes to it."""
    with region.device as here:
        here.driver.cuMemsetD8Async(region.address, value, SIZE, stream)


def peek(region: DeviceRegion) -> int:
    """The first byte as it is now: memory of the fake is the processor's."""
    return ctypes.c_uint8.from_address(region.address).value


def nobody(_: object) -> None:
    """Takes back a block."""


def block(region: DeviceRegion, lane: Lane | None = None) -> DeviceLease:
    """A lease on all that tests look at."""
    return region.lease(0, SIZE, nobody, "block", lane)
