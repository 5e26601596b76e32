"""Shows whether the sandbox's tables are enough for this card's driver, and what they lack.

    python -m tests.card.strict             as below
    python -m tests.card.strict hostile     what a hostile model with a GPU can do (`hostile.py`)

The driver, PyTorch and CuPy start four times each: in an ordinary process, whose calls are compared with the tables; in
the sandbox with a filter that asks instead of refusing, and without Landlock; in the sandbox as it is; and last in a
stub, as a model at `strict`. Each is a process of its own with a limit. What the tables lack is recorded as the rule
that would allow it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.card import results

ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "tests/models/gpu_workloads.py"
NAMES = ("driver", "torch", "cupy")
# The longest that a workload may take, and a runtime that loads a model.
_LIMIT_S, _PLAN_S = 20.0, 15.0
_MOST_RULES = 40
# The kernel's questions about calls, `seccomp_unotify(2)`: their sizes, and the answer that a call may go on.
_QUESTION, _ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_REFUSALS = {1: "EPERM", 13: "EACCES", 30: "EROFS"}
_NOTHING = "said nothing"


@dataclass(frozen=True)
class Call:
    """A call of a library, as `calls.c` notes it."""

    name: str
    error: int
    arguments: tuple[int, ...]
    path: str

    @property
    def what(self) -> str:
        """The call in one line, without its outcome."""
        numbers = " ".join(f"{each:#x}" for each in self.arguments)
        return " ".join(filter(None, (self.name, numbers, self.path)))


@dataclass
class Run:
    """Outcome of a workload, and its calls."""

    outcome: str = _NOTHING
    text: str = ""
    pid: int = 0
    # The folder that it may write to.
    scratch: str = ""
    calls: list[Call] = field(default_factory=list)
    # What the filter was asked about, by name, with arguments.
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)


def built(folder: Path) -> Path | None:
    """Return the library that notes calls, or None if there is no compiler to build it with."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        results.record("a C compiler", None, text="there is none; calls are not recorded")
        return None
    library = folder / "calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library)]
    command += [str(Path(__file__).with_name("calls.c")), "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ended.returncode:
        results.record("the library that notes calls", False, text=ended.stderr)
        return None
    return library


class Confined:
    """A workload in a process of its own, and the kernel's questions about it."""

    def __init__(self, workload: str, how: str, plan: Mapping[str, Any], library: Path | None, folder: Path) -> None:
        from tests.card.confined import CALLS_FD, PROGRAM

        from moonpool.ipc import syscalls

        self._names = {value: key for key, value in syscalls.numbers(syscalls.this_machine()).items()}
        policy = plan["policy"] if how in ("log", "enforce") else None
        settings = {"workload": workload, "path": str(WORKLOADS), "policy": policy, "how": how}
        environment = dict(plan["environment"])
        if library is not None:
            environment["LD_PRELOAD"] = str(library)
        self._calls = folder / f"{workload}-{how}.txt"
        self._run = Run()
        self._listener = -1
        self._part = b""
        path = f"{ROOT / 'src'}:{ROOT}"
        command = [plan["python"], "-c", PROGRAM, path, json.dumps(settings)]
        with open(self._calls, "wb") as file:
            os.dup2(file.fileno(), CALLS_FD)
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=(CALLS_FD,),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                process_group=0,
            )
        finally:
            os.close(CALLS_FD)

    def wait(self, limit_s: float) -> Run:
        """Answer the kernel's questions until the process ends, or kill it at its limit."""
        ends = time.monotonic() + limit_s
        run, process = self._run, self._process
        run.pid = process.pid
        try:
            self._listen(ends)
        except OSError as error:
            run.text = str(error)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            if self._listener >= 0:
                os.close(self._listener)
        if run.outcome == _NOTHING and not run.text:
            is_late = time.monotonic() >= ends
            run.text = f"killed at its limit of {limit_s:.0f} s" if is_late else ""
            run.text = run.text or f"it ended with {process.returncode}"
        run.calls += _parsed(self._calls.read_bytes())
        return run

    def _listen(self, ends: float) -> None:
        is_open = True
        assert self._process.stdout is not None
        with self._process.stdout as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while is_open and (left_s := ends - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    if key.fd != self._listener:
                        is_open = self._read(selector)
                    elif not self._answer():
                        selector.unregister(key.fd)

    def _read(self, selector: selectors.BaseSelector) -> bool:
        assert self._process.stdout is not None
        read = os.read(self._process.stdout.fileno(), 1 << 16)
        *lines, self._part = (self._part + read).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._take(json.loads(line), selector)
        return bool(read)

    def _take(self, said: Mapping[str, Any], selector: selectors.BaseSelector) -> None:
        if "listener" in said:
            self._listener = _descriptor_of(self._process.pid, int(said["listener"]))
            selector.register(self._listener, selectors.EVENT_READ)
        if "left_out" in said:
            results.record("layers that were left out", False, text="; ".join(said["left_out"]))
        if "mapped" in said:
            # The loader opens libraries without a call that can be noted.
            self._run.calls += [Call("open", 0, (os.O_RDONLY,), path) for path in said["mapped"]]
        if "outcome" in said:
            self._run.outcome, self._run.text = said["outcome"], said["text"]

    def _answer(self) -> bool:
        """Let a call go on that the filter asks about, and note it. Returns False if the process has ended."""
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, question)
            number, _, _, call, _, _, *arguments = _QUESTION.unpack(question)
            fcntl.ioctl(self._listener, _SEND, _ANSWER.pack(number, 0, 0, _CONTINUE))
        except OSError:
            # The thread that called may be gone.
            return self._process.poll() is None
        # A call with other arguments may need another rule; the first ones show which.
        self._run.asked.setdefault(self._names.get(call, f"call {call}"), tuple(arguments))
        return True


