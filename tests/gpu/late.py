"""A device on which single pieces of work are late, so that what does not wait for them goes wrong every time.

All other work is done as soon as its stream comes to it, so code that forgets to wait reads too early. The fake driver
starts a piece of work late; a card is given much to do before it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.gpu.cards import Fake, settle

from moonpool.ipc.cuda import driver
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion

SIZE = 4096
LATE_US = 150_000
# A card is busy for so long, with no more pieces of work than a stream takes without waiting.
BUSY_S, MOST_ROUNDS = 0.3, 800
BUSY_BYTES = 2 << 30
_busy: dict[int, Busy] = {}


class Busy:
    """Work for a card: memory that is written again and again."""

    def __init__(self, where: Device) -> None:
        self._where = where
        self._bytes = min(BUSY_BYTES, where.memory_info()[0] // 8)
        address, stream = ctypes.c_ulonglong(), where.new_stream()
        with where:
            where.driver.cuMemAlloc_v2(ctypes.byref(address), self._bytes)
        self._address = address.value
        self._rounds = 0
        for self._rounds in (1, 8):
            begun = time.perf_counter()
            self.start(stream)
            where.finish(stream)
            took_s = time.perf_counter() - begun
        where.close_stream(stream)
        self._rounds = min(MOST_ROUNDS, int(8 * BUSY_S / took_s) + 1)

    def start(self, stream: int) -> None:
        """Queue it."""
        with self._where:
            for _ in range(self._rounds):
                self._where.driver.cuMemsetD8Async(self._address, 0, self._bytes, stream)


def is_fake(where: Device) -> bool:
    """Return true if the device belongs to the fake driver."""
    return where.name.startswith("Fake GPU")


@contextmanager
def late(where: Device, stream: int) -> Iterator[None]:
    """Delay the work that is queued on the stream within the block."""
    if is_fake(where):
        fake = ctypes.CDLL(driver.LIBRARY)
        fake.fakeDelay(ctypes.c_long(LATE_US), 0)
        try:
            yield
        finally:
            fake.fakeDelay(ctypes.c_long(0), 0)
        return
    if where.ordinal not in _busy:
        _busy[where.ordinal] = Busy(where)
    _busy[where.ordinal].start(stream)
    yield


@pytest.fixture
def very_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay work of the fake driver for so long that a busy machine, too, looks before it is done."""
    monkeypatch.setitem(globals(), "LATE_US", 10 * LATE_US)


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
    """Count the times this process has waited for the device; always 0 for a card, which does not count them."""
    if not is_fake(where):
        return 0
    fake = Fake(Path(driver.LIBRARY))
    return fake.calls("cuEventSynchronize") + fake.calls("cuStreamSynchronize")


def nobody(_: object) -> None:
    """Takes back a block."""


def block(region: DeviceRegion, lane: DeviceLane | None = None) -> DeviceLease:
    """A lease on all that tests look at."""
    return region.lease(0, SIZE, nobody, "block", lane)
