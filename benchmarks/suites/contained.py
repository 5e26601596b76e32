"""Measures what contains Python elsewhere beside a `Sandbox`: a start until the first answer, a call, and memory.

Each has numpy and adds 1 and 1: a bare process, bubblewrap, containers of this machine's own files, and a
subinterpreter. Those that are processes live on, and a call is a line to them and one back.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import moonpool
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns
from moonpool.runtime.process.usage import memory_of, with_descendants

_LOOP = "import sys, numpy\nfor line in sys.stdin: print(eval(line), flush=True)"
BWRAP = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all")
_CALLS = 20
# A root of their own, since a container cannot leave the machine's, and cgroups of one version, which crun wants. `$1`
# is a folder.
_PREPARE = """
set -e
mount --make-rprivate /
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --rbind / "$1"
echo ready
read -r _ || true
"""
_IN_SUBINTERPRETER = """
import json, sys, time
import _interpreters as interpreters
def pss_kb():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
def failure(found):
    return "" if found is None else found.formatted.strip().splitlines()[-1]
found = {"start": [], "call": [], "memory": []}
for _ in range(int(sys.argv[1])):
    before_kb, before = pss_kb(), time.perf_counter()
    made = interpreters.create()
    interpreters.exec(made, "1 + 1")
    found["start"].append((time.perf_counter() - before) * 1000)
    found["memory"].append((pss_kb() - before_kb) / 1024)
    before = time.perf_counter()
    interpreters.exec(made, "1 + 1")
    found["call"].append((time.perf_counter() - before) * 1000)
found["numpy"] = failure(interpreters.exec(made, "import numpy"))
print(json.dumps(found))
"""


class _Program:
    """A program that answers lines, as long as it is open."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ask(self) -> None:
        """Ask and wait for the answer. Raises OSError with what it says if it has ended."""
        process = self._process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise OSError("it has no streams")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("1 + 1\n")
            process.stdin.flush()
        if process.stdout.readline() != "2\n":
            raise OSError(process.stderr.read().strip()[-200:])

    def memory_mb(self) -> float:
        """Return the memory of all its processes."""
        return sum(memory_of(pid).own_bytes for pid in with_descendants([self._process.pid])) / (1 << 20)

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=30)
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class _Sandbox:
    def __init__(self) -> None:
        self._box = moonpool.Sandbox(timeout_s=60)

    def ask(self) -> None:
        self._box.run("1 + 1").unwrap()

    def memory_mb(self) -> float:
        """Return the memory of all processes for runs: of this one, and of the one that is forked for the next."""
        return sum(memory_of(pid).own_bytes for pid in with_descendants([os.getpid()])[1:]) / (1 << 20)

    def close(self) -> None:
        self._box.close()


def _measured(make: Callable[[], _Program | _Sandbox], what: dict[str, list[float]]) -> list[float]:
    """Measure one start, calls after it and the memory then. Returns the time of the start."""
    before = time.perf_counter()
    program = make()
    try:
        program.ask()
        start_ms = (time.perf_counter() - before) * 1000
        for _ in range(_CALLS):
            before = time.perf_counter()
            program.ask()
            what["call"].append((time.perf_counter() - before) * 1000)
        what["memory"].append(program.memory_mb())
    finally:
        program.close()
    return [start_ms]