def _descriptor_of(pid: int, fd: int) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        found = int(libc.syscall(ctypes.c_long(438), pidfd, fd, 0))
    finally:
        os.close(pidfd)
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return found


def _parsed(text: bytes) -> Iterator[Call]:
    for line in text.decode("utf-8", "replace").splitlines():
        parts = line.split("\t", 3)
        if len(parts) < 4:
            continue
        numbers = tuple(int(each, 16) for each in parts[2].split())
        yield Call(parts[0], int(parts[1]), numbers, parts[3])


# What the tables allow


class Tables:
    """The rights that a plan's policy gives, as the sandbox's own tables have them."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        from moonpool.ipc.policy import Policy
        from moonpool.stub.sandbox import landlock, rules

        policy = Policy.from_json(plan["policy"])
        self._landlock = landlock
        given = [
            *landlock.usual_files(network=False, gpu=True),
            *((path, landlock.USE_DEVICE) for path in policy.devices),
            *((path, landlock.READ) for path in policy.read),
        ]
        # A link is followed where the rule is made, but not the link to the process that makes it.
        self._files = [(_real(path), rights) for path, rights in given]
        self._calls = rules.allowed(pid=0, gpu=True)

    def lacks(self, call: Call, run: Run) -> str:
        """Return the rule without which this call is refused; "" if there is one already."""
        if call.name == "open":
            is_own = bool(run.scratch) and call.path.startswith(run.scratch)
            return "" if is_own else self._lacks_file(call, run.pid)
        if call.name == "ioctl":
            (request,) = call.arguments
            if self.allows("ioctl", {1: request}):
                return ""
            return f'"ioctl": _one_of(1, ({request & 0xFFFFFFFF:#x},)) on {call.path}'
        if call.name == "socket":
            arguments = dict(enumerate(call.arguments))
            if self.allows("socket", arguments):
                return ""
            return f'"socket": the arguments {call.what.partition(" ")[2]}'
        return "" if self.allows(call.name, None) else f'"{call.name}": ()'

    def allows(self, name: str, arguments: Mapping[int, int] | None) -> bool:
        """Return True if the filter lets a call through. Without its arguments, they are taken to be good."""
        if name not in self._calls:
            return False
        alternatives = self._calls[name]
        if not alternatives or arguments is None:
            return True
        return any(
            all(arguments.get(place, 0) & mask in set(values) for place, mask, values in conditions)
            for conditions in alternatives
        )

    def _lacks_file(self, call: Call, pid: int) -> str:
        if call.error or not call.path.startswith("/"):
            return ""
        path = _real(call.path.replace(f"/proc/{pid}/", "/proc/self/"))
        wanted = {0: self._landlock.READ_FILE, 1: self._landlock.WRITE_FILE}
        writes = call.arguments[0] & 3
        is_folder = os.path.isdir(path)
        rights = self._landlock.READ_DIR if is_folder else wanted.get(writes, sum(wanted.values()))
        had = 0
        for given, theirs in self._files:
            if path == given or path.startswith(f"{given.rstrip('/')}/"):
                had |= theirs
        if rights & ~had == 0:
            return ""
        if path.startswith("/dev/nvidia"):
            return f'"{path}" among the nodes of gpu_access.py'
        return f'("{path}", READ{" | WRITE_FILE" if writes else ""}),'


def _real(path: str) -> str:
    path = re.sub(r"^/proc/(self/task/\d+|thread-self)(?=/|$)", "/proc/self/task", path)
    return path if path.startswith("/proc/self") else os.path.realpath(path)


def compare(name: str, run: Run, tables: Tables, *, matters: bool) -> None:
    """Record what a workload called beyond the tables, as rules. It `matters` if the workload does not work without."""
    bad = False if matters else None
    rules: dict[str, Call] = {}
    for call in run.calls:
        rule = tables.lacks(call, run)
        if rule:
            rules.setdefault(rule, call)
    files = len([call for call in run.calls if call.name == "open" and not call.error])
    requests = len({call.arguments for call in run.calls if call.name == "ioctl"})
    results.record(
        f"{name}, calls beyond the tables",
        bad if rules else True,
        len(rules),
        "rules",
        "0",
        f"it opened {files} files and made {requests} kinds of ioctl",
    )
    for rule, call in [*rules.items()][:_MOST_RULES]:
        results.record(f"{name}, a rule is missing", bad, rule, text=call.what)


# The runs


def _placed(plan: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the plan with another folder to write to, which is made."""
    from moonpool.ipc.policy import Policy

    policy = Policy.from_json(plan["policy"])
    folder.mkdir(mode=0o700)
    if policy.user is not None:
        os.chown(folder, policy.user, policy.user)
    environment = {key: value.replace(plan["folder"], str(folder)) for key, value in plan["environment"].items()}
    changed = policy.changed(scratch=str(folder)).to_json()
    return {**plan, "policy": changed, "environment": environment, "folder": str(folder)}


