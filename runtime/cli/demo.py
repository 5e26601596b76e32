"""`moonpool demo`: a walk through moonpool on real models, with figures of this machine.

Theory of operation. While a measurement runs, a thread calls a second model, to show that it still answers. The thread
counts alone; the demo reads the counts after it has stopped and joined the thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.runtime.cli.shared import UsageError, figure, session, table
from moonpool.runtime.process.terminal import Terminal
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.version import VERSION

HELP = "a walk through moonpool in under a minute, with figures of this machine"
DESCRIPTION = """\
Serve the example models from stub processes and show what that does: a model of Triton's, one that
holds the interpreter's lock, one that crashes, one that hangs, and what it all costs.
"""
EXAMPLES = """\
examples:
  moonpool demo
  moonpool demo --seconds 0.2      # quicker, and less precise
"""

_LIMIT = 20_000
_TURNS = 3
_ROUNDS = 10
_CALLS = 200
_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=1.0, help="how long each measurement takes; default %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise UsageError("--seconds must be more than 0")
    models = examples() / "models"
    with session(str(models), verbose=options.verbose, quiet=True) as runtime:
        Demo(runtime, models, Terminal(sys.stdout), options.seconds).run()
    return 0


def examples() -> Path:
    """The folder of the examples, which is a part of the package. Raises `MoonpoolError`."""
    spec = importlib.util.find_spec("moonpool")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / "examples").is_dir():
            return path
    raise MoonpoolError("the examples are missing from this installation of moonpool")


class Demo:
    """The five parts, in the order in which they are shown."""

    def __init__(self, runtime: Runtime, models: Path, terminal: Terminal, seconds: float) -> None:
        self._runtime = runtime
        self._models = models
        self._terminal = terminal
        self._seconds = seconds
        self._cores = len(os.sched_getaffinity(0))
        self._number = 0

    def run(self) -> None:
        plural = "" if self._cores == 1 else "s"
        self._say(
            f"moonpool {VERSION} on Python {platform.python_version()} with {self._cores} "
            f"processor core{plural}. All figures below are measured here and now."
        )
        if not is_wanted() or load_if_there("moonpool.ipc.port._port") is None:
            self._say("It runs interpreted and without gRPC: nothing of it is compiled here.")
        self._add_sub()
        self._primes()
        self._crash()
        self._hang()
        self._cost()
        self._farewell()

    # Showing

    def _title(self, text: str) -> None:
        self._number += 1
        self._terminal.line()
        self._terminal.line(self._terminal.paint(f"{self._number}. {text}", "bold"))

    def _say(self, text: str, *, after_table: bool = False) -> None:
        if after_table:
            self._terminal.line()
        for line in textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False):
            self._terminal.line(line)

    def _show(self, rows: Sequence[Sequence[str]], align: str) -> None:
        self._terminal.line()
        for line in table(rows, align=align, indent=4):
            self._terminal.line(line)

    # The parts

    def _add_sub(self) -> None:
        self._title("A model in a process of its own")
        self._runtime.load("add_sub")
        inputs = _vectors()
        outputs = self._runtime.infer("add_sub", inputs)
        (instance,) = self._runtime.instances("add_sub")
        self._say(
            "add_sub is a model written for Triton's Python backend, and runs here unchanged. It "
            f"runs in process {instance['pid']}; this program is process {os.getpid()}. Tensors "
            "travel between them in shared memory."
        )
        values = {**inputs, **outputs}
        rows = [[name, *(f"{value:g}" for value in row[0])] for name, row in values.items()]
        self._show(rows, "<>>>>")

    def _primes(self) -> None:
        self._title("Pure Python on more than one core")
        count = _primes_function(self._models / "primes" / "1" / "model.py")
        self._runtime.load("primes", instances=1)
        self._runtime.load("primes_twice", self._models / "primes", instances=2)
        limit = {"LIMIT": np.array([[_LIMIT]])}
        once, twice = self._call("primes", limit), self._call("primes_twice", limit)
        ways: list[tuple[str, Callable[[], object], int]] = [
            ("called in this process, by one thread", lambda: count(_LIMIT), 1),
            ("called in this process, by two threads", lambda: count(_LIMIT), 2),
            ("moonpool, one instance, two callers", once, 2),
            ("moonpool, two instances, two callers", twice, 2),
        ]
        rates = _rates([(call, callers) for _, call, callers in ways], self._seconds)
        self._say(
            f"primes counts the primes below {_LIMIT:,} in a loop. Python's interpreter runs one "
            "thread at a time, so a second thread of one process does not help; a second instance "
            "is a second interpreter."
        )
        self._show(
            [
                [name, f"{rate:,.0f}", "requests/s", f"{rate / rates[0]:.2f} times the first"]
                for (name, _, _), rate in zip(ways, rates, strict=True)
            ],
            "<><>",
        )
        self._say(verdict(rates[3] / rates[2], self._cores), after_table=True)

    def _crash(self) -> None:
        self._title("A model that crashes")
        self._runtime.load("crashes")
        ask = self._call("crashes", {"WISH": _text("hello")})
        crash = self._call("crashes", {"WISH": _text("segfault")})
        with _Bystander(self._call("add_sub", _vectors())) as bystander:
            error, noticed_s = _failure(crash)
            begin_s = time.monotonic()
            ask()
            recovered_s = time.monotonic() - begin_s
        self._say(
            "crashes was just asked to read address 0, which ends its process. The caller whose "
            "request was inside got an error; the next request waited for the new process; nobody "
            "else noticed."
        )
        self._show(
            [
                [f"the caller got {type(error).__name__} after", _ms(noticed_s)],
                ["the next request was answered, by a new process, after", _ms(recovered_s)],
                ["requests to add_sub meanwhile: answered", f"{bystander.answered:,}"],
                ["requests to add_sub meanwhile: failed", f"{bystander.failed:,}"],
            ],
            "<>",
        )
        self._quote(error)

    def _hang(self) -> None:
        self._title("A model that hangs")
        self._runtime.load("hangs")
        hang = self._call("hangs", {"SECONDS": np.array([[3600]], np.float32)})
        answer = self._call("hangs", {"SECONDS": np.array([[0]], np.float32)})
        error, noticed_s = _failure(hang)
        begin_s = time.monotonic()
        answer()
        recovered_s = time.monotonic() - begin_s
        self._say(
            "hangs was asked to sleep for an hour. Its configuration gives a batch 0.5 s "
            "(MOONPOOL_EXECUTE_TIMEOUT_S); then the process is ended and replaced."
        )
        self._show(
            [
                [f"the caller got {type(error).__name__} after", _ms(noticed_s)],
                ["the next request was answered, by a new process, after", _ms(recovered_s)],
            ],
            "<>",
        )
        self._quote(error)

    def _cost(self) -> None:
        self._title("What isolation costs")
        inputs = _vectors()
        a, b = inputs.values()
        with PingPong(128) as ping_pong:
            direct_us, floor_us, infer_us = _medians_us(
                [lambda: (a + b, a - b), ping_pong, lambda: self._runtime.infer("add_sub", inputs)]
            )
        self._say("One request to add_sub, one caller, median of the whole call:")
        self._show(
            [
                ["the same arithmetic, called directly", figure(direct_us), "µs"],
                ["a bare packet to another process and back", figure(floor_us), "µs"],
                ["moonpool: checked, batched, executed, answered", figure(infer_us), "µs"],
            ],
            "<><",
        )
        self._say(
            f"So isolation costs {figure(infer_us - direct_us)} µs a request here, of which "
            f"{figure(floor_us)} µs are what the kernel and two Python processes take to exchange "
            "anything at all. A model that computes for a millisecond will not notice.",
            after_table=True,
        )

    def _farewell(self) -> None:
        models = _shortest(self._models)
        here = f"{_shortest(Path(sys.executable))} -m moonpool"
        moonpool = "moonpool" if shutil.which("moonpool") else here
        self._terminal.line()
        self._terminal.line(self._terminal.paint("Next, with the same models", "bold"))
        self._terminal.line(f"    {moonpool} bench {models} add_sub")
        self._terminal.line(f"    {moonpool} check {models} --allow-missing")
        self._terminal.line(f"    {moonpool} infer {models} normalise --input 'X=[[1,2,3]]'")

    # Calling

    def _call(self, model: str, inputs: dict[str, Any]) -> Callable[[], object]:
        return lambda: self._runtime.infer(model, inputs, timeout_s=_TIMEOUT_S)

    def _quote(self, error: MoonpoolError) -> None:
        self._say(f"In its words: {error}", after_table=True)


_ECHO = (
    "import socket, sys\n"
    "end = socket.socket(fileno=int(sys.argv[1]))\n"
    "while packet := end.recv(4096): end.send(packet)\n"
)


class PingPong:
    """The floor under any call into another process: a packet there and back, and nothing else.

    Two Python processes with a SEQPACKET socket between them. A context manager.
    """

    def __init__(self, size_bytes: int = 64) -> None:
        self._packet = bytes(size_bytes)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-I", "-S", "-c", _ECHO, str(other.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()])
        self()  # when it answers, it has started

    @property
    def pid(self) -> int:
        """The process number of the other process."""
        return self._process.pid

    def __call__(self) -> None:
        """Send a packet and wait until it comes back."""
        self._socket.send(self._packet)
        self._socket.recv(4096)

    def __enter__(self) -> PingPong:
        return self

    def __exit__(self, *_: object) -> None:
        # The other process ends when its socket does.
        self._socket.close()
        self._process.wait()


def verdict(gain: float, cores: int) -> str:
    """Explain that two instances did `gain` times the work of one."""
    if cores == 1:
        return (
            "This machine has one core for us, so two instances cannot do more than one; where there "
            "are more cores, they do."
        )
    if gain < 1.4:
        return (
            f"Two instances did only {gain:.2f} times the work of one: something else is using "
            "the cores of this machine just now."
        )
    return f"Two instances did {gain:.2f} times the work of one."


class _Bystander:
    """Calls another model for as long as the block lasts, and counts what comes of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="moonpool-demo")
        self.answered = 0
        self.failed = 0

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._call()
            except MoonpoolError:
                self.failed += 1
            else:
                self.answered += 1

    def __enter__(self) -> _Bystander:
        start_thread(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _vectors() -> dict[str, Any]:
    return {"INPUT0": np.array([[1, 2, 3, 4]], np.float32), "INPUT1": np.array([[10, 20, 30, 40]], np.float32)}


def _text(text: str) -> Any:
    return np.array([[text.encode()]], dtype=object)


def _primes_function(path: Path) -> Callable[[int], int]:
    """The model's own loop, in this process."""
    spec = importlib.util.spec_from_file_location("moonpool_demo_primes", path)
    if spec is None or spec.loader is None:
        raise MoonpoolError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[int], int] = module.Primes.count_below
    return function