@contextlib.contextmanager
def _namespace() -> Iterator[tuple[list[str], Path]]:
    """Yield a command that runs another in namespaces which containers can start in, and their root. Raises OSError."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        command = ["unshare", "--mount", "--cgroup", "sh", "-c", _PREPARE, "sh", str(root)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as holder:
            if holder.stdout is None or holder.stdout.readline() != "ready\n":
                _, said = holder.communicate()
                raise OSError(said.strip()[-200:])
            yield ["nsenter", f"--target={holder.pid}", "--mount", "--cgroup"], root
            holder.communicate()


def _container(within: Sequence[str], root: Path, runtime: str) -> list[str]:
    """Make a bundle for this machine's own files, and return the command that runs it. Raises OSError and
    CalledProcessError.
    """
    bundle = root.parent / runtime
    bundle.mkdir()
    subprocess.run([runtime, "spec"], cwd=bundle, check=True, capture_output=True)
    file = bundle / "config.json"
    config = json.loads(file.read_text())
    config["process"] |= {"terminal": False, "args": [sys.executable, "-c", _LOOP], "cwd": "/"}
    config["root"] = {"path": str(root), "readonly": True}
    config["linux"].pop("resources", None)
    file.write_text(json.dumps(config))
    return [*within, runtime, "run", "--bundle", str(bundle), f"moonpool-bench-{runtime}-{os.getpid()}"]


def _commands(report: Report, within: Sequence[str], root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what can be started here."""
    interpreter = [sys.executable, "-c", _LOOP]
    yield "python", interpreter
    if shutil.which("bwrap"):
        yield "bubblewrap", [*BWRAP, *interpreter]
    else:
        report.skipped("bubblewrap", "it is not installed")
    for runtime in ("crun", "runc", "runsc"):
        if shutil.which(runtime) is None or not within:
            report.skipped(runtime, "it is not installed" if within else "no namespaces could be made")
            continue
        try:
            command = _container(within, root, runtime)
            program = _Program(command)
            try:
                program.ask()
            finally:
                program.close()
            yield runtime, command
        except (OSError, subprocess.SubprocessError) as error:
            report.skipped(runtime, f"it runs nothing here: {error}")


def _subinterpreters(report: Report, rounds: int) -> None:
    """Measure those of the newest Python that has them and can be found."""
    places = [sys.executable, *map(shutil.which, ("python3.15", "python3.14", "python3.13"))]
    places += sorted(glob.glob(".venv-others/3.1[3-9]*/bin/python"), reverse=True)
    for python in filter(None, places):
        command = [python, "-c", _IN_SUBINTERPRETER, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 0:
            break
    else:
        report.skipped("subinterpreter", "no Python from 3.13 on was found")
        return
    found = json.loads(done.stdout)
    for column, unit in (("start", "ms"), ("call", "ms"), ("memory", "MB")):
        report.figure("subinterpreter, without numpy", unit, found[column], column=column)
    report.note(f"numpy in a subinterpreter: {found['numpy'] or 'it was imported'}")


def measure(report: Report, quick: bool) -> None:
    """Starts in turns, each with calls after it."""
    rounds = 1 if quick else 15
    with contextlib.ExitStack() as held:
        within: list[str] = []
        root = Path("/")
        try:
            within, root = held.enter_context(_namespace())
        except OSError as error:
            report.note(f"no namespaces for containers: {error}")
        makes: dict[str, Callable[[], _Program | _Sandbox]] = {"moonpool.Sandbox": _Sandbox}
        for name, command in _commands(report, within, root):
            makes[name] = partial(_Program, command)
        found: dict[str, dict[str, list[float]]] = {name: {"call": [], "memory": []} for name in makes}
        starts = in_turns({name: partial(_measured, make, found[name]) for name, make in makes.items()}, rounds)
        for name, series in starts.items():
            report.figure(name, "ms", series.values, column="start", headline=True)
            report.figure(name, "ms", found[name]["call"][_CALLS:], column="call", headline=True)
            report.figure(name, "MB", found[name]["memory"][1:], column="memory", headline=True)
        for name in starts:
            if name != "moonpool.Sandbox":
                report.ratio(f"start, {name} over moonpool.Sandbox", starts[name].over(starts["moonpool.Sandbox"]))
    _subinterpreters(report, rounds)
    report.note(
        "A Sandbox is a fork of a process that waits with numpy, all others start an interpreter; memory is that of "
        "all processes of each, of moonpool's with the one that waits. Containers have what `spec` of their runtime "
        "writes: no "
        "filter of system calls, and this machine's files, read-only."
    )


if __name__ == "__main__":
    main("contained", "What do a start, a call and the memory of contained Python cost?", measure)
