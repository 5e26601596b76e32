"""Tensors on a GPU there and back: by handle, through ordinary memory, by torch, and no tensor at all; and what happens
around them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import moonpool
from moonpool.benchmarks.callers import measure as press
from moonpool.benchmarks.suites.figure import counted
from moonpool.benchmarks.suites.hosted import MODELS as MODELS
from moonpool.benchmarks.suites.hosted import RESTARTS, first_answer_ms, option
from moonpool.benchmarks.suites.peer.event_ping_pong import EventPingPong
from moonpool.benchmarks.suites.peer.peer import Unavailable
from moonpool.benchmarks.suites.peer.ways import TorchDeviceQueues
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import Series, calls_in_turns, in_turns
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.runtime.model.gpus import usable_gpus
from moonpool.runtime.model.states import Residence
from moonpool.runtime.schedule.lane import IS_COMPILED as IS_COMPILED

QUESTION = "What does a tensor on a GPU cost on its way to a model and back?"
SIZES = {"16 B": 16, "1 MB": 1 << 20, "16 MB": 1 << 24, "256 MB": 1 << 28, "1 GB": 1 << 30}
SMALL = "16 B"
_QUICK = (SMALL, "1 MB")
# Larger tensors through ordinary memory show nothing new, and take long.
_LARGEST_COPIED = 1 << 28
_WEIGHTS_BYTES = 10_000_000_000
_TIMEOUT_S = 20.0
# Each part asks nvidia-smi first, and must not spend its time on that.
_ASK_S = 3.0
_MOST_ROUNDS = 40
# A form of the code is part of a figure's name, as both may be in one table.
_FORM = "" if IS_COMPILED else ", pure Python"


class Pace(NamedTuple):
    """Time of a part: no round begins after `most_s`."""

    most_s: float
    quick: bool = False

    @property
    def rounds(self) -> int:
        return 1 if self.quick else _MOST_ROUNDS

    def part(self, share: float) -> Pace:
        """A part of the time."""
        return self._replace(most_s=self.most_s * share)

    def calls(self, size: int) -> int:
        """Calls of a round with so many bytes."""
        if self.quick:
            return 2
        return 50 if size <= 1 << 20 else 10 if size <= 1 << 24 else 3


def config(*, on_device: bool, kind: str = "GPU", count: int = 1, **options: Any) -> Any:
    """Return the configuration of the identity model, which gets device arrays as such or in ordinary memory."""
    tensor = {"data_type": "TYPE_UINT8", "dims": [-1]}
    return {
        "input": [{"name": "X", **tensor}],
        "output": [{"name": "Y", **tensor}],
        "instance_group": [{"kind": f"KIND_{kind}", "count": count, **({"gpus": [0]} if kind == "GPU" else {})}],
        "parameters": {
            "FORCE_CPU_ONLY_INPUT_TENSORS": option("no" if on_device else "yes"),
            **{key: option(value) for key, value in options.items()},
        },
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
    """The calls that are timed, of models in a runtime."""

    def __init__(self, runtime: moonpool.Runtime, where: Device) -> None:
        self.runtime, self.where = runtime, where

    def load(self, name: str, **given: Any) -> None:
        """Load the identity under this name."""
        given = {"on_device": True, **given}
        self.runtime.load(name, MODELS / "device_identity.py", config=config(**given))

    def by_handle(self, size: int, model: str = "handles") -> Callable[[], object]:
        """Call from the device to the model and back by handle alone, without a copy."""
        x = self.runtime.empty(model, "X", (size,), device=0)
        return lambda: self.runtime.infer(model, {"X": x}, timeout_s=_TIMEOUT_S)

    def in_ordinary_memory(self, size: int, model: str = "handles") -> Callable[[], object]:
        """Call without a device: the array is in ordinary memory all the time."""
        x = np.ones(size, np.uint8)
        return lambda: self.runtime.infer(model, {"X": x}, timeout_s=_TIMEOUT_S)

    def through_ordinary_memory(self, size: int) -> Callable[[], object]:
        """Call from the device to a model that takes ordinary memory, and copy back to the device."""
        x = self.runtime.empty("handles", "X", (size,), device=0)
        back = self.runtime.empty("handles", "X", (size,), device=0)

        def call() -> None:
            y = self.runtime.infer("bytes", {"X": x}, timeout_s=_TIMEOUT_S)["Y"]
            self.where.write(back.address, y)

        return call

    def copied(self, size: int, model: str = "handles") -> Callable[[], object]:
        """Call with an array that another library made on the device, until the copy of its output is done."""
        x = Foreign(self.where, size)

        def call() -> None:
            y = self.runtime.infer(model, {"X": x}, timeout_s=_TIMEOUT_S)["Y"]
            if isinstance(y, moonpool.DeviceArray):
                y.settle()

        return call


class BareCopy:
    """A copy on the device that nothing else has to do with, until it is done."""

    def __init__(self, where: Device, size: int) -> None:
        self._lane, self._size = DeviceLane(where), size
        self._regions = [DeviceRegion.create(number, size, where) for number in (1, 2)]

    def __call__(self) -> None:
        source, target = self._regions
        self._lane.copy(target.address, source.address, self._size)
        self._lane.finish()

    def close(self) -> None:
        for region in self._regions:
            region.close()


def sizes_on(where: Device, pace: Pace) -> dict[str, int]:
    """Return the sizes for which a device has room several times over."""
    most = where.memory_info()[0] // 16
    return {name: size for name, size in SIZES.items() if size <= most and (not pace.quick or name in _QUICK)}


# The parts


def by_size(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """Trips by size, beside the same on the CPU, through ordinary memory, and beside what no design could do
    without.
    """
    trips = Trips(runtime, where)
    trips.load("handles")
    trips.load("bytes", on_device=False)
    sizes = sizes_on(where, pace)
    with contextlib.ExitStack() as stack:
        events = _events(report, stack, where)
        for name, size in sizes.items():
            with _tried(report, f"there and back{_FORM}, {name}"):
                _by_size(report, trips, events, (name, size), pace.part(0.75 / len(sizes)))
        # Copies of a size that keeps the card busy for long enough.
        name = max((name for name in sizes if sizes[name] <= _LARGEST_COPIED), key=sizes.__getitem__)
        with _tried(report, f"copied on the card{_FORM}, {name}"):
            _copies(report, trips, name, pace.part(0.25))
    if events is not None and not events.shares_events:
        report.note("Events could not be shared: both processes waited for their own work.")
    report.note("A trip is over when the caller has the answer; nobody waited for the device.")
    report.note("Through ordinary memory: two copies, and the caller's wait for them.")


def _events(report: Report, stack: contextlib.ExitStack, where: Device) -> EventPingPong | None:
    try:
        events = EventPingPong(where)
    except (moonpool.MoonpoolError, OSError) as error:
        report.failed(f"there and back{_FORM}, events alone", f"{type(error).__name__}: {error}")
        return None
    stack.callback(events.close)
    return events


def _by_size(report: Report, trips: Trips, events: EventPingPong | None, named: tuple[str, int], pace: Pace) -> None:
    name, size = named
    alone = BareCopy(trips.where, size)
    cases: dict[str, Callable[[], object]] = {"by handle": trips.by_handle(size), "a copy alone": alone}
    if events is not None:
        cases["events alone"] = events
    if size <= _LARGEST_COPIED:
        cases["through ordinary memory"] = trips.through_ordinary_memory(size)
    if name == SMALL:
        cases["on the CPU"] = trips.in_ordinary_memory(size)
    else:
        cases[_AS_SMALL] = trips.by_handle(SIZES[SMALL])
    try:
        found = calls_in_turns(cases, pace.rounds, pace.calls(size), pace.most_s)
    finally:
        alone.close()
    _report(report, name, found)


_AS_SMALL = f"{SMALL} by handle"
# What a trip by handle is compared with, and the ratio to reach.
_GOALS = {
    "on the CPU": "at most 1.5",
    "events alone": "at most 1.3",
    "through ordinary memory": "at most 1",
    "torch.multiprocessing": "at most 1",
    _AS_SMALL: "at most 1.05",
}


def _report(report: Report, size: str, found: Mapping[str, Series]) -> None:
    handle = found["by handle"]
    for case, series in found.items():
        if case != _AS_SMALL:
            report.figure(
                f"there and back{_FORM}, {case}", "µs", series.values, column=size, headline=case == "by handle"
            )
    for case, series in found.items():
        if case != "by handle":
            report.ratio(
                f"by handle over {case}{_FORM}",
                handle.over(series),
                column=size,
                goal=_GOALS.get(case, ""),
                headline=True,
            )


def _copies(report: Report, trips: Trips, name: str, pace: Pace) -> None:
    """Measure bytes a second of a trip with one copy on the card, beside the bare copy."""
    size = SIZES[name]
    alone = BareCopy(trips.where, size)
    cases: dict[str, Callable[[], object]] = {
        "an array that is not moonpool's": trips.copied(size),
        "a copy alone": alone,
    }
    try:
        found = calls_in_turns(cases, pace.rounds, 1 if pace.quick else 5, pace.most_s)
    finally:
        alone.close()
    for case, series in found.items():
        rates = [size / 1e3 / us for us in series.values]
        report.figure(f"copied on the card{_FORM}, {case}", "GB/s", rates, column=name)
    mine, bare = found.values()
    report.ratio(
        f"bytes a second of an array that is not moonpool's over a copy alone{_FORM}",
        bare.over(mine),
        column=name,
        goal="at least 0.9",
        headline=True,
    )


def by_form(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """Small trips alone, which are those that depend on whether moonpool's compiled forms are in use."""
    trips = Trips(runtime, where)
    trips.load("handles")
    for name in _QUICK:
        cases = {"by handle": trips.by_handle(SIZES[name]), "on the CPU": trips.in_ordinary_memory(SIZES[name])}
        with _tried(report, f"there and back{_FORM}, {name}"):
            found = calls_in_turns(cases, pace.rounds, pace.calls(16), pace.most_s / len(_QUICK))
            _report(report, name, found)


