"""Closes what a stub leaves to the end of its process."""

from __future__ import annotations

from moonpool.stub.peers.regions import Regions


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
