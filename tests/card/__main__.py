"""Runs stages on a machine with a card:   python -m tests.card FOLDER [STAGE… | TESTFILE…]

Theory of operation. This process asks the driver for nothing, so nothing can hold it up. Each step is a process in a
session of its own. Its output comes through a pipe; one selector waits for the pipes of a round, and between its waits,
several times a second, the processes are looked after. At its limit a step is killed with all that descends from it.
Stubs have sessions of their own, so to kill a process group would not be enough. Orphans become children of this
process, which kills what a round has left, and records that it did. A process that waits within the driver may not even
die then; it is named and left alone.

If this process is killed, the kernel kills the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tests.card import prepared, report, results, stages
from tests.card.stages import Stage, Step

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
# A killed process is gone after this time, unless it waits in the driver.
_DEATH_S = 5.0
_LOOK_S = 0.05
# What the log has of one step, and of all: a machine gives back no file that is larger than 16 MiB.
_MOST_LOGGED_BYTES, _MOST_LOG_BYTES = 1 << 20, 14 << 20
# One step that prints without end must not keep the runner from the others, nor from its limit.
_MOST_READS = 64
# Of a step's last line, so much is in its result.
_MOST_SAID = 300


def _dies_with_the_runner() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass
class _Running:
    """A step that has started."""

    step: Step
    process: subprocess.Popen[bytes]
    began: float
    ends: float
    logged_bytes: int = 0
    part: bytes = b""
    last_line: str = ""
    problems: list[str] = field(default_factory=list)


class Runner:
    """Runs stages one after the other, and says in the folder what became of each step."""

    def __init__(self, folder: Path, total_s: float = stages.TOTAL_S) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self._ends = self._began + total_s
        self._patience = stages.patience()
        # They wait in the kernel, and are not waited for again.
        self._undying: set[int] = set()
        self._log_bytes = 0
        self._log: BinaryIO = open(folder / "log.txt", "ab", buffering=0)  # noqa: SIM115
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def begin(self, chosen: Sequence[Stage]) -> None:
        """Say what will run, and have steps use the prepared folder if it is there."""
        words = " ".join(stage.name for stage in chosen)
        self._add(results.START, "stages", True, text=words)
        if not prepared.place().is_dir():
            text = f"{prepared.place()} is not here: `bash .ci/gpu prepare` makes it elsewhere"
            self._add(results.START, "prepared folder", None, text=text)
            return
        left_out = prepared.put_into_tree()
        if why := prepared.misfit():
            left_out.append(why)
        else:
            path = [os.environ.get("PYTHONPATH", ""), str(prepared.packages())]
            os.environ["PYTHONPATH"] = ":".join(filter(None, path))
        text = "; ".join(left_out)
        self._add(results.START, "prepared folder", not left_out, str(prepared.place()), text=text)

    def run(self, chosen: Sequence[Stage]) -> None:
        """Run the stages. The last one has its time whatever the others take."""
        *others, last = chosen
        last_s = last.limit_s * self._patience
        try:
            for stage in others:
                self._tried(stage, self._ends - last_s)
            self._tried(last, max(self._ends, time.monotonic() + last_s))
        finally:
            _kill_all(_descendants(os.getpid()))

    def _tried(self, stage: Stage, ends: float) -> None:
        """Run a stage. Whatever ends it, as a machine that has no room for a process, is said, and the next one
        runs.
        """
        try:
            self._stage(stage, ends)
        except Exception as error:
            traceback.print_exc()
            _, undying = _kill_all(set(_descendants(os.getpid())) - self._undying)
            self._undying |= undying
            self._add(stage.name, "stage", False, type(error).__name__, text=str(error))

    def _stage(self, stage: Stage, ends: float) -> None:
        for steps in stage.rounds:
            left_s = ends - time.monotonic()
            if left_s < 1:
                for step in steps:
                    self._add(stage.name, f"step {step.name}", None, text="left out: no time is left")
                continue
            self._round(stage, steps, left_s)

    def _add(
        self, stage: str, name: str, ok: bool | None, value: float | str | None = None,
        unit: str = "", expected: str = "", text: str = "",
    ) -> None:  # fmt: skip
        try:
            results.add(self._folder, stage, name, ok, value, unit, expected, text, self._began)
        except OSError as error:
            # On a full disk, what is printed is all that comes back.
            self._say(f"=== {stage}: {name}: {ok}, {value} {unit}, {text}; not written: {error}")

    def _round(self, stage: Stage, steps: Sequence[Step], left_s: float) -> None:
        before = len(results.read(self._folder))
        with selectors.DefaultSelector() as selector:
            running = [self._start(stage, step, left_s, selector) for step in steps]
            while running:
                for key, _ in selector.select(_LOOK_S):
                    self._copy(key.data, selector)
                over = [each for each in running if self._is_over(each)]
                if late := [each for each in over if each.process.poll() is None]:
                    self._kill(late)
                for each in over:
                    self._end(stage, each, selector, before)
                    running.remove(each)
        # What one of them had started while the others died is a child of this process by now.
        left: dict[int, str] = {}
        ends = time.monotonic() + 2 * _DEATH_S
        while (found := set(_descendants(os.getpid())) - self._undying) and time.monotonic() < ends:
            commands, undying = _kill_all(found)
            left |= commands
            self._undying |= undying
        _reap()
        if left:
            self._add(
                stage.name, "leaves no process behind", False, len(left), "processes", "0",
                "; ".join(left.values()),
            )  # fmt: skip

    def _start(self, stage: Stage, step: Step, left_s: float, selector: selectors.BaseSelector) -> _Running:
        limit_s = min(step.limit_s * self._patience, left_s)
        self._say(f"=== {stage.name}: {step.name}, at most {limit_s:.0f} s")
        environment = {
            **os.environ,
            results.RESULTS: str(self._folder),
            results.STAGE: stage.name,
            results.BEGAN: str(self._began),
            results.SHARE: str(results.share()),
            results.LIMIT_S: str(limit_s),
        }
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", step.module, *step.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dies_with_the_runner,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        each = _Running(step, process, began, began + limit_s)
        selector.register(process.stdout, selectors.EVENT_READ, each)
        return each

    def _copy(self, each: _Running, selector: selectors.BaseSelector) -> None:
        """Copy what a step has printed to the log. Each line has the name of the step, as several print at once."""
        pipe = each.process.stdout
        assert pipe is not None
        for _ in range(_MOST_READS):
            try:
                read = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not read:
                selector.unregister(pipe)
                self._write(each, each.part + b"\n" if each.part else b"")
                each.part = b""
                return
            whole, newline, each.part = (each.part + read).rpartition(b"\n")
            if len(each.part) > 1 << 16:
                whole, newline, each.part = whole + newline + each.part, b"\n", b""
            self._write(each, whole + newline)

    def _write(self, each: _Running, lines: bytes) -> None:
        last_line = lines.rstrip().rpartition(b"\n")[2].decode(errors="replace")
        each.last_line = last_line[:_MOST_SAID] or each.last_line
        if not lines or each.logged_bytes > _MOST_LOGGED_BYTES:
            return
        name = f"[{each.step.name}] ".encode()
        named = b"".join(name + line for line in lines.splitlines(keepends=True))
        each.logged_bytes += len(named)
        if each.logged_bytes > _MOST_LOGGED_BYTES:
            words = b"It has printed more than the log has room for: the rest is left out.\n"
            named = name + words
        self._into_log(named)

    def _into_log(self, lines: bytes) -> None:
        self._log_bytes += len(lines)
        if self._log_bytes <= _MOST_LOG_BYTES:
            # The results are what counts, and a full disk must not end the visit.
            with contextlib.suppress(OSError):
                self._log.write(lines)

    def _is_over(self, each: _Running) -> bool:
        return each.process.poll() is not None or time.monotonic() >= each.ends

    def _kill(self, late: Sequence[_Running]) -> None:
        """Kill steps at their limit, all together: if they do not die, they are waited for once."""
        for each in late:
            each.problems.append(f"killed at its limit of {each.ends - each.began:.0f} s")
        pids = [each.process.pid for each in late]
        _, undying = _kill_all([*pids, *(child for pid in pids for child in _descendants(pid))])
        self._undying |= undying

    def _end(self, stage: Stage, each: _Running, selector: selectors.BaseSelector, before: int) -> None:
        """Record how a step ended."""
        process, limit_s = each.process, each.ends - each.began
        took_s = time.monotonic() - each.began
        if process.poll() is None:
            each.problems.append("does not die: it waits in the kernel")
        elif process.returncode and not each.problems:
            each.problems.append(f"ended with {process.returncode}")
        assert process.stdout is not None
        if process.stdout in selector.get_map():
            self._copy(each, selector)
        # An orphan that keeps the pipe open cannot hold up the next step.
        if process.stdout in selector.get_map():
            selector.unregister(process.stdout)
        process.stdout.close()
        lines = [line for line in results.read(self._folder)[before:] if line["stage"] == stage.name]
        if all(line["name"].startswith("step ") for line in lines):
            each.problems.append("recorded nothing")
        if each.problems and each.last_line:
            each.problems.append(f"its last line: {each.last_line}")
        failed = sum(line["ok"] is False for line in lines)
        text = ", ".join(each.problems)
        self._add(
            stage.name, f"step {each.step.name}", not each.problems, round(took_s, 2), "s",
            f"at most {limit_s:.0f}", text,
        )  # fmt: skip
        self._say(f"=== {stage.name}: {each.step.name}, {took_s:.1f} s, {text or 'ended'}, "
                  f"{failed} of {len(lines)} results failed")  # fmt: skip

    def _say(self, line: str) -> None:
        written = f"{line}\n"
        self._into_log(written.encode())
        # Nobody may listen any more.
        with contextlib.suppress(OSError):
            sys.stdout.write(written)
            sys.stdout.flush()


def _parents() -> dict[int, int]:
    """Return the parent of each process, those that have ended and wait for theirs left out."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                with open(f"/proc/{entry.name}/stat", "rb") as file:
                    state, parent, *_ = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != b"Z":
                found[int(entry.name)] = int(parent)
    return found


