"""Counts the acts that the sandbox refuses a model's Python code, keeps samples, and reports them to the runtime.

Theory of operation. Python raises an audit event before it opens a file, makes a socket, forks and so on. The hook here
looks up the name of the event in a dict. For some twenty names, `Judge` decides if the sandbox is going to refuse the
act. There were three ways to learn of refusals. The kernel reports them only to privileged processes (`docs/SANDBOX.md`
says where to read them). An error that Python raises is lost if the model catches it, as libraries do that try several
things. A decision from the sandbox's own rules misses neither, needs no look at the outcome, and also gives the hint at
the end of an error.

The counts are a hint, and no part of the defence. Code in C raises no event, hostile code can call the kernel itself,
and the model chooses the texts of samples. So nothing depends on them, and everything is bounded: a few samples, a
number for each kind, one message to the runtime in half a second, which the runtime charges like any other.

A process that the model forked reports to nobody, and what it is refused may be the only reason why the model waits for
it. So it sends each denial to the stub, over a pair of sockets that it inherits; packets that find no room are lost. A
thread of the stub counts them, from the first fork on. What such a process says is as much worth as what the stub says:
the same model wrote both.

An event may come at any moment, even from a finalizer that interrupts this module. So the lock is one that its owner
may take again, and the hook sends nothing, because a send may block. A thread sends the messages. It starts with the
first refusal, as most models have none, and without `threading`, because the interrupted code may hold a lock of that
module.

Cost, on a virtual machine with two cores: 0.3 µs for an event without a rule; 2 µs for an `open` of code, or in the
scratch folder; 10 to 25 µs for an `open` elsewhere, where links are followed. A small request raises no event.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Collection
from queue import SimpleQueue
from typing import Any, Callable

from moonpool.ipc.codec import encode
from moonpool.ipc.denials import (
    BIND,
    CALLS,
    CONNECT,
    EXEC,
    FORK,
    KILL,
    KINDS,
    MAX_BYTES,
    MAX_COUNT,
    MAX_TEXTS,
    RESOLVE,
    SOCKET,
    TOLD,
    WRITE,
    in_sentence,
    option_for,
)
from moonpool.ipc.messages import Kind, beginning
from moonpool.ipc.policy import Policy, forked
from moonpool.stub import threads
from moonpool.stub.sandbox.judge import Judge, Verdict

# The least time between two messages.
_PAUSE_S = 0.5
# The latest denials, one of which may be the reason of an error, and the most seconds between the two.
_RECENT = 16
_FRESH_S = 10.0
# As Python and the C library word the answers of the filter, of Landlock and of mounts.
_WORDS_OF_REFUSALS = (
    "PermissionError",
    "Operation not permitted",
    "Permission denied",
    "Read-only file system",
    # Of a process that it started, by `concurrent.futures` and torch.
    "terminated abruptly",
    "exited unexpectedly",
)
_OF_CALLS = (SOCKET, BIND, CONNECT, FORK, EXEC, KILL)


class Denials:
    """The denials that the runtime does not know yet. Any thread may call any method at any moment."""

    # `threads` says why this lock is not in the dictionary.
    __slots__ = ("__dict__", "__weakref__", "_lock")

    def __init__(self) -> None:
        self._judge: Judge | None = None
        self._is_hooked = False
        # The function that decides about an audit event, by its name.
        self.events: dict[str, Callable[[Any], Verdict]] = {}
        self._send: Callable[[bytes], object] | None = None
        # In a stub whose model may fork: where its forks send their denials, and where the stub receives them.
        self._from_forks: socket.socket | None = None
        self._to_stub: socket.socket | None = None
        self._is_fork = self._has_receiver = False
        self._begin()

    def _begin(self) -> None:
        self._lock = threads.RLock()
        self._texts: Counter[tuple[int, str]] = Counter()
        self._rest: Counter[int] = Counter()
        # Time, kind and text of each.
        self._recent: deque[tuple[float, int, str]] = deque(maxlen=_RECENT)
        self._wishes: SimpleQueue[None] = SimpleQueue()
        self._is_wished = self._has_sender = False

    def watch(self, policy: Policy, layers: Collection[str]) -> None:
        """Count from now on the acts that these layers refuse; nothing if the model is not contained.

        A fork of a template has the hook already. It forgets the denials of the template.
        """
        self._begin()
        self._send = None
        self._judge = Judge(policy, layers) if policy.is_contained else None
        self.events = self._judge.events if self._judge is not None else {}
        if self._judge is not None:
            # A contained model can write bytecode almost nowhere. Each attempt of Python's would count as a denial of
            # the model's.
            sys.dont_write_bytecode = True
        if self._judge is not None and not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(_hook_of(self))
        if policy.may_start_processes and not policy.forks and self._to_stub is None:
            self._from_forks, self._to_stub = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def tell(self, send: Callable[[bytes], object]) -> None:
        """Report to the runtime from now on. `send` takes a packet for the control channel and may block."""
        self._send = send
        if self._texts or self._rest:
            self._wish()

    def disown(self) -> None:
        """Send what is refused to the stub, in a process that the model forked: only the stub reports to the
        runtime.
        """
        self._begin()
        self._send = None
        self._is_fork = True
        if self._from_forks is not None:
            self._from_forks.close()
        if self._to_stub is None:
            self._judge = None
            self.events = {}

    def hear_forks(self) -> None:
        """Begin to count what forks are refused, after the first fork. In the stub."""
        if self._from_forks is not None and not self._has_receiver and not self._is_fork:
            self._has_receiver = True
            threads.BareThread(self._hear)

    def _hear(self) -> None:
        while self._from_forks is not None and self._hear_one(0):
            pass

    def _hear_one(self, flags: int) -> bool:
        """Count a denial of a fork. Returns False if there is none, or no more."""
        if self._from_forks is None:
            return False
        try:
            packet = self._from_forks.recv(1 + 4 * MAX_BYTES, flags)
        except OSError:
            return False
        if packet and packet[0] < len(KINDS):
            self.note(packet[0], packet[1:].decode("utf-8", "replace"))
        return bool(packet)

    def note(self, kind: int, text: str) -> None:
        """Count a denial, and keep it as a sample if there is room."""
        text = text[:MAX_BYTES].encode("utf-8", "backslashreplace").decode()
        text = beginning(text, MAX_BYTES)
        if self._is_fork and self._to_stub is not None:
            with contextlib.suppress(OSError):  # there is no room, or the stub has ended
                self._to_stub.send(bytes([kind]) + text.encode(), socket.MSG_DONTWAIT)
        with self._lock:
            self._recent.append((time.monotonic(), kind, text))
            if (kind, text) in self._texts or len(self._texts) < MAX_TEXTS:
                self._texts[kind, text] += 1
            else:
                self._rest[kind] += 1
        self._wish()

    def _wish(self) -> None:
        if self._send is None or self._is_wished:
            return
        self._is_wished = True
        self._wishes.put(None)
        if not self._has_sender:
            self._has_sender = True
            try:
                # The interrupted code may hold the locks of `threading`.
                threads.BareThread(self._run)
            except RuntimeError:  # the process may have no more threads; the next `flush` sends the denials
                self._has_sender = False

    def _run(self) -> None:
        while True:
            self._wishes.get()
            # Cleared before the flush, so that a denial that comes after it wakes this thread again.
            self._is_wished = False
            self.flush()
            threads.sleep(_PAUSE_S)

    def flush(self) -> None:
        """Send the denials until now, if `tell` was called."""
        send = self._send
        if send is not None:
            packet = self.take()
            if packet:
                send(packet)

    def take(self) -> bytes:
        """Return the message of all denials until now, and forget them; b"" if there are none."""
        with self._lock:
            texts, self._texts = self._texts, Counter()
            rest, self._rest = self._rest, Counter()
        rows = [[kind, min(count, MAX_COUNT), text] for (kind, text), count in texts.items()]
        rows += [[kind, min(count, MAX_COUNT), ""] for kind, count in rest.items()]
        return encode(Kind.DENIALS, rows) if rows else b""

    # Errors

    def advice(self, error: BaseException) -> str:
        """Return the sentence with the option that would have prevented this exception; "" if no denial led to it."""
        judge = self._judge
        found = self._behind(error, judge) if judge is not None else None
        return "" if found is None else self.sentence([option_for(*found)])

    def advice_in_words(self, text: str) -> str:
        """Do the same for an error of which only the message says that something was refused: one that wraps another,
        or one of C.
        """
        judge = self._judge
        if judge is None or not any(words in text for words in _WORDS_OF_REFUSALS):
            return ""
        while self._hear_one(socket.MSG_DONTWAIT):
            pass
        found = self._latest(*range(len(KINDS)))
        return "" if found is None else self.sentence([option_for(*found)])

    def sentence(self, options: list[str]) -> str:
        """Return the sentence that these options would allow what was refused, together with the calls that the model
        may make already.

        The value of an option replaces the one that the model has.
        """
        granted = () if self._judge is None else self._judge.syscalls
        if granted and any(option.startswith(CALLS) for option in options):
            options = [f"{CALLS}={','.join(granted)}", *options]
        return f"{TOLD}{in_sentence(options)}"

    def _behind(self, error: BaseException, judge: Judge) -> tuple[int, str] | None:
        if isinstance(error, socket.gaierror):
            return self._latest(RESOLVE)
        if not isinstance(error, OSError):
            return None
        if isinstance(error, BlockingIOError) and forked(error):
            # In some Pythons up to 3.11 the hooks after a fork change the number of its error. It then passes for a
            # limit of tasks.
            return self._latest(FORK)
        if error.errno == errno.EPERM:
            # The filter's answer, which no granted path changes.
            return self._latest(*_OF_CALLS)
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOENT):
            found = self._of_file(error, judge)
            return found or (self._latest(CONNECT) if error.errno == errno.EACCES else None)
        return None

    def _of_file(self, error: OSError, judge: Judge) -> tuple[int, str] | None:
        # If the error has two paths, the act changes the second one: the new name of a link.
        paths = [path for path in (error.filename2, error.filename) if isinstance(path, (str, bytes))]
        if not paths or "open" not in judge.events:
            return None
        if error.errno == errno.EROFS:
            # The call may be one for which no denial is counted, such as chmod.
            return judge.writes(paths[0], creates=True)
        real = [os.path.realpath(os.fsdecode(path)) for path in paths]
        # A recent denial shows if the model wanted to write. The path alone does not.
        for _, kind, text in reversed(list(self._recent)):
            if kind == WRITE and text in real:
                return kind, text
        return judge.reads(paths[-1])

    def _latest(self, *kinds: int) -> tuple[int, str] | None:
        since_s = time.monotonic() - _FRESH_S
        for at_s, kind, text in reversed(list(self._recent)):
            if kind in kinds and at_s >= since_s:
                return kind, text
        return None


def _hook_of(denials: Denials) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the hook, a plain function, which CPython calls three times as fast as a method."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        act = denials.events.get(event)
        if act is None:
            return
        try:
            verdict = act(args)
            if verdict is not None:
                denials.note(*verdict)
        except Exception:
            # An exception here would be raised by the model's own call, which must end as it would without a hook.
            return

    return hook


# One object for the process, because a hook cannot be removed again.
denials = Denials()
