"""A device on which single pieces of work are late, so that what does not wait for them goes wrong every time.

All other work is done as soon as its stream comes to it: whoever forgets to wait is too early. The fake driver starts a piece of work
late; a card is given much to do before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.gpu.cards import Fake, settle

from moonpool.ipc.cuda import driver
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion

SIZE = 4096
LATE_US = 150_000
# On a card: so many times so many bytes, which takes 50 ms where 4 TB are written in a second, and longer elsewhere.
BUSY_ROUNDS, BUSY_BYTES = 800, 256 << 20
_scratch: dict[int, int] = {}


def is_fake(where: Device) -> bool:
    """Whether this is the fake driver's."""
    return where.name.startswith("Fake GPU")


@contextmanager
def late(where: Device, stream: int) -> Iterator[None]:
    """What is queued on the stream meanwhile is late."""
    if is_fake(where):
        fake = ctypes.CDLL(driver.LIBRARY)
        fake.fakeDelay(ctypes.c_long(LATE_US), 0)
        try:
            yield
        finally:
            fake.fakeDelay(ctypes.c_long(0), 0)
        return
    if where.ordinal not in _scratch:
        address = ctypes.c_ulonglong()
        with where:
            where.driver.cuMemAlloc_v2(ctypes.byref(address), BUSY_BYTES)
        _scratch[where.ordinal] = address.value
    with where:
        for _ in range(BUSY_ROUNDS):
            where.driver.cuMemsetD8Async(_scratch[where.ordinal], 0, BUSY_BYTES, stream)
    yield


@pytest.fixture
def region(gpu: Device) -> Iterator[DeviceRegion]:
    """Memory on a device, the fake one or a card."""
    yield from _region(gpu)


@pytest.fixture
def fake_region(fake: Fake) -> Iterator[DeviceRegion]:  # noqa: ARG001 - it drives the device
    """Memory on the fake device alone."""
    yield from _region(device(0))


def _region(where: Device) -> Iterator[DeviceRegion]:
    made = DeviceRegion.create(7, SIZE, where)
    yield made
    made.close()
    settle(where)


def fill(region: DeviceRegion, value: int, stream: int) -> None:
    """Queue what sets the first bytes of a region, late."""
    with late(region.device, stream):
        fill_at_once(region, value, stream)


def fill_at_once(region: DeviceRegion, value: int, stream: int) -> None:
    """Queue what sets the first bytes of a region as soon as the stream comes to it."""
    with region.device as here:
        here.driver.cuMemsetD8Async(region.address, value, SIZE, stream)


def peek(region: DeviceRegion) -> int:
    """The first byte as it is now, whatever is still to be done to it."""
    return region.read(0, 1)[0]


def host_waits(where: Device) -> int:
    """How often this process has waited for the device so far; always 0 for a card, which does not say."""
    if not is_fake(where):
        return 0
    fake = Fake(Path(driver.LIBRARY))
    return fake.calls("cuEventSynchronize") + fake.calls("cuStreamSynchronize")


def nobody(_: object) -> None:
    """Takes back a block."""


def block(region: DeviceRegion, lane: Lane | None = None) -> DeviceLease:
    """A lease on all that tests look at."""
    return region.lease(0, SIZE, nobody, "block", lane)
