"""A confined process that forks others, in which source runs, and the runtime's end of one of these.

Theory of operation. A `Worker` belongs to one thread at a time: the pool hands it out and takes it back. `prepare`
forks the next process, after the one before has been killed and reaped, and the worker's folders are empty again. That
may happen long before there is something to run.

The process of a run is hostile from its first packet on. It has one socket to this process, and two pipes. `ask` sends
one packet, with the file that the arrays lie in and the file for the answer, and waits for one packet, for the end of
the process, or for the deadline. It reads the pipes meanwhile, so that nobody waits for a reader. What it looks at is a
copy, or, of a large answer, the file itself after the end of the process: what was checked cannot change. The end of a
process takes a third of a run, so nobody waits for it who need not. Whatever happens to the caller meanwhile, a signal
that raises included, the process is killed when its worker is prepared anew.

The file for the answer has its whole size from the beginning, and no memory until it is written to. It is sealed, so
its end cannot move away from under a reader. A place in it that was never written to reads as zeros, which would cost
this process memory that the run never had: an answer that claims more than was written is refused. A process that lives
on keeps its file for the next answer. No file of one process goes to another: it may have set attributes, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import pack
from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.source import values
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation.plan import IsolationPlan, plan_for
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import minimal
from moonpool.runtime.model.config.options import hardened
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.usage import addresses_of, cpu_s_of, peak_bytes_of
from moonpool.runtime.repository.environment import resolve
from moonpool.runtime.repository.loading import model_of
from moonpool.runtime.sandboxes.cancellation import RunCancellation, RunCancelled
from moonpool.runtime.sandboxes.functions import Serve
from moonpool.runtime.sandboxes.printed import Printed, Tell
from moonpool.runtime.sandboxes.settings import Limits, Settings
from moonpool.runtime.stubs.handle import Stubs
from moonpool.runtime.stubs.output import ERRORS
from moonpool.runtime.stubs.template import ForkedProcess, ForkRefused, TemplateGone, TemplateStub

_RUN = Path(__file__).resolve().parents[2] / "stub" / "source" / "run.py"
_START_S = 120.0
_EXIT_S = 5.0
# The time between the end of the channel and that of the process.
_CLOSED_S = 1.0
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# An answer of this size is mapped, and a smaller one copied: a map holds a descriptor as long as somebody has a part.
_MAPPED_BYTES = 1 << 20
_BLOCK_BYTES = 512
# The most memory of an answer that a `Sandbox` keeps for the next one.
_KEPT_BYTES = 32 << 20


class RunProcess(ForkedProcess):
    """The process of a run. It starts no others, so nothing of its group is left when it ends."""

    def _end_group(self) -> None:
        """Do nothing."""


class SourceStub(TemplateStub):
    """The handle of the process that forks runs."""

    process_class = RunProcess
    # The standard output of `moonpool run` is that of the source.
    printer = ERRORS
    may_leave_orphans = False

    def cancel_start(self) -> None:
        """Kill the process, which has seen no source, so that nobody needs its stacks."""
        self._give_up(RunCancelled())
        self.process.kill()


@dataclass(slots=True)
class Ended:
    """The end of one request to a process: its packet, or why there is none."""

    packet: bytes | None
    # "": it answered. Else `timeout`, `died`, or `mute`: it closed its channel, or sent what is no packet.
    why: str
    wall_s: float
    cpu_s: float
    peak_bytes: int


class Running:
    """A process in which source runs, or may run next."""

    def __init__(self, process: ForkedProcess, channel: Channel, stdout: Printed, stderr: Printed) -> None:
        """Own all of these."""
        self.process = process
        self.stdout, self.stderr = stdout, stderr
        self._channel = channel
        self.answer_fd = -1
        # The processor time that it had taken before it had anything to run, or until the last answer.
        self._cpu_s: float | None = None

    def limit(self, limits: Limits) -> None:
        """Send the limits, before the first request."""
        _send_limits(self._channel, limits, self.process.pid)

    def ask(self, written: values.Written, answer_bytes: int, deadline: float, serve: Serve | None = None) -> Ended:
        """Send a request, and wait for the answer until `deadline`, of `time.monotonic`. Raises OSError.

        `serve` answers the calls that come before it. What it raises is passed on.
        """
        began_s = time.monotonic()
        if self._cpu_s is None:
            self._cpu_s = cpu_s_of(self.process.pid)
        memory_fd = -1
        try:
            if written.needs_memory:
                memory_fd = os.memfd_create("moonpool_run", os.MFD_CLOEXEC)
            packet = values.parcel(written, memory_fd)
            self._offer_answer(answer_bytes)
            fds = [self.answer_fd] + ([memory_fd] if memory_fd >= 0 else [])
            try:
                self._channel.send_fds(packet, *fds)
            except (PeerGone, BlockingIOError):
                return self._ended(None, "died", began_s)
        finally:
            if memory_fd >= 0:
                os.close(memory_fd)
        answer_call = None if serve is None else partial(self._answer_call, serve, answer_bytes)
        return self._wait(deadline, began_s, answer_call)

    def _offer_answer(self, size_bytes: int) -> None:
        """Have a file for the answer. A process that lives on gets the one that it has filled before, if that is small:
        to write where memory is takes a quarter of the time.
        """
        if self.answer_fd >= 0:
            file = os.fstat(self.answer_fd)
            if file.st_size == size_bytes and file.st_blocks * _BLOCK_BYTES <= _KEPT_BYTES:
                return
        self.forget_answer()
        self.answer_fd = os.memfd_create("moonpool_answer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.answer_fd, size_bytes)
        fcntl.fcntl(self.answer_fd, fcntl.F_ADD_SEALS, _SEALS)

    def _answer_call(self, serve: Serve, most_bytes: int, packet: bytes) -> str:
        """Answer a call. Returns why that is not possible, "" if it was."""
        memory_fd = -1
        try:
            written = serve(self.answer(packet, most_bytes, copies=True))
            if written.needs_memory:
                memory_fd = os.memfd_create("moonpool_reply", os.MFD_CLOEXEC)
            self._channel.send_fds(values.parcel(written, memory_fd), *([memory_fd] if memory_fd >= 0 else []))
        except PeerGone:
            return "died"
        except (RemoteProtocolError, BlockingIOError):  # it does not even read the replies
            return "mute"
        finally:
            if memory_fd >= 0:
                os.close(memory_fd)
        return ""

    def _wait(self, deadline: float, began_s: float, answer_call: Callable[[bytes], str] | None) -> Ended:
        poll = select.poll()
        channel_fd, pidfd = self._channel.fileno(), self.process.pidfd
        captures = {each.fd: each for each in (self.stdout, self.stderr)}
        for fd in (channel_fd, pidfd, *captures):
            poll.register(fd, select.POLLIN)
        while True:
            left_ms = (deadline - time.monotonic()) * 1000
            ready = poll.poll(max(0.0, left_ms))
            fds = {fd for fd, _ in ready}
            packet, why = None, ""
            if channel_fd in fds or pidfd in fds:
                packet, why = self._received()
                if answer_call is None or packet is None or packet[:1] != values.CALL:
                    return self._ended(packet, why, began_s)
            for fd in fds & captures.keys():
                if not captures[fd].read():
                    poll.unregister(fd)
            if left_ms <= 0:
                return self._ended(None, "timeout", began_s)
            if answer_call is not None and packet is not None and (why := answer_call(packet[1:])):
                return self._ended(None, why, began_s)

    def _received(self) -> tuple[bytes | None, str]:
        """Return the packet of a process that has sent one, or has ended, or has closed its channel."""
        try:
            packet = self._channel.receive_ready()
        except PeerGone:
            # The kernel closes the channel of a process that ends first.
            return None, "died" if self.process.wait(_CLOSED_S) is not None else "mute"
        except MoonpoolError:
            return None, "mute"
        return packet, "" if packet is not None else "died"

    def _ended(self, packet: bytes | None, why: str, began_s: float) -> Ended:
        pid = self.process.pid
        before_s, self._cpu_s = self._cpu_s or 0.0, cpu_s_of(pid)
        # After the processor time: the process may still be at work.
        wall_s = time.monotonic() - began_s
        return Ended(packet, why, wall_s, max(0.0, self._cpu_s - before_s), peak_bytes_of(pid))

    def answer(self, packet: bytes, most_bytes: int, *, copies: bool) -> Any:
        """Return the answer in a packet. Raises `RemoteProtocolError`, `LoadFailed`.

        `copies`: the process lives on. Otherwise it has been killed.
        """

        def mapped(size_bytes: int) -> values.Buffer:
            if size_bytes > most_bytes:
                raise RemoteProtocolError(f"an answer of {size_bytes} bytes, of {most_bytes} at most")
            written_bytes = os.fstat(self.answer_fd).st_blocks * _BLOCK_BYTES
            if size_bytes > written_bytes:
                raise RemoteProtocolError(f"an answer of {size_bytes} bytes, of which {written_bytes} were written")
            if size_bytes < _MAPPED_BYTES or copies:
                return _read(self.answer_fd, size_bytes)
            self.wait_for_end()
            return memoryview(mmap.mmap(self.answer_fd, size_bytes, access=mmap.ACCESS_COPY))

        try:
            return values.unpacked(packet, mapped)
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(f"an answer that cannot be read: {error}") from error

    def forget_answer(self) -> None:
        if self.answer_fd >= 0:
            os.close(self.answer_fd)
            self.answer_fd = -1

    def tell(self, tell: Tell | None) -> None:
        """Have `tell` get what the process prints from now on."""
        self.stdout.tell = self.stderr.tell = tell

    def wait_for_end(self) -> None:
        """Wait for the end of the process, which has been killed. Raises `LoadFailed` if it stays."""
        if not _has_ended(self.process, _EXIT_S):
            raise LoadFailed("the process of a run cannot be killed", stage="start")

    def end(self) -> int | None:
        """Kill the process, and reap it. Returns its exit code; None if it stays."""
        self.process.kill()
        return self.process.wait(_EXIT_S)

    def drain(self) -> None:
        """Read what it has printed."""
        self.stdout.drain()
        self.stderr.drain()

    def close(self) -> None:
        """Close everything. The process has ended."""
        self.forget_answer()
        self._channel.close()
        self.stdout.close()
        self.stderr.close()
        self.process.close()


class Worker:
    """A confined process that forks runs, one after the other. Its owner alone may call methods."""

    def __init__(self, stubs: Stubs, settings: Settings, name: str, cancellation: RunCancellation) -> None:
        """Start it. Raises `LoadFailed`, `ConfigError`, `BadEnvironment`, `RunCancelled`."""
        self.settings = settings
        self.running: Running | None = None
        # True if the process of the next run waits for it.
        self.is_prepared = False
        self._closing = threading.Lock()
        self._stubs = stubs
        self._model = _model(settings, name)
        options = self._model.options
        stop = threading.Event()
        with cancellation.by(stop.set):
            self._environment = resolve(options.execution_env_path, _RUN.parent, only_wheels=True, stop=stop)
        self._stub: SourceStub | None = None
        try:
            self.start(cancellation)
        except BaseException:
            self.close()
            raise

    def start(self, cancellation: RunCancellation) -> None:
        """Start the process again, after it has ended. Raises `LoadFailed`, `RunCancelled`."""
        self._end()
        cancellation.check()
        try:
            plan = _with_room(plan_for(self._model, self._environment, "", forks=True))
            stub = self._stub = SourceStub(self._stubs, self._model, self._model.name, plan)
            start = {"mode": "source", "imports": self.settings.imports, "log": self._stubs.log.levels}
            with cancellation.by(stub.cancel_start):
                stub.start(start, time.monotonic() + _START_S)
            stub.check_threads()
            _check_filter(stub)
        except ForkRefused as error:
            raise LoadFailed(f"no source can run: the process for it cannot be forked, since {error}") from error
        except OSError as error:
            raise LoadFailed(f"nothing could be prepared for a run: {error}", stage="start") from error
        finally:
            cancellation.check()

    @property
    def is_healthy(self) -> bool:
        """True while its process runs."""
        return self._stub is not None and not _has_ended(self._stub.process)

    def fresh(self, limits: Limits, tell: Tell | None) -> Running:
        """Return a process that has run nothing yet, with these limits. Raises `LoadFailed`."""
        if not self.is_healthy:  # what it forked ends a moment after it
            raise LoadFailed("the process for runs has ended", stage="start")
        if self.running is None or not self.is_prepared or _has_ended(self.running.process):
            self.prepare(limits)
        else:
            self.running.limit(limits)
        running = self.running
        if running is None:
            raise LoadFailed("the process for runs has ended", stage="start")
        self.is_prepared = False
        running.tell(tell)
        return running

    def prepare(self, limits: Limits | None = None) -> None:
        """End the run that there was, and fork the process for the next one. Raises `LoadFailed`.

        A process whose `limits` are there when it begins gets ready in less time than one that waits for them.
        """
        self.finish()
        stub = self._stub
        if stub is None:
            raise LoadFailed("the process for runs has ended", stage="start")
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            channel, end = Channel.pair()
            mine.callback(channel.close)
            theirs.callback(end.close)
            if limits is not None:
                _send_limits(channel, limits, stub.process.pid)
            captures, fds = [], [end.fileno()]
            for name in ("stdout", "stderr"):
                read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                theirs.callback(os.close, write_fd)
                captures.append(Printed(name, read_fd))
                mine.callback(captures[-1].close)
                fds.append(write_fd)
            try:
                process = stub.fork(self._model.name, *fds)
            except (TemplateGone, ForkRefused) as error:
                raise LoadFailed(f"no process could be forked for a run: {error}", stage="start") from error
            mine.pop_all()
        self.running = Running(process, channel, *captures)
        self.is_prepared = True

    def finish(self) -> None:
        """End the run that there is, if there is one. Raises `LoadFailed` if it stays."""
        running, self.running = self.running, None
        self.is_prepared = False
        if running is None:
            return
        try:
            code = running.end()
        finally:
            running.close()
        if code is None:
            self._end()
            raise LoadFailed("the process of a run cannot be killed", stage="start")

    def close(self) -> None:
        """End the process, and what it forked. May be called many times, and by several threads: all wait."""
        with self._closing:
            try:
                self._end()
            finally:
                self._environment.release()

    def _end(self) -> None:
        stub, self._stub = self._stub, None
        running, self.running = self.running, None
        self.is_prepared = False
        try:
            if stub is not None:
                stub.end()
        finally:
            if running is not None:
                running.close()


def _read(fd: int, size_bytes: int) -> memoryview:
    """Return so many bytes of a file, in memory of numpy's, which is not filled before. Raises OSError."""
    content = np.empty(size_bytes, np.uint8).data
    done = 0
    while done < size_bytes:
        # The kernel reads 2 GiB at a time at most.
        count = os.preadv(fd, [content[done:]], done)
        if not count:
            raise OSError(errno.EIO, "the file ends before its answer")
        done += count
    return content