def _failure(call: Callable[[], object]) -> tuple[MoonpoolError, float]:
    """The error that a call ends with, and the seconds until then."""
    begin_s = time.monotonic()
    try:
        call()
    except MoonpoolError as error:
        return error, time.monotonic() - begin_s
    raise MoonpoolError("the example model did not do what its input asked for; is it the original?")


def _rates(ways: Sequence[tuple[Callable[[], object], int]], seconds: float) -> list[float]:
    """Requests a second of each, by so many callers; the best of turns, as others use the machine, too."""
    best = [0.0 for _ in ways]
    for _ in range(_TURNS):
        for index, (call, callers) in enumerate(ways):
            best[index] = max(best[index], _rate(call, callers, seconds / _TURNS))
    return best


def _rate(call: Callable[[], object], callers: int, seconds: float) -> float:
    """Requests a second of so many callers, each in a thread of its own."""
    begin_s = time.monotonic()

    def answered() -> int:
        count = 0
        while time.monotonic() < begin_s + seconds:
            call()
            count += 1
        return count

    with ThreadPoolExecutor(callers) as pool:
        counts = [future.result() for future in [pool.submit(answered) for _ in range(callers)]]
    return sum(counts) / (time.monotonic() - begin_s)


def _medians_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The median of each, measured in turns, so that a busy moment meets all of them."""
    taken_ns: list[list[int]] = [[] for _ in calls]
    for call in calls:
        for _ in range(_CALLS):
            call()
    for _ in range(_ROUNDS):
        for call, durations in zip(calls, taken_ns, strict=True):
            for _ in range(_CALLS):
                begin_ns = time.perf_counter_ns()
                call()
                durations.append(time.perf_counter_ns() - begin_ns)
    return [statistics.median(durations) / 1000 for durations in taken_ns]


def _ms(seconds: float) -> str:
    return f"{figure(seconds * 1000)} ms"


def _shortest(path: Path) -> str:
    """Return the path in the form that is shortest to type from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
