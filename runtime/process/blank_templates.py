"""Blank templates: processes that have imported numpy and nothing of any model, from which stubs are forked within
milliseconds.

Theory of operation. `stub/blank.py` is the other end, and explains the forks. A fork is a child of this process, like a
stub that was started. So from then on nothing depends on the template, which may be killed at any time: that costs the
next start the time of another template.

Which template. A fork inherits everything that the template inherited from this process when it began. So a template is
good for a start only if a process that is started now would inherit the same: the same interpreter, variables and
folder, and the same user, limits, processors and cgroup (`inherited_state`). All of these are its key. A template has
imported numpy from a file, which must still be the same one, in a folder to which nothing was installed since: the
interpreter reads `.pth` files there when it starts.

Variables of the moment. pytest changes one for every test (`PASSING`). It is no part of the key, and each fork gets it
as it is then.

Who shares. All open runtimes of a process share its templates (`TemplatePool`): a program with several waits for numpy
once. So does a suite of tests in which one stays open. The last runtime that closes ends them all. One that closes
earlier leaves what it was to end to another one.

Locks. `TemplatePool.lock` guards the table, the users and the numbers of forks, and is held for moments.
`_Template._turn` is held by the thread that starts a template or asks it for a fork, and waits for the answer; others
that start at the same time wait for their turn, which is shorter than to start a process each. The reactor never waits
for a turn: it tries again later (`_end_soon`).

Order of ending. A template without forks for `KEEP_S`, or one too many, is taken out of the table, marked and killed. A
thread that just asks it sees the end of the channel, sees the mark, and starts its stub in the ordinary way. Whoever
has the turn then reaps the process. It also looks for answers that nobody has read, as when a signal handler raised
between question and answer: such a fork is a child of this process that nobody knows, so it is killed and reaped.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.child import ChildProcess, SpawnedProcess, boot_command
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import spawn, where_processes_start
from moonpool.runtime.process.terminal import harmless

_log = RuntimeLog("moonpool")
# A template is kept for so long after its last fork has ended.
KEEP_S = 60.0
# The most templates. A program that changes a variable before each load would otherwise have one for each model.
_MOST = 4
# A machine may be busy. What takes longer is started in the ordinary way.
_READY_S, _FORK_S, _END_S = 30.0, 10.0, 10.0
_AGAIN_S = 0.02
# A start with less time than this does not wait for a template that is not there yet: half of its time might go into
# that.
_LEAST_S = 1.0
# What a pipe holds.
_OUTPUT_BYTES = 65_536
_INHERITED = (
    b"Umask:", b"Uid:", b"Gid:", b"Groups:", b"CapInh:", b"CapPrm:", b"CapEff:", b"CapBnd:", b"CapAmb:",
    b"NoNewPrivs:", b"Seccomp:", b"Seccomp_filters:", b"Cpus_allowed:", b"Mems_allowed:",
)  # fmt: skip
# Variables that no interpreter and no library reads while it starts.
PASSING = ("PYTEST_CURRENT_TEST",)
# Where `stat` has the niceness and the policy of scheduling, counted from the field after the name.
_NICE, _REAL_TIME = 16, slice(37, 39)
_Key = tuple[str, str, tuple[tuple[str, str], ...], tuple[bytes, ...]]


class TemplatePool:
    """Templates, and the runtimes that use them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Those that may be asked; the one that was used last comes last.
        self.templates: dict[_Key, _Template] = {}
        # Those whose processes may not have been reaped.
        self.all: set[_Template] = set()
        self.users: list[BlankTemplates] = []


# The pool of this process comes last. Those before it belong to processes that this one was forked from: they are
# kept, as a socket that nobody closed would warn of it.
_pools = [TemplatePool()]
os.register_at_fork(after_in_child=lambda: _pools.append(TemplatePool()))