def beside_torch(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """Trips beside those of tensors over a queue of torch.multiprocessing."""
    trips, sizes = Trips(runtime, where), sizes_on(where, pace)
    trips.load("handles")
    name = "torch.multiprocessing"
    try:
        queues = TorchDeviceQueues(where.ordinal, [*sizes.values()])
    except Unavailable as error:
        report.skipped(name, str(error))
        return
    with contextlib.closing(queues), _tried(report, name):
        for column, size in sizes.items():
            cases = {"by handle": trips.by_handle(size), name: _sent(queues, size)}
            share = pace.part(1 / len(sizes))
            found = calls_in_turns(cases, share.rounds, min(20, share.calls(size)), share.most_s)
            _report(report, column, found)


def _sent(queues: TorchDeviceQueues, size: int) -> Callable[[], object]:
    return lambda: queues.call(size)


def by_callers(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """Requests a second of 1, 4 and 16 callers, with 1 and 4 instances: by handle, and with a copy that the card has to
    make.
    """
    trips = Trips(runtime, where)
    size = min(1 << 24, max(sizes_on(where, pace).values()))
    kinds = {"by handle": (trips.by_handle, 16), "one copy": (trips.copied, size)}
    callers = (1, 4) if pace.quick else (1, 4, 16)
    cases: dict[tuple[str, int, int], Callable[[], list[float]]] = {}
    window_s = 0.05 if pace.quick else max(0.05, min(0.3, pace.most_s / 40))
    for instances in (1, 4):
        trips.load(f"of_{instances}", count=instances)
        for kind, (make, size_bytes) in kinds.items():
            call = make(size_bytes, f"of_{instances}")
            for count in callers:
                cases[kind, instances, count] = partial(_rates, call, count, window_s)
    found = in_turns(cases, 1 if pace.quick else 10, pace.most_s)
    for (kind, instances, count), series in found.items():
        what, column = f"{kind}, {counted(instances, 'instance')}", counted(count, "caller")
        report.figure(what, "requests/s", series.values, column=column, headline=True)
        if count == callers[-1]:
            ratio = series.over(found[kind, instances, 1])
            goal = "at least 1" if instances > 1 else ""
            report.ratio(f"{what}, over one caller", ratio, column=column, goal=goal)
    report.note(f"One copy: of {size / 1e6:,.0f} MB there, which the caller waits for.")


def _rates(call: Callable[[], object], callers: int, window_s: float) -> list[float]:
    return [rate(call, callers, window_s)]


def rate(call: Callable[[], object], callers: int, window_s: float) -> float:
    """Return the calls a second of so many threads, each of which calls again and again."""
    found = press(call, callers, window_s)
    if found.failed:
        raise RuntimeError(f"calls failed: {found.errors.most_common(1)}")
    return found.requests_per_s


_STEPS = ("first", "second", "third")


def pipeline(report: Report, _: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """Three models by handle, one after the other and as an ensemble, beside one of them."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        _write_ensemble(Path(folder, "pipeline"))
        with moonpool.Runtime(folder, models=[], drain_timeout_s=1) as runtime:
            _pipeline(report, Trips(runtime, where), pace)


def _pipeline(report: Report, trips: Trips, pace: Pace) -> None:
    runtime, where = trips.runtime, trips.where
    for name in _STEPS:
        trips.load(name)
    size = min(1 << 20, max(sizes_on(where, pace).values()))
    x = runtime.empty("first", "X", (size,), device=0)
    where.fill(x.address, 7, size)

    def three() -> Any:
        y: Any = x
        for name in _STEPS:
            y = runtime.infer(name, {"X": y}, timeout_s=_TIMEOUT_S)["Y"]
        return y

    cases: dict[str, Callable[[], Any]] = {"three models": three}
    if find_spec("tritonclient") is None:
        report.skipped("an ensemble of the three", "tritonclient, which reads it, is not installed")
    else:
        with _tried(report, "an ensemble of the three"):
            runtime.load("pipeline")
            cases["an ensemble of the three"] = lambda: runtime.infer("pipeline", {"X": x}, timeout_s=_TIMEOUT_S)["Y"]
    for case, call in cases.items():
        y = call()
        if not isinstance(y, moonpool.DeviceArray) or not (y.to_host() == 7).all():
            report.failed(case, f"it answered {y!r}")
        del y
    alone = "one of the models"
    cases[alone] = trips.by_handle(size, "first")
    found = calls_in_turns(cases, pace.rounds, pace.calls(size), pace.most_s)
    for case, series in found.items():
        report.figure(case, "µs", series.values, column="1 MB by handle", headline=True)
        if case != alone:
            ratio = series.over(found[alone])
            report.ratio(f"{case} over one", ratio, column="1 MB by handle", goal="at most 3.2", headline=True)


def _write_ensemble(folder: Path) -> None:
    """Write the ensemble of the three models."""
    steps, source = [], "X"
    for name in _STEPS:
        target = "Y" if name == _STEPS[-1] else f"of_{name}"
        steps.append(
            f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "X" value: "{source}" }} '
            f'output_map {{ key: "Y" value: "{target}" }} }}'
        )
        source = target
    (folder / "1").mkdir(parents=True)
    tensor = "data_type: TYPE_UINT8 dims: [ -1 ]"
    (folder / "config.pbtxt").write_text(
        f'platform: "ensemble" input [ {{ name: "X" {tensor} }} ] output [ {{ name: "Y" {tensor} }} ] '
        f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
    )


def strict_beside_standard(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """The same trips at `strict` and at `standard`. Contained models share no events, so each side waits for its own
    work.
    """
    trips = Trips(runtime, where)
    for level in ("standard", "strict"):
        trips.load(level, MOONPOOL_SANDBOX=level, MOONPOOL_ENVIRONMENT="FAKE_*")
    sizes = sizes_on(where, pace)
    for name in (SMALL, "1 MB", "256 MB"):
        if name not in sizes:
            continue
        calls = {
            f"{way}, {level}": make(sizes[name], level)
            for level in ("standard", "strict")
            for way, make in (("by handle", trips.by_handle), ("on the CPU", trips.in_ordinary_memory))
            if way == "by handle" or name == SMALL
        }
        with _tried(report, f"strict beside standard, {name}"):
            found = calls_in_turns(calls, pace.rounds, pace.calls(sizes[name]), pace.most_s / 3)
            for case, series in found.items():
                report.figure(f"there and back, {case}", "µs", series.values, column=name)
            for way in ("by handle", "on the CPU"):
                if f"{way}, strict" in found:
                    ratio = found[f"{way}, strict"].over(found[f"{way}, standard"])
                    report.ratio(f"strict over standard, {way}", ratio, column=name, goal="at most 1.05", headline=True)


_CONTEXT = (
    "from moonpool.ipc.cuda.device import device; import time; "
    "b = time.perf_counter(); device(0); print(time.perf_counter() - b)"
)


def after_a_kill(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """The first good answer after the only stub was killed, on the GPU and on the CPU, beside a first context."""
    trips = Trips(runtime, where)
    trips.load("on_gpu", **RESTARTS)
    trips.load("on_cpu", kind="CPU", **RESTARTS)
    asks = {"on_gpu": trips.by_handle(1 << 20, "on_gpu"), "on_cpu": trips.in_ordinary_memory(1 << 20, "on_cpu")}

    def context_ms() -> list[float]:
        ended = subprocess.run(
            [sys.executable, "-c", _CONTEXT],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return [1000 * float(ended.stdout)]

    log = logging.getLogger("moonpool")
    level = log.level
    # The stubs die on purpose, so their log lines are of no use.
    log.setLevel(logging.CRITICAL)
    try:
        found = in_turns(
            {
                "on the GPU": partial(first_answer_ms, runtime, "on_gpu", asks["on_gpu"]),
                "on the CPU": partial(first_answer_ms, runtime, "on_cpu", asks["on_cpu"]),
                "a first context alone": context_ms,
            },
            1 if pace.quick else 10,
            pace.most_s,
        )
    finally:
        log.setLevel(level)
    for case, series in found.items():
        name = case if "context" in case else f"first answer after a kill, {case}"
        report.figure(name, "ms", series.values, headline=True)
    gpu, cpu, context = found.values()
    ratio = [
        on_gpu[0] / (on_cpu[0] + alone[0])
        for on_gpu, on_cpu, alone in zip(gpu.rounds, cpu.rounds, context.rounds, strict=True)
    ]
    report.ratio(
        "first answer after a kill, on the GPU over that on the CPU and a context",
        ratio,
        goal="at most 1.1",
        headline=True,
    )


def sleep_and_wake(report: Report, runtime: moonpool.Runtime, where: Device, pace: Pace) -> None:
    """Weights of 10 GB, or as many as there is room for, that go to ordinary memory and back."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = min(_WEIGHTS_BYTES, where.memory_info()[0] // 4, pages // 8)
    size = 1 << 24 if pace.quick else room >> 21 << 21
    # PyTorch uses ordinary memory, which takes several times as long.
    for library, goal, part in (("pinned memory", "at least 20", 1), ("torch", "", 4)):
        report.note(f"Sleep and wake, {library}: {size / part / 1e9:.2f} GB.")
        with _tried(report, f"sleep and wake, {library}"):
            _sleep_and_wake(report, runtime, library, size // part, goal, pace.part(0.5))


def weights_config(size: int, library: str, **options: Any) -> Any:
    """Return the configuration of the model with weights."""
    found = config(on_device=True, bytes=size, library=library, **options)
    found["output"].append({"name": "SECONDS", "data_type": "TYPE_FP64", "dims": [2]})
    return found


def _sleep_and_wake(report: Report, runtime: moonpool.Runtime, library: str, size: int, goal: str, pace: Pace) -> None:
    if library == "torch" and find_spec("torch") is None:
        report.skipped(f"sleep and wake, {library}", "torch is not installed")
        return
    name = f"weights_{library.partition(' ')[0]}"
    given = weights_config(size, library, MOONPOOL_IDLE_S=0.2)
    runtime.load(name, MODELS / "device_weights.py", config=given)
    x = np.ones(16, np.uint8)
    sleeps, wakes, first_ms = [], [], []
    ends = time.monotonic() + pace.most_s
    for turn in range(2 if pace.quick else 6):
        _await_sleep(runtime, name)
        before = time.perf_counter()
        seconds = runtime.infer(name, {"X": x}, timeout_s=_TIMEOUT_S)["SECONDS"]
        if turn:  # the first sleep pins the memory
            first_ms.append((time.perf_counter() - before) * 1000)
            sleeps.append(size / 1e9 / seconds[0])
            wakes.append(size / 1e9 / seconds[1])
            if time.monotonic() > ends:
                break
    runtime.unload(name)
    report.figure(f"sleep, {library}", "GB/s", sleeps, headline=True)
    report.figure(f"wake, {library}", "GB/s", wakes, goal=goal, headline=True)
    report.figure(f"first answer of a model that slept, {library}", "ms", first_ms, headline=True)


def _await_sleep(runtime: moonpool.Runtime, name: str) -> None:
    ends = time.monotonic() + _TIMEOUT_S
    residence = runtime._models.find(name).residence
    while residence is None or residence.state is not Residence.DORMANT:
        if time.monotonic() > ends:
            raise TimeoutError(f"{name} did not sleep within {_TIMEOUT_S:.0f} s")
        time.sleep(0.01)


PARTS: dict[str, Callable[[Report, moonpool.Runtime, Device, Pace], None]] = {
    "sizes": by_size,
    "forms": by_form,
    "torch": beside_torch,
    "callers": by_callers,
    "pipeline": pipeline,
    "strict": strict_beside_standard,
    "kill": after_a_kill,
    "sleep": sleep_and_wake,
}


@contextlib.contextmanager
def _tried(report: Report, name: str) -> Iterator[None]:
    """Report an error of the block, and go on after it."""
    try:
        yield
    except Exception as error:
        report.failed(name, f"{type(error).__name__}: {error}")


def measure_part(report: Report, name: str, pace: Pace) -> None:
    """Measure one part in a runtime of its own."""
    gpus, why_none = usable_gpus()
    if not gpus:
        report.skipped(name, why_none)
        return
    where = device(0)
    with _tried(report, name), moonpool.Runtime(drain_timeout_s=1) as runtime:
        PARTS[name](report, runtime, where, pace)


def measure(report: Report, quick: bool) -> None:
    """Measure all parts, one after the other."""
    gpus, why_none = usable_gpus()
    if not gpus:
        report.skipped("everything", why_none)
        return
    report.note(f"{device(0).name}; {driver_in_words()}.")
    for name in PARTS:
        # Small trips of this form are among those by size.
        if name != "forms":
            measure_part(report, name, Pace(0 if quick else 20, quick))


def driver_in_words() -> str:
    """Return the driver's version as nvidia-smi tells it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_ASK_S).stdout.split()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        said = []
    return f"driver {said[0]}" if said else "the driver's version is not known"


if __name__ == "__main__":
    main("gpu", QUESTION, measure)
