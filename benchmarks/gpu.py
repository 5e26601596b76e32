"""Tensors on a GPU there and back: by handle, through ordinary memory, by torch, and no tensor at all."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import moonpool
from benchmarks.hosted import MODELS, option
from benchmarks.peer.event_ping_pong import EventPingPong
from benchmarks.peer.peer import Unavailable
from benchmarks.peer.torch_device_queues import TorchDeviceQueues
from benchmarks.report import Report, main
from benchmarks.rounds import calls_in_turns
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.runtime.model.gpus import usable_gpus

SIZES = {
    "16 B": 16,
    "1 MB": 1 << 20,
    "16 MB": 1 << 24,
    "256 MB": 1 << 28,
    "1 GB": 1 << 30,
}
_QUICK = ("16 B", "1 MB")
# Larger tensors through ordinary memory show nothing new, and take long.
_LARGEST_COPIED = 1 << 28
_GOAL_SMALL = "at most 1.5"
_GOAL_LARGE = "1"


def config(*, on_device: bool) -> dict[str, Any]:
    """Return the configuration of the identity model, which gets device arrays as such or in ordinary memory."""
    tensor = {"data_type": "TYPE_UINT8", "dims": [-1]}
    return {
        "input": [{"name": "X", **tensor}],
        "output": [{"name": "Y", **tensor}],
        "instance_group": [{"kind": "KIND_GPU", "gpus": [0]}],
        "parameters": {"FORCE_CPU_ONLY_INPUT_TENSORS": option("no" if on_device else "yes")},
    }


class Foreign:
    """An array of another library."""

    def __init__(self, where: Device, size_bytes: int) -> None:
        self.region = DeviceRegion.create(1, size_bytes, where)
        self.region.forget_fd()
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self.region.address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


class Trips:
    """The calls that are timed, for a runtime with the identity in both ways."""

    def __init__(self, runtime: moonpool.Runtime, where: Device) -> None:
        self._runtime, self._where = runtime, where
        for name in ("handles", "bytes"):
            runtime.load(
                name, MODELS / "device_identity.py", config=config(on_device=name == "handles")
            )

    def by_handle(self, size: int) -> Callable[[], object]:
        """Call from the device to the model and back by handle alone, without a copy."""
        x = self._runtime.empty("handles", "X", (size,), device=0)
        return lambda: self._runtime.infer("handles", {"X": x})

    def in_ordinary_memory(self, size: int) -> Callable[[], object]:
        """Call without a device: the array is in ordinary memory all the time."""
        x = np.ones(size, np.uint8)
        return lambda: self._runtime.infer("handles", {"X": x})

    def through_ordinary_memory(self, size: int) -> Callable[[], object]:
        """Call from the device to a model that takes ordinary memory, and copy back to the device."""
        x = self._runtime.empty("handles", "X", (size,), device=0)
        back = self._runtime.empty("handles", "X", (size,), device=0)

        def call() -> None:
            y = self._runtime.infer("bytes", {"X": x})["Y"]
            self._where.write(back.address, y)

        return call

    def copied(self, size: int) -> Callable[[], object]:
        """Call with an array that another library made on the device, until the copy of its output is done."""
        x = Foreign(self._where, size)

        def call() -> None:
            y = self._runtime.infer("handles", {"X": x})["Y"]
            if isinstance(y, moonpool.DeviceArray):
                y.settle()

        return call


def measure(report: Report, quick: bool) -> None:
    """Trips by size, and copies on the card."""
    gpus, why_none = usable_gpus()
    if not gpus:
        report.skipped("everything", why_none)
        return
    where = device(0)
    report.note(f"{where.name}; {_driver()}.")
    rounds, calls = (1, 2) if quick else (10, 50)
    # The card holds a tensor and its answer, and as much again for the libraries to compare with.
    most = where.memory_info()[0] // 16
    sizes = {
        name: size for name, size in SIZES.items() if size <= most and (not quick or name in _QUICK)
    }
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(moonpool.Runtime())
        trips = Trips(runtime, where)
        events = EventPingPong(where)
        stack.callback(events.close)
        queues = _queues(report, stack, where, list(sizes.values()))
        small: Mapping[str, Any] = {}
        for name, size in sizes.items():
            cases: dict[str, Callable[[], object]] = {
                "by handle": trips.by_handle(size),
                "events alone": events,
            }
            if size <= _LARGEST_COPIED:
                cases["through ordinary memory"] = trips.through_ordinary_memory(size)
            if size == SIZES["16 B"]:
                cases["on the CPU"] = trips.in_ordinary_memory(size)
            if queues is not None:
                cases["torch.multiprocessing"] = _sent(queues, size)
            found = calls_in_turns(cases, rounds, calls if size < _LARGEST_COPIED else 10)
            small = small or found
            _report(report, name, found, small)
        _bandwidth(report, trips, where, max(sizes.values()), *((1, 1) if quick else (10, 5)))
    if not events.shares_events:
        report.note("Events could not be shared: both processes waited for their own work.")
    report.note("A trip is over when the caller has the answer; nobody waited for the device.")
    report.note("Through ordinary memory: two copies, and the caller's wait for them.")


def _sent(queues: TorchDeviceQueues, size: int) -> Callable[[], object]:
    return lambda: queues.call(size)


def _queues(
    report: Report, stack: contextlib.ExitStack, where: Device, sizes: list[int]
) -> TorchDeviceQueues | None:
    try:
        queues = TorchDeviceQueues(where.ordinal, sizes)
    except Unavailable as error:
        report.skipped("torch.multiprocessing", str(error))
        return None
    stack.callback(queues.close)
    return queues


def _report(report: Report, size: str, found: Mapping[str, Any], small: Mapping[str, Any]) -> None:
    for case, series in found.items():
        report.figure(
            f"there and back, {case}",
            "µs",
            series.values,
            column=size,
            headline=case == "by handle",
        )
    handle = found["by handle"]
    for case, series in found.items():
        if case != "by handle":
            goal = _GOAL_SMALL if case == "on the CPU" else ""
            ratio = handle.over(series)
            report.ratio(f"by handle over {case}", ratio, column=size, goal=goal, headline=True)
    if found is not small:
        ratio = handle.over(small["by handle"])
        report.ratio(
            "by handle over 16 B by handle", ratio, column=size, goal=_GOAL_LARGE, headline=True
        )


def _bandwidth(
    report: Report, trips: Trips, where: Device, size: int, rounds: int, calls: int
) -> None:
    """Measure bytes a second of a trip with one copy on the card, beside the bare copy."""
    lane = Lane(where)
    source, target = DeviceRegion.create(1, size, where), DeviceRegion.create(2, size, where)

    def copy() -> None:
        lane.copy(target.address, source.address, size)
        lane.finish()

    cases = {"an array that is not moonpool's": trips.copied(size), "a copy alone": copy}
    found = calls_in_turns(cases, rounds, calls)
    for case, series in found.items():
        rates = [size / 1e3 / us for us in series.values]
        report.figure(f"copied on the card, {case}", "GB/s", rates, column=_words(size))
    mine, alone = found.values()
    report.ratio(
        "time of an array that is not moonpool's over a copy alone",
        mine.over(alone),
        column=_words(size),
        headline=True,
    )
    for region in (source, target):
        region.close()


def _words(size: int) -> str:
    return next(name for name, each in SIZES.items() if each == size)


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    except FileNotFoundError:
        said = []
    return f"driver {said[0]}" if said else "the driver's version is not known"


if __name__ == "__main__":
    main("gpu", "What does a tensor on a GPU cost on its way to a model and back?", measure)