class BlankTemplates:
    """Forks the stubs of one runtime from blank templates, which it starts and ends as they are needed.

    Any thread may call any method.
    """

    def __init__(self, reactor: Reactor, pool: TemplatePool | None = None) -> None:
        """Use the templates of `pool`, by default those of this process."""
        self._reactor = reactor
        self._pool = pool or _pools[-1]
        self._is_closed = False

    def fork(
        self,
        python: str,
        environment: Mapping[str, str],
        folder: str,
        name: str,
        fds: Sequence[int],
        deadline: float | None,
    ) -> ChildProcess | None:
        """Fork a stub with these descriptors, for work, control, calls and output.

        Returns None if it has to be started in the ordinary way. Blocks until `deadline` of `time.monotonic` at most,
        while the template starts.
        """
        inherited = where_processes_start(inherited_state)
        lasting = tuple(sorted(item for item in environment.items() if item[0] not in PASSING))
        key = (python, folder, lasting, inherited)
        with self._pool.lock:
            if self._is_closed:
                return None
            if self not in self._pool.users:
                self._pool.users.append(self)
            template = self._pool.templates.pop(key, None)
            if template is None:
                template = _Template(python, environment, folder)
                self._pool.all.add(template)
            self._pool.templates[key] = template
            template.uses += 1
            crowded_out = [self._pool.templates.pop(old) for old in list(self._pool.templates)[:-_MOST]]
            for each in crowded_out:
                self._retire(each)
        pid = None
        try:
            passing = {each: environment.get(each) for each in PASSING}
            pid = template.fork(json.dumps([name, passing]), fds, deadline)
            return None if pid is None else _Fork(pid, lambda: self._leave(template, was_used=True))
        except BaseException:
            pid = None  # it has ended again, or nobody knows of it
            raise
        finally:
            if pid is None:
                # One that never forks is tried anew now and then: what it lacked may be there again.
                self._leave(template, was_used=False)

    def _leave(self, template: _Template, *, was_used: bool) -> None:
        """Count one use less: a fork has ended, or there was none."""
        with self._pool.lock:
            template.uses -= 1
            if was_used:
                template.used_s = time.monotonic()
            if template in self._pool.all and self._pool.users:
                self._pool.users[0].look_after(template)

    def look_after(self, template: _Template) -> None:
        """End a template once it is not needed. With the pool's lock."""
        if template.is_retired:
            self._reactor.call_soon(lambda: self._end_soon(template))
        elif not template.uses:
            self._reactor.call_later(KEEP_S, lambda: self._drop_if_idle(template))

    def _drop_if_idle(self, template: _Template) -> None:
        with self._pool.lock:
            # Used meanwhile: the end of that use looks again.
            if template.uses or time.monotonic() - template.used_s < KEEP_S or self._is_closed:
                return
            for key in [key for key, each in self._pool.templates.items() if each is template]:
                del self._pool.templates[key]
            self._retire(template)

    def _retire(self, template: _Template) -> None:
        template.retire()
        self.look_after(template)

    def _end_soon(self, template: _Template) -> None:
        """End a retired template without waiting for it. On the reactor's thread."""
        if template.try_end():
            with self._pool.lock:
                self._pool.all.discard(template)
        elif not self._is_closed:
            self._reactor.call_later(_AGAIN_S, lambda: self._end_soon(template))

    def close(self) -> None:
        """Fork no more. The last user ends all templates, and waits. Not on the reactor's thread."""
        with self._pool.lock:
            self._is_closed = True
            if self in self._pool.users:
                self._pool.users.remove(self)
            if self._pool.users:
                # What was to be done on this reactor.
                for template in self._pool.all:
                    self._pool.users[0].look_after(template)
                return
            self._pool.templates.clear()
            left = list(self._pool.all)
            self._pool.all.clear()
        for template in left:
            template.retire()
        for template in left:
            template.end()


class _Gone(Exception):
    """The template has ended, or does not answer."""


