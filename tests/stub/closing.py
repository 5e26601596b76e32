"""Closes what a stub leaves to the end of its process, and finds what it must not leave at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moonpool.ipc.arena import Block
from moonpool.stub.peers.regions import Regions


def apart(work: Callable[[], object]) -> None:
    """Do something on another thread, which would wait for ever for a lock that this one has kept."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), "a lock was kept"


def blocks_left(regions: Regions) -> list[Block]:
    """Return the blocks that somebody holds, after an allocation, which takes in all that came back."""
    made: list[Block] = []
    apart(lambda: regions.allocate(64, taken=made))
    regions.take_back(made)
    return [each for each in regions.arena.blocks() if each not in made]


def close_regions(regions: Regions) -> None:
    """Close all regions and device lanes. Arrays stay valid."""
    devices = regions.devices
    arenas = [regions.arena] if devices is None else [regions.arena, *devices.arenas()]
    for arena in arenas:
        for region in arena.regions():
            region.close()
    for region in regions.requests.values():
        region.close()
    for lane in () if devices is None else devices._lanes.copy().values():
        lane.close()
