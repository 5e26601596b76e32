"""Spares: processes that wait with numpy imported and no model, each of which becomes the stub of one contained model.

Theory of operation. `stub/spare.py` is the other end, and says what a spare is. A spare is a child of this process like
any stub, started by an exec. What may have gone wrong until it says that it has become the stub, its death included,
costs the start of a process and nothing else: then `take` tries the next spare, and returns None at last. From that
byte on it is a stub, with the errors of stubs.

Which spare. As with a blank template (`blank_templates.py`), a spare is good for a start only if a process that is
started now would inherit the same and read the same: the interpreter, the variables but for those of the model's own
folder, what this process passes on (`inherited_state`), the file of numpy and the folder that it lies in. All of these
but the files are its key; the files are looked at when it is taken.

How many. A key that was used in the last `KEEP_S` has `count` spares, and all keys together `MOST`; those that were
used last come first. There is none before the first model asked for one. Spares are made one after the other, by a
thread that lives as long as there is something to do, and not while a model loads (`while_loading`): a burst of loads
would have to share the processors with it. A load that finds the spare of its key in the making waits for it, since
that was begun earlier than what it could begin itself.

Locks. `_lock` guards the table, the counts and the state of the thread, and is held for moments. `_Spare.turn` is held
by the thread that makes the spare until it is ready, and then by the one that takes or ends it. The reactor only starts
the thread. `close` takes all spares out of the table, kills them, which ends every wait for one, and joins the thread.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.arguments import OF_RUNTIME
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.blank_templates import PASSING, inherited_state, install_stamp, log_output
from moonpool.runtime.process.child import ChildProcess, SpawnedProcess, boot_command
from moonpool.runtime.process.files import parsed_json
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.spawner import spawn, where_processes_start
from moonpool.runtime.process.threads import start_thread

_log = RuntimeLog("moonpool")
VARIABLE = "MOONPOOL_SPARES"
# The most spares of one runtime, whatever it asks for.
MOST = 4
# A key that no model used for so long has no spares any more.
KEEP_S = 600.0
# The time without a load after which spares are made.
SETTLE_S = 0.02
# The most time that a start waits for a spare, to be ready and to become the stub. A machine may be busy.
_READY_S, _TAKE_S, _END_S = 10.0, 5.0, 10.0
# The memory that a limit has to leave beside what a spare has, or the model gets a process that was started under the
# limit.
_ROOM_BYTES = 64 << 20
# What a pipe holds.
# Variables that each contained process has for itself. A folder that cannot exist has no packages of a user.
_OWN = ("HOME", "TMPDIR")
_NOWHERE = "/dev/null/moonpool"
_Key = tuple[str, tuple[tuple[str, str], ...], tuple[bytes, ...]]


class Spares:
    """The spares of one runtime. Any thread may call any method."""

    def __init__(self, reactor: Reactor, count: int = 0) -> None:
        """Keep `count` spares ready for each way in which contained models are started; none with 0."""
        self.count = count
        self._reactor = reactor
        self._lock = threading.Lock()
        # When each key was used; the one that was used last comes last.
        self._used_s: dict[_Key, float] = {}
        self._spares: dict[_Key, list[_Spare]] = {}
        # Those whose processes have neither become a stub nor been reaped.
        self._all: set[_Spare] = set()
        # The keys whose spares have said that they are no good, and what the log has about failures.
        self._unfit: set[_Key] = set()
        self._told: set[str] = set()
        self._loading = 0
        # The reactor will look soon, and when the next key is old.
        self._is_due = self._is_due_later = self._is_again = False
        self._is_closed = False
        self._maker: threading.Thread | None = None

    @contextlib.contextmanager
    def while_loading(self) -> Iterator[None]:
        """Make no spares meanwhile."""
        with self._lock:
            self._loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._loading -= 1
                is_last = not self._loading and bool(self._used_s)
            if is_last:
                self._look_soon()

    def take(
        self,
        python: str,
        environment: Mapping[str, str],
        name: str,
        fds: Sequence[int],
        *,
        memory_bytes: int | None = None,
        deadline: float | None = None,
    ) -> ChildProcess | None:
        """Let a spare become the stub of this name, with these descriptors for work, control, calls and output.

        Returns None if it has to be started in the ordinary way. `memory_bytes` is its limit of addresses. Blocks
        until half of the time to `deadline` has passed at most.
        """
        if not self.count or _is_relative(environment.get("PYTHONPATH", "")):
            return None
        key = _key_of(python, environment)
        with self._lock:
            self._used_s.pop(key, None)
            self._used_s[key] = time.monotonic()
            if len(self._used_s) > MOST:
                del self._used_s[next(iter(self._used_s))]
        order = json.dumps({"name": name, "variables": {each: environment.get(each) for each in (*_OWN, *PASSING)}})
        while (spare := self._pop(key)) is not None:
            try:
                outcome = spare.take(order, fds, memory_bytes, deadline)
            except BaseException:
                self._end(spare)
                raise
            if outcome is _Outcome.TAKEN:
                with self._lock:
                    self._all.discard(spare)
                return spare.process
            if outcome is _Outcome.TOO_LARGE and self._put_back(key, spare):
                return None
            self._end(spare)
        return None

    def _pop(self, key: _Key) -> _Spare | None:
        with self._lock:
            found = self._spares.get(key)
            return found.pop(0) if found else None

    def _put_back(self, key: _Key, spare: _Spare) -> bool:
        with self._lock:
            if not self._is_closed:
                self._spares.setdefault(key, []).append(spare)
            return not self._is_closed

    def _end(self, spare: _Spare) -> None:
        spare.end()
        with self._lock:
            self._all.discard(spare)

    # Making

    def _look_soon(self) -> None:
        """Look soon whether spares are to be made or ended."""
        with self._lock:
            if self._is_due or self._is_closed:
                return
            self._is_due = True
        self._reactor.call_later(SETTLE_S, self._look)

    def _look_later(self) -> None:
        """Look again when the key that was not used for longest is old."""
        with self._lock:
            if self._is_due_later or self._is_closed or not self._used_s:
                return
            self._is_due_later = True
            old_s = min(self._used_s.values()) + KEEP_S
        self._reactor.call_later(max(0.0, old_s - time.monotonic()) + SETTLE_S, self._look_now)

    def _look_now(self) -> None:
        with self._lock:
            self._is_due_later = False
        self._look()

    def _look(self) -> None:
        """Start the thread that makes and ends spares, unless it runs. On the reactor's thread."""
        with self._lock:
            self._is_due = False
            if self._maker is not None:
                self._is_again = True
            if self._is_closed or self._loading or self._maker is not None:
                return
            self._maker = threading.Thread(target=self._make_all, name="moonpool-spares", daemon=True)
            try:
                start_thread(self._maker)
            except OutOfThreads:
                self._maker = None

    def _make_all(self) -> None:
        """Make and end spares until nothing is to be done, or a model loads."""
        try:
            while (next_one := self._next()) is not None:
                key, spare = next_one
                if not self._make(key, spare):
                    break
        finally:
            with self._lock:
                self._maker = None
                # A load that ended meanwhile has found this thread.
                is_again = self._is_again and not (self._loading or self._is_due or self._is_closed)
                self._is_again = False
                self._is_due |= is_again
            if is_again:
                self._reactor.call_later(SETTLE_S, self._look)
            self._look_later()

    def _next(self) -> tuple[_Key, _Spare] | None:
        """End the spares that are too many, and put the next one that is to be made into the table."""
        with self._lock:
            wanted = self._wanted()
            too_many = []
            for key, spares in list(self._spares.items()):
                alive = [each for each in spares if each.is_alive]
                too_many += [each for each in spares if not each.is_alive] + alive[wanted.get(key, 0) :]
                self._spares[key] = alive[: wanted.get(key, 0)]
                if key not in wanted:
                    del self._spares[key]
            made = None
            if not self._is_closed and not self._loading:
                for key, count in wanted.items():
                    if len(self._spares.setdefault(key, [])) < count and key not in self._unfit:
                        made = key, self._begin(key)
                        break
        for each in too_many:
            self._end(each)
        return made

    def _begin(self, key: _Key) -> _Spare:
        """Put a spare that this thread makes into the table. With the lock."""
        spare = _Spare(*key)
        spare.turn.acquire()
        self._spares.setdefault(key, []).append(spare)
        self._all.add(spare)
        return spare

    def _wanted(self) -> dict[_Key, int]:
        """Return the number of spares for each key that is still used, and forget the others. With the lock."""
        old = time.monotonic() - KEEP_S
        self._used_s = {key: used_s for key, used_s in self._used_s.items() if used_s > old}
        self._unfit &= self._used_s.keys()
        wanted, left = {}, MOST
        for key in reversed(self._used_s):
            wanted[key] = min(self.count, left)
            left -= wanted[key]
        return {key: count for key, count in wanted.items() if count}

    def _make(self, key: _Key, spare: _Spare) -> bool:
        """Make a spare that is in the table, whose turn this thread has. Returns False if that failed."""
        is_unfit, why = False, ""
        try:
            why = spare.begin()
            is_unfit = bool(why)
        except (OSError, ValueError, MoonpoolError) as error:
            why = str(error) or type(error).__name__
        finally:
            spare.turn.release()
        if not why:
            return True
        with self._lock:
            # Otherwise another thread has taken it, or all are ended.
            is_here = spare in self._spares.get(key, ())
            if is_here:
                self._spares[key].remove(spare)
            if is_unfit:
                self._unfit.add(key)
            is_news = is_here and why not in self._told
            self._told.add(why)
        if is_here:
            self._end(spare)
        if is_news:
            _log.info("no process is kept ready for models in a sandbox: %s; they start without one", why)
        return False

    # Shown

    @property
    def is_making(self) -> bool:
        """True while spares are made or ended, or soon will be, if any are."""
        with self._lock:
            return self._maker is not None or self._is_due

    @property
    def waiting(self) -> list[int]:
        """The processes that wait for a model."""
        with self._lock:
            spares = [each for spares in self._spares.values() for each in spares]
        return [each.process.pid for each in spares if each.process is not None and each.is_ready and each.is_alive]

    # End

    def close(self) -> None:
        """End all spares, and wait. Not on the reactor's thread."""
        with self._lock:
            self._is_closed = True
            self._spares.clear()
            left, maker = list(self._all), self._maker
        for each in left:
            each.kill()
        if maker is not None:
            maker.join()
        for each in left:
            self._end(each)


