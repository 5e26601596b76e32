"""Lower bounds of this machine for any design: a packet there and back, a copy, an interpreter with numpy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moonpool.benchmarks.suites.placement import placed, placements
from moonpool.benchmarks.suites.process_start import start_us
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import calls_in_turns, in_turns, time_us
from moonpool.runtime.cli.demo import PingPong

SIZES = {"4 KB": 1 << 12, "1 MB": 1 << 20, "16 MB": 1 << 24, "64 MB": 1 << 26}


def shared_bytes(size_bytes: int) -> NDArray[np.uint8]:
    """Memory as it lies in a region: shared, mapped, and touched once."""
    fd = os.memfd_create("benchmark")
    try:
        os.ftruncate(fd, size_bytes)
        array = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    finally:
        os.close(fd)
    array[:] = 1
    return array


def copy_of(size_bytes: int) -> Callable[[], object]:
    """A copy of that size from ordinary memory into shared memory, both warm."""
    source, target = np.ones(size_bytes, np.uint8), shared_bytes(size_bytes)
    return lambda: np.copyto(target, source)


def measure(report: Report, quick: bool) -> None:
    """Ping-pong by placement, copies by size, starts of interpreters."""
    with PingPong() as peer:
        for placement in placements():
            with placed(placement, [peer.pid]):
                for _ in range(10 if quick else 1000):
                    peer()
                times = time_us(peer, 50 if quick else 20_000)
            name = f"SEQPACKET ping-pong, {placement.name}"
            report.figure(name, "µs", times, headline=True)
    copies = {name: copy_of(size) for name, size in SIZES.items()}
    for name, copied in calls_in_turns(copies, *((1, 1) if quick else (10, 10))).items():
        report.figure(f"memcpy into warm shared memory, {name}", "µs", copied.values)
    programs = {"pass": lambda: [start_us("pass")], "import numpy": lambda: [start_us()]}
    for name, starts in in_turns(programs, 1 if quick else 20).items():
        milliseconds = [value / 1000 for value in starts.values]
        report.figure(f'python -c "{name}", start to end', "ms", milliseconds)


if __name__ == "__main__":
    main("floor", "What can no design on this machine beat?", measure)
