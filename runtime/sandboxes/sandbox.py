"""`moonpool.run` and `moonpool.Sandbox`: a piece of source or a function, in a confined process, with limits.

Theory of operation. Each run has a thread of its own: it takes a worker from the pool, waits for the answer and gives
the worker back. An exception may be thrown into the thread of the caller at any moment, and finds nothing there that
somebody would have to end. That thread waits, and makes the calls of the caller's functions (`parallel.attended`). If
it is interrupted, it sets the `RunCancellation`, which ends whatever the run is at, and waits for the run's thread. A
task that is cancelled does the same.

A `Sandbox` keeps its worker, and `_lock` lets one run at a time use it. `close` cancels the run that has the lock, and
waits for it. A sandbox that nobody has any more leaves its worker in `Pool.forgotten`, because its finalizer must take
no lock.

What the caller's functions run themselves while a run goes on takes a worker beyond the number of the pool: it would
wait for its own end otherwise.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.source import values
from moonpool.ipc.source.folders import MOST_FILES
from moonpool.runtime.arguments import OF_REQUEST, OF_RUNTIME
from moonpool.runtime.errors import InvalidRequest, LoadFailed, RuntimeClosed, SandboxError
from moonpool.runtime.process.parallel import Here, attended, awaited
from moonpool.runtime.process.threads import apart
from moonpool.runtime.repository.session_source import function_source
from moonpool.runtime.sandboxes.cancellation import RunCancellation, RunCancelled
from moonpool.runtime.sandboxes.functions import HostCalls, read_functions
from moonpool.runtime.sandboxes.pool import Pool, go_on, the_pool
from moonpool.runtime.sandboxes.printed import Tell, shown
from moonpool.runtime.sandboxes.settings import (
    Content,
    Limits,
    RunOptions,
    Settings,
    is_safe_name,
    read_files,
    read_options,
)
from moonpool.runtime.sandboxes.worker import Ended, Running, Worker, signal_name

if TYPE_CHECKING:
    import asyncio

R = TypeVar("R")
# A text, or a function of Python.
Source = str | Callable[..., Any]
# Functions of the caller, by the names by which source calls them.
Functions = Mapping[str, Callable[..., Any]]
# The pause between two looks whether a run that waits for another one is still wanted.
_LOOK_S = 0.2
# Runs in functions that runs call. A function may run what the source gives it, which may ask for that again.
_MOST_NESTED = 8
# So many pieces of output wait for their reader, of up to 64 KiB each.
_MOST_PIECES = 64
# The longest text of an error.
_MOST_TEXT = 40_000
_LIMITS = ("", "memory", "tasks", "open_files", "files_bytes", "calls", "timeout_s")
_ATTACKED = "made a system call that only an attack makes, and was ended"


@dataclass(frozen=True, slots=True)
class RunError:
    """Tells why a run has no value. `limit` is the option whose limit was the reason, "" if none was."""

    type: str
    message: str
    traceback: str = ""
    limit: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Counts what a run took: seconds of the clock and of processors, and the most memory, its interpreter included."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    # Of functions of the caller: how many calls there were, and the seconds that they took.
    calls: int = 0
    calls_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """Holds what came of a run. Whatever it says may be a lie of the source; its types are as they are here."""

    value: Any
    stdout: str
    stderr: str
    error: RunError | None
    # By the path below `out/`.
    files: dict[str, bytes] = field(repr=False)
    usage: RunUsage
    # True if `value` is a text in place of a value that does not travel.
    is_repr: bool = False
    # True if the sandbox had a namespace from runs before, and the process with it is gone.
    state_lost: bool = False

    def unwrap(self) -> Any:
        """Return the value. Raises `SandboxError` if there was an error."""
        if self.error is not None:
            raise SandboxError(self)
        return self.value


def run(
    source: Source,
    inputs: Mapping[str, Any] | None = None,
    *,
    files: Mapping[str, Content] | None = None,
    functions: Functions | None = None,
    on_output: Tell | None = None,
    **options: Unpack[RunOptions],
) -> RunResult:
    """Run source in a process of its own, confined as at the sandbox level `strict`, and return what came of it.

    `source` is a text, whose last expression is the value, or a function at the top level of a file or a notebook,
    which gets `inputs` as its arguments: its source is copied, with everything that it uses. Of a text, the inputs are
    variables. Arrays, numbers, texts, bytes, None, and lists and dictionaries of these go in and come out; of any other
    value comes its `repr` (`is_repr`). Nothing is pickled. Errors of the source, and limits that it met, are in
    `.error`; nothing is raised for them before `.unwrap()`.

    `files` (bytes, texts or Paths by name) lie in the working directory of the source. What it writes below `out/`
    comes back in `.files`. It may call `functions` by name, with arguments that travel as values do and may be
    anything. What they raise is an error there, with the same text. They and `on_output`, which gets each piece that
    the source prints, and "stdout" or "stderr", are called on this thread.

    Options: `timeout_s` (30), after which the process is killed; `memory` ("512M"; half of the machine's by default),
    `tasks` (64 threads), `open_files` (256), `files_bytes` ("64M", of the folder in memory and of what comes back) and
    `calls` of functions (10,000); `imports`, modules that are imported before the source comes; `environment`, as
    `EXECUTION_ENV_PATH`, or a list of packages, of which only wheels are installed; `paths`, folders that it may read,
    or write to (`rw:/data`); `sandbox`, which may be `best-effort`; and `options` of models for the sandbox, such as
    MOONPOOL_SANDBOX_PORTS.

    Raises ValueError for options, `InvalidRequest` for inputs, `LoadFailed` if no process can be confined or the
    function cannot be copied.
    """
    return _Run(source, inputs, files, functions, on_output, options).attended()


async def arun(
    source: Source,
    inputs: Mapping[str, Any] | None = None,
    *,
    files: Mapping[str, Content] | None = None,
    functions: Functions | None = None,
    on_output: Tell | None = None,
    **options: Unpack[RunOptions],
) -> RunResult:
    """Run source as `run` does, from an event loop. Functions and `on_output` are called on another thread.

    Cancelling the task kills the process.
    """
    return await _Run(source, inputs, files, functions, on_output, options).awaited()


class _Call:
    """One call of a run, from the thread or the task of its caller."""

    def __init__(self, functions: Functions | None, inputs: Mapping[str, Any] | None, on_output: Tell | None) -> None:
        self._functions = read_functions(functions, inputs or {})
        if on_output is not None and not callable(on_output):
            OF_RUNTIME.refuse("on_output", "a function of a text and the name of a stream", on_output)
        self._on_output = on_output
        self.cancellation = RunCancellation()
        # The thread on which the functions of the caller are called.
        self.thread = 0
        self._pool: Pool | None = None
        # So many runs wait for a function that leads to this one.
        self._depth = _in_calls.count
        if self._depth > _MOST_NESTED:
            raise InvalidRequest(
                f"runs are nested deeper than {_MOST_NESTED}, each in a function that the one before calls"
            )

    def attended(self) -> RunResult:
        """Make the run on another thread, and the calls here. Raises SystemExit on a thread that the end of the program
        cuts short.
        """
        self.thread = threading.get_ident()
        try:
            return attended(self._run, "moonpool-run", self._cancel)
        except RuntimeClosed:
            if threading.current_thread().daemon:
                # There is nobody to tell, and no more than that to say.
                raise SystemExit from None
            raise

    async def awaited(self) -> RunResult:
        """Make the run, and the calls, on another thread."""
        return await awaited(self._run_here, "moonpool-arun", self._cancel)

    def _run_here(self) -> RunResult:
        self.thread = threading.get_ident()
        return self._run(Here(is_elsewhere=False))

    def _cancel(self) -> None:
        apart(self.cancellation.set)

    def _run(self, here: Here) -> RunResult:
        pool = self._pool or the_pool()
        with pool.running(self.cancellation):
            return self._run_in(pool, here)

    def _run_in(self, pool: Pool, here: Here) -> RunResult:
        raise NotImplementedError

    def take(self, pool: Pool, settings: Settings, *, is_extra: bool = False) -> Worker:
        return pool.take(settings, self.cancellation, is_extra=is_extra or self._depth > 0)

    def calls(self, most: int, here: Here) -> HostCalls | None:
        """Return what answers the calls of functions, if there are any."""
        functions = {name: partial(_called, self._depth + 1, function) for name, function in self._functions.items()}
        return HostCalls(functions, most, here) if functions else None

    def tell(self, here: Here) -> Tell | None:
        """Return what gets the output, if somebody wants it as it comes."""
        on_output = self._on_output
        if on_output is None:
            return None
        return lambda text, stream: here(partial(_called, self._depth + 1, on_output, text, stream))


class _InCalls(threading.local):
    """Counts the calls that this thread is in: each is of a function, by a run that the one before had begun."""

    count = 0


_in_calls = _InCalls()


def _called(depth: int, function: Callable[..., R], /, *arguments: Any, **named: Any) -> R:
    """Call a function of the caller."""
    before, _in_calls.count = _in_calls.count, depth
    try:
        return function(*arguments, **named)
    finally:
        _in_calls.count = before


class _Run(_Call):
    """One call of `run`."""

    def __init__(
        self,
        source: Source,
        inputs: Mapping[str, Any] | None,
        files: Mapping[str, Content] | None,
        functions: Functions | None,
        on_output: Tell | None,
        options: RunOptions,
    ) -> None:
        super().__init__(functions, inputs, on_output)
        self._settings, self._limits, self._timeout_s = read_options(options)
        self._request = _request(source, inputs, read_files(files), self._functions)

    def _run_in(self, pool: Pool, here: Here) -> RunResult:
        worker = self.take(pool, self._settings)
        try:
            running = _fresh(worker, self._limits, self.tell(here), self.cancellation)
            calls = self.calls(self._limits.calls, here)
            with self.cancellation.by(running.process.kill):
                ended = _asked(running, self._request, self._limits, self._timeout_s, calls)

            def was_killed() -> bool:
                return self.cancellation.is_set or not worker.is_healthy

            return _result(running, ended, self._limits, self._timeout_s, was_killed, calls)
        finally:
            pool.give_back(worker)


def _fresh(worker: Worker, limits: Limits, tell: Tell | None, cancellation: RunCancellation) -> Running:
    """Return a process that has run nothing yet. Starts the worker again if it has died meanwhile. Raises
    `LoadFailed`, `RunCancelled`.
    """
    try:
        return worker.fresh(limits, tell)
    except LoadFailed:
        if worker.is_healthy:
            raise
    worker.start(cancellation)
    return worker.fresh(limits, tell)


class Sandbox:
    """A confined process in which source runs piece by piece, with one namespace. Use it as a context manager.

        with moonpool.Sandbox(memory="1G", timeout_s=30) as box:
            box.run("import numpy as np; total = 0")
            box.run("total += x.sum(); total", {"x": array}).value

    The options are those of `moonpool.run`. Files stay until `close`; those below `out/` come back when they are new or
    have changed. If the process ends, for a timeout or anything else, the next run begins anew, and its `state_lost` is
    True. One run at a time; other threads wait.
    """

    def __init__(self, **options: Unpack[RunOptions]) -> None:
        self._settings, self.limits, self.timeout_s = read_options(options)
        self._lock = threading.Lock()
        # Where its worker comes from.
        self.pool: Pool | None = None
        self._worker: Worker | None = None
        self._running: Running | None = None
        self._closed = self._loses_state = False
        # The call that has the lock.
        self._step: _Step | None = None
        self._owner_pid = os.getpid()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        source: Source,
        inputs: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, Content] | None = None,
        functions: Functions | None = None,
        on_output: Tell | None = None,
        timeout_s: float | None = None,
    ) -> RunResult:
        """Run source in this sandbox, as `moonpool.run` does."""
        return _Step(self, source, inputs, files, functions, on_output, timeout_s).attended()

    async def arun(
        self,
        source: Source,
        inputs: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, Content] | None = None,
        functions: Functions | None = None,
        on_output: Tell | None = None,
        timeout_s: float | None = None,
    ) -> RunResult:
        """Run source as `run` does, from an event loop. Cancelling the task kills the process."""
        return await _Step(self, source, inputs, files, functions, on_output, timeout_s).awaited()

    def stream(
        self,
        source: Source,
        inputs: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, Content] | None = None,
        functions: Functions | None = None,
        timeout_s: float | None = None,
    ) -> RunStream:
        """Run source as `arun` does, and return what it prints as it comes.

            stream = box.stream("for n in range(3): print(n)")
            async for text, name in stream:    # "stdout" or "stderr"
                ...
            stream.result.value

        The run begins with the loop, and waits while nobody reads. Leaving the loop before its end kills the process.
        """
        pieces = _Pieces()
        return RunStream(pieces, _Step(self, source, inputs, files, functions, pieces.tell, timeout_s))

    def _refuse_inside(self) -> None:
        """Raise `InvalidRequest` in a function of the caller, where the run would wait for itself, and in a fork of the
        program.
        """
        if self._owner_pid != os.getpid():
            raise InvalidRequest("the sandbox belongs to the process from which this one was forked; make another one")
        step = self._step
        if step is not None and step.thread == threading.get_ident():
            raise InvalidRequest("a run of this sandbox is going on in this very thread, which called this")

    def _take_turn(self, step: _Step) -> None:
        """Wait until no other run goes on. Raises `RunCancelled`."""
        while not self._lock.acquire(timeout=_LOOK_S):
            step.cancellation.check()
        self._step = step
        if self._closed:  # perhaps before `close` could see the step
            step.cancellation.set()

    def _end_turn(self) -> None:
        self._step = None
        self._lock.release()

    def _run_alone(
        self, step: _Step, pool: Pool, tell: Tell | None, calls: HostCalls | None, limit_s: float
    ) -> RunResult:
        """Run source. Under the lock."""
        running = self._process(step, pool, tell)
        lost, self._loses_state = self._loses_state, True
        with step.cancellation.by(running.process.kill):
            ended = _asked(running, step.request, self.limits, limit_s, calls)
        result = _result(running, ended, self.limits, limit_s, self._was_killed, calls, goes_on=True, state_lost=lost)
        # Otherwise, and if anything is raised before, the next run begins anew.
        self._loses_state = ended.packet is None
        return result

    def _process(self, step: _Step, pool: Pool, tell: Tell | None) -> Running:
        """Return the process of this sandbox, a new one if there is none. Under the lock."""
        if self._closed:
            raise InvalidRequest("the sandbox was closed")
        if self._worker is None:
            self.pool = pool
            self._worker = step.take(pool, self._settings, is_extra=True)
            self._forgotten = weakref.finalize(self, pool.forgotten.append, self._worker)
            self._forgotten.atexit = False
        if self._running is None or self._loses_state:
            self._running = _fresh(self._worker, self.limits, tell, step.cancellation)
        self._running.tell(tell)
        return self._running

    def _was_killed(self) -> bool:
        """Return True if the process has ended by an act of the program, or with the one from which it was forked."""
        return self._closed or self._worker is None or not self._worker.is_healthy

    def close(self) -> None:
        """End the process. A run that is going on ends with an error. May be called many times.

        Does nothing in a fork of the program, as the process is the program's.
        """
        if self._owner_pid != os.getpid():
            return
        self._closed = True
        step = self._step
        if step is not None:
            apart(step.cancellation.set)
            if step.thread == threading.get_ident():
                return  # `on_output` calls, and the run does the rest when it ends
        attended(lambda _: self._give_back(), "moonpool-sandbox-end", go_on)

    def _give_back(self) -> None:
        with self._lock:
            self._running = None
            worker, self._worker = self._worker, None
            if worker is not None and self.pool is not None and self._forgotten.detach() is not None:
                self.pool.give_back(worker)


class _Pieces:
    """Carries what a run prints to an event loop."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str, str] | None]
        self.loop: asyncio.AbstractEventLoop
        # Places for pieces that nobody has read.
        self.room = threading.Semaphore(_MOST_PIECES)
        self.is_left = False
        self.result: RunResult | None = None

    def tell(self, text: str, name: str) -> None:
        """Hand a piece over, once there is room for it. On the thread of the run."""
        while not self.room.acquire(timeout=_LOOK_S):
            if self.is_left:
                return
        self.loop.call_soon_threadsafe(self.queue.put_nowait, (text, name))


class RunStream:
    """Iterates in an event loop over what a run prints, in pairs of a text and the name of the stream.

    Nothing refers to it but its reader: the loop ends the run when it is left, and with it this object.
    """

    def __init__(self, pieces: _Pieces, step: _Step) -> None:
        self._pieces = pieces
        self._read = _reading(pieces, step)

    @property
    def result(self) -> RunResult:
        """Has the result of the run. Raises `InvalidRequest` before the end of the loop."""
        if self._pieces.result is None:
            raise InvalidRequest("the run has no result before the loop over its output has ended")
        return self._pieces.result

    def __aiter__(self) -> RunStream:
        return self

    async def __anext__(self) -> tuple[str, str]:
        return await self._read.__anext__()

    async def aclose(self) -> None:
        """End the run, if it goes on, and wait for that."""
        await self._read.aclose()


async def _reading(pieces: _Pieces, step: _Step) -> AsyncGenerator[tuple[str, str], None]:
    # Not earlier: an object that is never iterated over needs no loop.
    import asyncio

    pieces.loop, pieces.queue = asyncio.get_running_loop(), asyncio.Queue()
    task = pieces.loop.create_task(step.awaited())
    # After all pieces: they come by the same way.
    task.add_done_callback(lambda _: pieces.queue.put_nowait(None))
    try:
        while (piece := await pieces.queue.get()) is not None:
            pieces.room.release()
            yield piece
        pieces.result = await task
    finally:
        pieces.is_left = True
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


class _Step(_Call):
    """One call of `Sandbox.run`."""

    def __init__(
        self,
        box: Sandbox,
        source: Source,
        inputs: Mapping[str, Any] | None,
        files: Mapping[str, Content] | None,
        functions: Functions | None,
        on_output: Tell | None,
        timeout_s: float | None,
    ) -> None:
        super().__init__(functions, inputs, on_output)
        self._box = box
        self._pool = box.pool
        self._timeout_s = box.timeout_s if timeout_s is None else OF_RUNTIME.seconds("timeout_s", timeout_s)
        self.request = _request(source, inputs, read_files(files), self._functions)
        box._refuse_inside()

    def _run_in(self, pool: Pool, here: Here) -> RunResult:
        box = self._box
        try:
            box._take_turn(self)
            try:
                calls = self.calls(box.limits.calls, here)
                return box._run_alone(self, pool, self.tell(here), calls, self._timeout_s)
            finally:
                box._end_turn()
        except RunCancelled:
            if box._closed:
                raise InvalidRequest("the sandbox was closed") from None
            raise
        finally:
            if box._closed:  # perhaps by `on_output`, which cannot wait for this run
                box._give_back()


def _asked(
    running: Running, request: values.Written, limits: Limits, timeout_s: float, calls: HostCalls | None
) -> Ended:
    """Send a request, and wait for the answer. Raises OSError, `Abandoned`."""
    serve = None if calls is None else calls.answer
    return running.ask(request, _most_bytes(limits), time.monotonic() + timeout_s, serve)


def _most_bytes(limits: Limits) -> int:
    return limits.files_bytes + values.BESIDE_BYTES


def _request(
    source: Source, inputs: Mapping[str, Any] | None, files: dict[str, bytes], functions: Functions
) -> values.Written:
    """Return what a process gets. Raises `InvalidRequest`, `LoadFailed`."""
    name = ""
    if isinstance(source, FunctionType):
        source, name = function_source(source)
    elif not isinstance(source, str):
        OF_REQUEST.refuse("source", "a text or a function", source)
    OF_REQUEST.map("inputs", inputs or {}, "a map of names to values")
    asked = {"source": source, "name": name, "inputs": inputs or {}, "files": files, "functions": list(functions)}
    try:
        return values.write(asked)
    except values.Unsendable as error:
        raise InvalidRequest(f"inputs cannot be sent: {error}") from None


def _result(
    running: Running,
    ended: Ended,
    limits: Limits,
    timeout_s: float,
    was_killed: Callable[[], bool],
    calls: HostCalls | None,
    *,
    goes_on: bool = False,
    state_lost: bool = False,
) -> RunResult:
    """Make the result of a run that has answered, or has not. Kills the process, unless it answered and `goes_on`."""
    answer: dict[str, Any] = {"value": None, "is_repr": False, "files": {}}
    error: RunError | None = None
    lives = goes_on and ended.packet is not None
    code = None
    if ended.why == "died":
        code = running.end()
    elif not lives:
        running.process.kill()
        if ended.packet is None:
            running.wait_for_end()
    running.drain()
    if ended.packet is not None:
        try:
            found = running.answer(ended.packet, _most_bytes(limits), copies=lives)
            error = _check_answer(found)
            answer = found
        except RemoteProtocolError as broken:
            error = RunError("BrokenAnswer", f"the process sent something that is not an answer: {broken}")
    elif ended.why == "timeout":
        error = RunError("TimedOut", f"it did not end within {timeout_s:g} s and was killed", limit="timeout_s")
    elif ended.why == "mute":
        error = RunError("BrokenAnswer", "the process closed its channel, or sent something that is not an answer")
    elif was_killed():
        error = RunError("Closed", "the sandbox was closed, or the process from which it was forked has ended")
    else:
        error = _death(code)
    usage = RunUsage(ended.wall_s, ended.cpu_s, ended.peak_bytes)
    if calls is not None:
        usage = replace(usage, calls=calls.count, calls_s=calls.wall_s)
    return RunResult(
        answer["value"],
        running.stdout.text(),
        running.stderr.text(),
        error,
        answer["files"],
        usage,
        answer["is_repr"],
        state_lost,
    )


def _death(code: int | None) -> RunError:
    """Return the error of a process that ended before it answered."""
    name = "" if code is None else signal_name(code)
    if code is None or name == "SIGKILL":
        return RunError("Killed", "the process was killed, as a rule because memory ran out", limit="memory")
    if name == "SIGSYS":
        return RunError("Killed", f"the process {_ATTACKED}")
    if name == "SIGBUS":
        return RunError(
            "Killed", "the process was killed by SIGBUS: its shared memory had no room", limit="files_bytes"
        )
    if name:
        return RunError("Killed", f"the process was killed by {name}")
    return RunError("ProcessEnded", f"the process ended with code {code} before it answered")


def _check_answer(answer: object) -> RunError | None:
    """Check an answer, and return the error in it. Raises `RemoteProtocolError`."""
    if not isinstance(answer, dict) or answer.keys() != {"value", "is_repr", "error", "files"}:
        raise RemoteProtocolError("other fields")
    files, error = answer["files"], answer["error"]
    if type(answer["is_repr"]) is not bool or not isinstance(files, dict) or len(files) > MOST_FILES:
        raise RemoteProtocolError("fields of another kind")
    for name, content in files.items():
        if not is_safe_name(name) or not isinstance(content, bytes):
            raise RemoteProtocolError(f"a file of the name {name!r:.100}")
    if error is None:
        return None
    if not isinstance(error, dict) or error.keys() != {"type", "message", "traceback", "limit"}:
        raise RemoteProtocolError("an error with other fields")
    if not all(isinstance(text, str) for text in error.values()):
        raise RemoteProtocolError("an error that is not a text")
    limit = error["limit"] if error["limit"] in _LIMITS else ""
    kind, message, traceback = (shown(error[name][:_MOST_TEXT]) for name in ("type", "message", "traceback"))
    return RunError(kind[:200], message, traceback, limit)