class _Outcome(Enum):
    TAKEN = auto()
    # A limit of memory leaves it too little. It was not asked.
    TOO_LARGE = auto()
    FAILED = auto()


class _Spare:
    """A process that waits. Whoever calls `begin` or `take` has its turn, or gets it there."""

    def __init__(self, python: str, variables: tuple[tuple[str, str], ...], inherited: tuple[bytes, ...]) -> None:
        self.turn = threading.Lock()
        self.process: SpawnedProcess | None = None
        self._python, self._variables, self._inherited = python, variables, inherited
        self._channel: socket.socket | None = None
        self._is_given_up = False
        # The file of its numpy, what it was when the spare was ready, and the addresses that the spare had then.
        self._numpy = ""
        self._stamp: tuple[object, ...] = ()
        self._addresses = 0

    @property
    def is_alive(self) -> bool:
        """False if its process has ended."""
        process = self.process
        return process is None or _is_running(process.pidfd)

    @property
    def is_ready(self) -> bool:
        """True once it may be taken."""
        return bool(self._stamp)

    def begin(self) -> str:
        """Start the process, and wait until it is ready. Returns why it is no good, or "".

        Raises OSError, `OutOfThreads`, and ValueError if it answers with no JSON.
        """
        if where_processes_start(inherited_state) != self._inherited:
            raise OSError("what new processes inherit from this one has changed")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not a file: Python remembers whether its output is one, and that of a stub is a pipe.
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            with theirs, open(write_fd, "wb", buffering=0):
                process = spawn(
                    boot_command(self._python, "moonpool_spare", "-", -1, theirs.fileno(), -1),
                    environment={**dict(self._variables), **dict.fromkeys(_OWN, _NOWHERE)},
                    folder="/",
                    output_fd=write_fd,
                    fds=[theirs.fileno()],
                )
            self.process = SpawnedProcess(process)
            if self._is_given_up:
                self.process.kill()
            self._channel.settimeout(_READY_S)
            packet = self._channel.recv(65_536)
            why, self._numpy, self._addresses = parsed_json(packet) if packet else ("it ended", "", 0)
            self._stamp = install_stamp(self._python, self._numpy)
            log_output(read_fd, f"a spare of {self._python}")
            return str(why)
        finally:
            os.close(read_fd)

    def take(self, order: str, fds: Sequence[int], memory_bytes: int | None, deadline: float | None) -> _Outcome:
        """Let it become a stub. If it cannot, or does not in time, the caller ends it."""
        if not self.turn.acquire(timeout=_half_of(deadline, _READY_S)):
            return _Outcome.FAILED
        try:
            if (
                self.process is None
                or self._channel is None
                or not self._stamp
                or self._stamp != install_stamp(self._python, self._numpy)
            ):
                return _Outcome.FAILED
            if memory_bytes is not None and self._addresses + _ROOM_BYTES > memory_bytes:
                return _Outcome.TOO_LARGE
            # Another process of this user may have stopped it.
            self.process.signal(signal.SIGCONT)
            self._channel.settimeout(_half_of(deadline, _TAKE_S))
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._channel.sendmsg([order.encode()], [rights], socket.MSG_NOSIGNAL)
            if self._channel.recv(64) != b"\1":
                return _Outcome.FAILED
            self._channel.close()
            self.process.way = "spare"
            return _Outcome.TAKEN
        except OSError as error:  # a timeout included
            _log.debug("a spare of %s does not answer: %s", self._python, error)
            return _Outcome.FAILED
        finally:
            self.turn.release()

    def kill(self) -> None:
        """Begin to end it. Does not wait."""
        self._is_given_up = True
        if self.process is not None:
            self.process.kill()

    def end(self) -> None:
        """End it, and wait. May be called many times."""
        self.kill()
        with self.turn:
            if self.process is not None:
                if self.process.wait(_END_S) is None:
                    _log.error("a spare of %s cannot be killed: %s", self._python, repr(self.process))
                self.process.close()
            if self._channel is not None:
                self._channel.close()


def count_of(given: int | None) -> int:
    """Return the number of spares that a runtime was given, else that of the environment, else 1. Raises ValueError."""
    if given is not None:
        return OF_RUNTIME.whole("spares", given, 0, MOST)
    text = os.environ.get(VARIABLE) or "1"
    if not (text.isascii() and text.isdigit() and int(text) <= MOST):
        raise ValueError(f"{VARIABLE} must be a whole number from 0 to {MOST}, not {text!r:.80}")
    return int(text)


def _key_of(python: str, environment: Mapping[str, str]) -> _Key:
    own = (*_OWN, *PASSING)
    variables = tuple(sorted(item for item in environment.items() if item[0] not in own))
    return python, variables, where_processes_start(inherited_state)


def _half_of(deadline: float | None, most_s: float) -> float:
    """Return half of the time that is left: if it comes to nothing, the other half is left for a start in the ordinary
    way.
    """
    return most_s if deadline is None else min(most_s, max(0.001, (deadline - time.monotonic()) / 2))


def _is_relative(paths: str) -> bool:
    """Return True if one of these folders is relative, as a spare waits in another folder than the model's."""
    return any(path and not os.path.isabs(path) for path in paths.split(os.pathsep))


def _is_running(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)