class _Template:
    """A template, with its process while there is one. The pool's lock guards `uses` and `used_s`."""

    def __init__(self, python: str, environment: Mapping[str, str], folder: str) -> None:
        self.uses, self.used_s = 0, 0.0
        self._python, self._environment, self._folder = python, environment, folder
        self._turn = threading.Lock()
        self.is_retired = False
        # True if no stub can be forked from such a process.
        self._is_unfit = False
        self._process: _TemplateProcess | None = None
        self._channel: socket.socket | None = None
        # The file of its numpy, and what it was when the template was ready.
        self._numpy = ""
        self._stamp: tuple[object, ...] = ()

    def fork(self, order: str, fds: Sequence[int], deadline: float | None) -> int | None:
        """Return the pid of a fork, a child of this process that the caller owns; None if there is none."""
        wait_s, may_begin = _READY_S, True
        if deadline is not None:
            left_s = deadline - time.monotonic()
            may_begin = left_s >= _LEAST_S
            # If it comes to nothing, the other half is left for a start in the ordinary way.
            wait_s = min(_READY_S, max(0.0, left_s / 2)) if may_begin else 0.0
        if not self._turn.acquire(timeout=wait_s):
            return None
        try:
            for _ in range(2):  # it may have been killed since it was used last
                if self._channel is None or self._stamp != install_stamp(self._python, self._numpy):
                    if not may_begin:
                        return None
                    self._end()
                    self._begin(wait_s)
                if self._is_unfit or self.is_retired or self._channel is None:
                    return None
                try:
                    return self._ask(self._channel, order, fds)
                except _Gone as error:
                    _log.debug("a template of %s has ended: %s", self._python, error)
                    self._end()
            return None
        except BaseException:
            self._end()
            raise
        finally:
            self._turn.release()

    def _begin(self, wait_s: float) -> None:
        """Start the process and wait until it can fork. If it cannot, it is unfit from then on."""
        if self._is_unfit or self.is_retired:
            return
        try:
            why = self._start(wait_s)
        except TimeoutError:
            # A model with little time to load says nothing about the template.
            self._is_unfit = wait_s == _READY_S
            why = f"it was not ready within {wait_s:g} s"
        except (OSError, ValueError) as error:
            self._is_unfit, why = True, str(error)
        else:
            self._is_unfit = bool(why)
        if why:
            self._end()
            _log.info("cannot fork stubs from a template of %s: %s", self._python, why)

    def _start(self, wait_s: float) -> str:
        """Start the process. Returns why it cannot fork, or "" if it can. Raises OSError, and ValueError if it answers
        with no JSON.
        """
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not a file: Python remembers whether its output is one, and that of the forks is a pipe.
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            with theirs, open(write_fd, "wb", buffering=0):
                fds = ("-", -1, theirs.fileno(), -1)
                process = spawn(
                    boot_command(self._python, "moonpool_blank_template", *fds),
                    environment=self._environment,
                    folder=self._folder,
                    output_fd=write_fd,
                    fds=[theirs.fileno()],
                )
                self._process = _TemplateProcess(process)
            self._channel.settimeout(wait_s)
            packet = self._channel.recv(65_536)
            self._channel.settimeout(_FORK_S)
            why, self._numpy = json.loads(packet) if packet else ("it ended", "")
            self._stamp = install_stamp(self._python, self._numpy)
            log_output(read_fd, f"a template of {self._python}")
            return str(why)
        finally:
            os.close(read_fd)

    @staticmethod
    def _ask(channel: socket.socket, order: str, fds: Sequence[int]) -> int | None:
        """Return the pid of a fork; None if the kernel refuses one. Raises `_Gone`."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        try:
            channel.sendmsg([order.encode()], [rights], socket.MSG_NOSIGNAL)
            answer = channel.recv(64)
        except OSError as error:  # a timeout included
            raise _Gone(str(error)) from error
        if not answer:
            raise _Gone("it closed its channel")
        pid = int(answer)
        return pid if pid > 0 else None

    def retire(self) -> None:
        """Begin to end the process, and let no other one begin. Does not wait."""
        self.is_retired = True
        process = self._process
        if process is not None:
            process.kill()

    def try_end(self) -> bool:
        """End a retired template unless that would take time. Returns True if it has ended."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._process is not None and self._process.wait(0) is None:
                self._process.kill()
                return False
            self._end()
            return True
        finally:
            self._turn.release()

    def end(self) -> None:
        """End a retired template, and wait until a thread that uses it has left."""
        with self._turn:
            self._end()

    def _end(self) -> None:
        """End the process if there is one, and what it has forked without anybody's knowledge. Needs the turn."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if process is not None:
            process.kill()
            if process.wait(_END_S) is None:
                _log.error("a template of %s cannot be killed: %s", self._python, repr(process))
            process.close()
        if channel is not None:
            with contextlib.suppress(OSError, ValueError):
                channel.setblocking(False)
                while answer := channel.recv(64):
                    _end_unknown(int(answer))
            channel.close()


def _end_unknown(pid: int) -> None:
    """End a fork whose number nobody has read."""
    if pid > 0:
        process = SpawnedProcess(pid)
        process.kill()
        process.wait(_END_S)
        process.close()


class _TemplateProcess(SpawnedProcess):
    """The process of a template."""

    def _end_group(self) -> None:
        """End nothing: a fork is in the group of its template until it has a session of its own, and is not its own."""


class _Fork(SpawnedProcess):
    """The process of a stub that was forked from a blank template: a child of this process like any other."""

    way = "fork"

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        """Own a process that was not reaped. `ended` is called when it has been, and is closed. Raises OSError."""
        self._ended = ended
        super().__init__(pid)

    def close(self) -> None:
        was_open = self.pidfd >= 0
        super().close()
        if was_open:
            self._ended()


def inherited_state() -> tuple[bytes, ...]:
    """Return what a new process inherits from this thread beside its variables and its folder."""
    lines = _read("/proc/thread-self/status").splitlines()
    fields = _read("/proc/thread-self/stat").rpartition(b")")[2].split()
    return (
        *(line for line in lines if line.startswith(_INHERITED)),
        *fields[_NICE : _NICE + 1],
        *fields[_REAL_TIME],
        _read("/proc/self/limits"),
        _read("/proc/thread-self/cgroup"),
        _read("/proc/self/oom_score_adj"),
    )


def log_output(read_fd: int, who: str) -> None:
    """Log what a process that waits for a model has printed until now."""
    os.set_blocking(read_fd, False)
    with contextlib.suppress(BlockingIOError):
        for line in os.read(read_fd, _OUTPUT_BYTES).decode(errors="replace").splitlines():
            _log.info("[%s] %s", who, harmless(line))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def install_stamp(python: str, numpy: str) -> tuple[object, ...]:
    """Return what changes when an interpreter or its numpy is replaced, or something is installed beside numpy."""
    stamps: list[object] = []
    for path in (python, numpy, os.path.dirname(os.path.dirname(numpy))):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            stamps.append((path, status.st_dev, status.st_ino, status.st_mtime_ns))
    return tuple(stamps)