def _descendants(of: int) -> list[int]:
    """Return the children of a process, theirs, and so on."""
    parents, found = _parents(), [of]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return str(pid)
    return f"{pid} {b' '.join(words).decode(errors='replace')[:120]}"


def _kill_all(pids: Iterable[int]) -> tuple[dict[int, str], set[int]]:
    """Kill processes, and wait until they are gone. Returns the command of each, and those that do not die."""
    commands = {pid: _command(pid) for pid in pids}
    for pid in commands:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ends = time.monotonic() + _DEATH_S
    while (left := commands.keys() & _parents().keys()) and time.monotonic() < ends:
        time.sleep(0.01)
    return commands, left


def _reap() -> None:
    """Have the kernel forget the orphans that have ended. No step may be running, or how it ended would be lost."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def end_on_request() -> None:
    """Have SIGTERM end this process with its steps."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bash .ci/gpu", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", nargs="*", metavar="STAGE|TESTFILE")
    arguments = parser.parse_args()
    try:
        chosen = stages.chosen(arguments.stages)
    except ValueError as error:
        parser.error(str(error))
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    before = len(results.read(folder))
    page = folder / report.NAME
    # An earlier run's page would be taken for this one's.
    page.unlink(missing_ok=True)
    end_on_request()
    runner = Runner(folder)
    runner.begin(chosen)
    runner.run(chosen)
    if page.exists():
        # Files may be lost on their way from such a machine.
        print(page.read_text())
    failed = [line for line in results.read(folder)[before:] if line["ok"] is False]
    if failed:
        names = sorted({line["stage"] for line in failed})
        sys.exit(f"{len(failed)} results failed, in: {' '.join(names)}")


if __name__ == "__main__":
    main()
