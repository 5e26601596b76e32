"""Many callers, tensors of all sizes, and a stub that is killed every second:   python -m tests.card.soak

At the end, this process has as many descriptors, addresses and bytes of the device as before, and every answer was
right or an error.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.card import figures
from tests.card.results import record, recorded, share

_CALLERS, _INSTANCES = 16, 4
_SIZES = (16, 4 << 10, 1 << 20, 1 << 24, 1 << 26)
# Loads, the return of killed stubs and `_SETTLE_S` take the rest of the stage's limit.
_SOAK_S = 8.0
# Until a request is given up. Nothing may take as long.
_ASK_S = 5.0
# What a request may end with after its stub was killed; other errors are failures.
_DEATHS = ("StubDied", "ModelUnavailable", "CudaError")
# Regions that nobody uses are given back after seconds, and processes take their time to end.
_SETTLE_S = 7.0
MIB = 1 << 20


class Soak:
    """The callers and what became of their requests."""

    def __init__(self, runtime: Any, sizes: list[int]) -> None:
        self._runtime, self._sizes = runtime, sizes
        self._is_over = threading.Event()
        self.counts: Counter[str] = Counter()
        # The first one that is no death of a stub.
        self.first_error = ""
        self._lock = threading.Lock()

    def run(self, seconds: float) -> int:
        """Have all callers ask for so long, and kill a stub every second. Returns the number of callers that do not
        come back.
        """
        self._is_over.clear()
        # A caller that waits in the driver must not hold up the results.
        callers = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(_CALLERS)]
        for each in callers:
            each.start()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._is_over.wait(min(1.0, seconds / 4))
            self._kill_one()
        self._is_over.set()
        ends = time.monotonic() + _ASK_S
        for each in callers:
            each.join(max(0.0, ends - time.monotonic()))
        return sum(each.is_alive() for each in callers)

    def _kill_one(self) -> None:
        alive = [each["pid"] for each in self._runtime.instances("m") if each["pid"]]
        if alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(alive), signal.SIGKILL)
                self._count("kills")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _call(self, number: int) -> None:
        import moonpool

        chance = random.Random(number)
        while not self._is_over.is_set():
            size, value = chance.choice(self._sizes), chance.randrange(256)
            try:
                x = self._input(chance, size, value)
                wanted = chance.choice([None, "cpu"])
                y = self._runtime.infer("m", {"X": x}, timeout_s=_ASK_S, outputs_in=wanted)["Y"]
                array = y.to_host() if isinstance(y, moonpool.DeviceArray) else y
            except Exception as error:
                self._count(type(error).__name__)
                if type(error).__name__ not in _DEATHS:
                    self.first_error = self.first_error or f"{type(error).__name__}: {error}"
                continue
            if array.shape != (size,) or not (array == value).all():
                self._count("wrong answers")
            self._count("answers")

    def _input(self, chance: random.Random, size: int, value: int) -> Any:
        if chance.randrange(3) == 0:
            return np.full(size, value, np.uint8)
        x = self._runtime.empty("m", "X", (size,), device=0)
        x.settle()
        x.device.fill(x.address, value, size)
        return x


def held() -> dict[str, float]:
    """Return what this process holds, and what all processes hold of the device."""
    from moonpool.ipc.cuda.device import device

    gc.collect()
    here = device(0)
    here.tidy()
    free, total = here.memory_info()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "GiB of addresses": int(Path("/proc/self/statm").read_text().split()[0])
        * os.sysconf("SC_PAGE_SIZE") / (1 << 30),
        "MiB of the device": (total - free) / MIB,
    }  # fmt: skip


# What may be more at the end: a region that an instance did not need before, a thread and its stack, a line of the
# allocator's. A descriptor for each stub that was killed would be more.
_MORE = {"descriptors": 2 * _INSTANCES, "mappings": 200, "GiB of addresses": 4, "MiB of the device": 256}


def _settled(before: dict[str, float]) -> dict[str, float]:
    """Return what is held when it is no more than before, or after a while."""
    began = time.monotonic()
    while True:
        now, waited_s = held(), time.monotonic() - began
        grown = {name: now[name] - before[name] for name in now}
        is_little = all(by <= _MORE[name] for name, by in grown.items())
        if max(grown.values()) <= 0 or waited_s > _SETTLE_S * (share() if is_little else 1):
            return now
        time.sleep(0.2)


def main() -> None:
    """Soak this process."""
    import moonpool
    from moonpool.benchmarks.suites import gpu
    from moonpool.ipc.cuda.device import device
    from moonpool.runtime.model.gpus import usable_gpus

    gpus, why = usable_gpus()
    if not gpus:
        record("a GPU", False, text=why)
        return
    logging.getLogger("moonpool").setLevel(logging.CRITICAL)
    is_fake = figures.is_fake(device(0).name)
    # All callers, and all instances besides, may have one of the largest.
    most = device(0).memory_info()[0] // (4 * (_CALLERS + _INSTANCES))
    sizes = [size for size in _SIZES if size <= most]
    seconds = _SOAK_S * share()
    again: dict[str, Any] = {"MOONPOOL_MAX_RESTARTS": 100_000, "MOONPOOL_RESTART_BACKOFF_S": 0}
    with moonpool.Runtime(drain_timeout_s=1) as runtime, recorded("soak"):
        given = gpu.config(on_device=True, count=_INSTANCES, **again)
        runtime.load("m", gpu.MODELS / "device_identity.py", config=given)
        soak = Soak(runtime, sizes)
        # Whatever is made once is made by then.
        hanging = soak.run(seconds / 4)
        _until_ready(runtime)
        first = held()
        hanging = hanging or soak.run(seconds)
        record("callers that do not come back", not hanging, hanging, "callers", "0")
        _report_requests(soak)
        _until_ready(runtime)
        _report_growth(first, _settled(first))
    if is_fake:
        record("device memory of other processes", None, text="the fake driver does not count it")


def _until_ready(runtime: Any) -> None:
    ends = time.monotonic() + _ASK_S
    while any(each["state"] != "READY" for each in runtime.instances("m")):
        if time.monotonic() > ends:
            raise TimeoutError(f"not all instances are back: {runtime.instances('m')}")
        time.sleep(0.02)


def _report_requests(soak: Soak) -> None:
    counts = soak.counts
    record("requests that were answered", counts["answers"] > 0, counts["answers"], "requests",
           text=", ".join(f"{what}: {count}" for what, count in counts.items()))  # fmt: skip
    record("wrong answers", counts["wrong answers"] == 0, counts["wrong answers"], "requests", "0")
    others = sum(count for what, count in counts.items() if what[0].isupper() and what not in _DEATHS)
    record("errors that are no death of a stub", not others, others, "requests", "0", soak.first_error)
    record("stubs killed", counts["kills"] > 0, counts["kills"], "stubs")


def _report_growth(first: dict[str, float], last: dict[str, float]) -> None:
    for name, value in last.items():
        grown, most = value - first[name], _MORE[name]
        words = f"{first[name]:.4g} before, {value:.4g} after"
        record(
            f"more {name} at the end", grown <= most, float(f"{grown:.4g}"), name, f"at most {most}", words
        )  # fmt: skip


if __name__ == "__main__":
    with recorded("soak"):
        main()
