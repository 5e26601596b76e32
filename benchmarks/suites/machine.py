"""The machine, and the load of other programs on it: a figure means little without either."""

from __future__ import annotations

import datetime
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

# The run queue is read so many times, with this pause between, in 0.3 s.
_LOOKS = 20
_PAUSE_S = 0.015


def facts() -> dict[str, object]:
    """CPU, cores, kernel, versions and date."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.machine()


class Noise(NamedTuple):
    """Load by other programs while this process was quiet."""

    load: float
    # Mean number of tasks that ran or were ready to run, without this one.
    others: float
    # Part of the time that the hypervisor gave to other virtual machines.
    stolen: float

    @property
    def is_noisy(self) -> bool:
        """True if figures that are taken now are less reliable."""
        return self.others > 0.3 or self.stolen > 0.02


def listen(looks: int = _LOOKS) -> Noise:
    """Measure for a moment the load of other programs, while this process does nothing."""
    stolen, total = _stolen_and_total()
    running = 0
    for _ in range(looks):
        running += int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
        time.sleep(_PAUSE_S)
    stolen_after, total_after = _stolen_and_total()
    part = (stolen_after - stolen) / max(1, total_after - total)
    return Noise(round(os.getloadavg()[0], 2), round(running / looks, 2), round(part, 3))


def _stolen_and_total() -> tuple[int, int]:
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)