def _send_limits(channel: Channel, limits: Limits, pid: int) -> None:
    """Send the limits to a process that has as many addresses in use as `pid`: these are not the source's."""
    given = limits.as_dict()
    given["memory"] += addresses_of(pid)
    with contextlib.suppress(PeerGone):  # the next send will tell
        channel.send(pack(given))


def _model(settings: Settings, name: str) -> Model:
    """Return the model as which a worker is known to what starts and confines processes."""
    where = ModelSource("source", _RUN, None, _RUN.parent, _RUN.parent)
    parameters = {key: {"string_value": value} for key, value in settings.options}
    parameters["MOONPOOL_SANDBOX"] = {"string_value": settings.sandbox}
    model = model_of(name, where, minimal(name), None, 1, {"parameters": parameters})
    model.options = hardened(model.options)
    return model


def _with_room(plan: IsolationPlan) -> IsolationPlan:
    """Return the plan with the limit of a file's size for the file with the answer."""
    limits = dict(plan.policy.limits)
    limits["file_bytes"] += values.BESIDE_BYTES
    return replace(plan, policy=plan.policy.changed(limits=limits))


def _check_filter(stub: SourceStub) -> None:
    """Raise `LoadFailed` without the filter, which alone keeps a run from starting processes that outlive it."""
    if stub.confinement is None or "seccomp" not in stub.confinement.layers:
        raise LoadFailed("no source can run here: the kernel has no filter for system calls", stage="sandbox")


def _has_ended(process: ChildProcess, timeout_s: float = 0.0) -> bool:
    """Wait so long for the end of a process. It need not have been reaped."""
    if process.pidfd < 0:
        return True
    poll = select.poll()
    poll.register(process.pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process with this exit code; "" for none."""
    try:
        return signal.Signals(-code).name if code < 0 else ""
    except ValueError:
        return f"signal {-code}"