_LABELS = {"record": "ordinary", "log": "asked about refusals", "enforce": "at strict"}
_Runs = dict[tuple[str, str], Run]


def _ran(names: Sequence[str], plan: Mapping[str, Any], library: Path | None, folder: Path) -> _Runs:
    """Run each workload in all ways, side by side, and record how they ended."""
    started: dict[tuple[str, str], Confined] = {}
    for name in names:
        for how, label in _LABELS.items():
            own = folder / f"{name}-{how}"
            own.mkdir(mode=0o755)
            try:
                placed = _placed(plan, own / "scratch")
                started[name, how] = Confined(name, how, placed, library, own)
            except OSError as error:
                results.record(f"{name}, {label}", False, text=str(error))
    with ThreadPoolExecutor(max(1, len(started))) as pool:
        ended = pool.map(lambda each: each.wait(_LIMIT_S), started.values())
        runs = dict(zip(started, ended, strict=True))
    for (name, how), run in runs.items():
        ok = None if run.outcome == NotImplementedError.__name__ else run.outcome == "works"
        results.record(f"{name}, {_LABELS[how]}", ok, run.outcome, expected="works", text=run.text)
    return runs


def _explain_refusals(name: str, run: Run) -> None:
    """Record what the sandbox refused. A library may go on without what it asked for."""
    refused = [call for call in run.calls if call.error in _REFUSALS]
    works = run.outcome == "works"
    results.record(
        f"{name}, refusals at strict", None if works and refused else not refused, len(refused), "calls", "0"
    )
    for call in refused[:_MOST_RULES]:
        text = f"{_REFUSALS[call.error]}; {'it works without' if works else run.text}"
        results.record(f"{name}, refused", None if works else False, call.what, text=text)


def explain(name: str, runs: _Runs, tables: Tables, *, has_calls: bool) -> None:
    """Record what a workload needs beyond the tables."""
    ordinary, asked, enforced = (runs.get((name, how)) for how in _LABELS)
    # What a library asks for and goes on without is no fault of the tables.
    matters = enforced is None or enforced.outcome != "works"
    if ordinary is not None and has_calls:
        compare(name, ordinary, tables, matters=matters)
    if asked is not None:
        bad = False if matters else None
        beyond = asked.asked
        results.record(f"{name}, system calls beyond the filter", bad if beyond else True, len(beyond), "calls", "0")
        for call, arguments in [*beyond.items()][:_MOST_RULES]:
            text = "first arguments " + " ".join(f"{each:#x}" for each in arguments)
            results.record(f"{name}, a rule is missing", bad, f'"{call}": ()', text=text)
    if enforced is not None and has_calls:
        _explain_refusals(name, enforced)


def _apart(part: str, limit_s: float, *arguments: str) -> None:
    """Run another part of this stage as a process, because a call of the driver may not return."""
    command = [sys.executable, "-m", "tests.card.models_at_strict", part, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        results.record(part, False, text=f"killed at its limit of {limit_s:.0f} s")
    else:
        if status:
            results.record(part, False, text=f"it ended with {status}; the log says why")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)


def main(arguments: Sequence[str]) -> None:
    """Run the part that the arguments name."""
    try:
        _show(arguments)
    except Exception as error:
        traceback.print_exc()
        results.record("strict", False, type(error).__name__, text=str(error))


def _show(arguments: Sequence[str]) -> None:
    ends = time.monotonic() + results.limit_s() - 3
    if arguments == ["hostile"]:
        _apart("hostile", max(1.0, ends - time.monotonic()))
        return
    names = [name for name in NAMES if name == "driver" or find_spec(name) is not None]
    for name in {*NAMES} - {*names}:
        results.record(f"{name}, at strict", None, text=f"{name} is not installed")
    with tempfile.TemporaryDirectory(prefix="moonpool-card-") as folder:
        here = Path(folder)
        here.chmod(0o755)
        found = here / "plan.json"
        _apart("plan", _PLAN_S, str(found))
        if found.exists():
            library = built(here)
            plan = json.loads(found.read_text())
            runs = _ran(names, plan, library, here)
            names = [name for name in names if not _is_missing(runs.get((name, "record")))]
            tables = Tables(plan)
            for name in names:
                explain(name, runs, tables, has_calls=library is not None)
        else:
            results.record("the plan of a model at strict", False, text="there is none")
        _apart("models", max(1.0, ends - time.monotonic()), *names)


def _is_missing(run: Run | None) -> bool:
    return run is not None and run.outcome == NotImplementedError.__name__


if __name__ == "__main__":
    main(sys.argv[1:])
