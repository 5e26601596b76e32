"""Starts the runtime's threads, and says in one way that the operating system refuses one.

Theory of operation. The kernel refuses a thread at the limits of the user, of the container and of the machine, and
Python says no more than "can't start new thread". A runtime that meets such a limit must go on serving, so every thread
is started by `start_thread`, and the one who wanted it decides what `OutOfThreads` means: an error for the caller,
another try later, or the same work on the thread that is there. It also comes at the end of a program, when Python
refuses all threads.

`TaskPool` takes the place of `concurrent.futures.ThreadPoolExecutor`, which keeps a task that it could not start a
thread for: it raises, and runs the task all the same as soon as it has a thread, after the caller has done it in
another way. It refuses tasks, too, once the program ends, and that is the moment when a forgotten runtime is closed.
`TaskPool` refuses a task only if it has no thread at all, and then it forgets it. `_changed` guards all that it holds.
A thread counts as idle from before it waits until a task is taken, so as many tasks as there are idle threads may lie
in the queue before another thread is started.

*Signals.* Python runs signal handlers on the main thread, between any two instructions, and a handler may raise. `with`
and a bare lock are one step there. `threading.Condition`, and with it `Event`, `Future` and `Thread.start`, are
Python's code: a handler that raises in them leaves a lock taken for good, and all who need that lock wait for ever. So
the main thread touches none of these where a thread of the runtime needs the same one. It waits on bare locks
(`CountingCondition`), and has another thread start a thread for it (`start_thread_safely`).
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from moonpool.ipc.errors import Closed, MoonpoolError
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog

_log = RuntimeLog("moonpool")
P = ParamSpec("P")
R = TypeVar("R")
_WHAT_TO_DO = (
    "raise the limit of processes and threads (ulimit -u, the container's limit of pids, or kernel.threads-max), "
    "or free memory"
)

# They run many tasks on one thread, and put their own functions and classes in the places of Python's.
_PATCHING = ("gevent", "eventlet")
# What a runtime takes from Python, and cannot work without.
_RELIED_ON = (
    ("_thread", "start_new_thread"),
    ("_thread", "allocate_lock"),
    ("queue", "SimpleQueue"),
    ("select", "epoll"),
    ("select", "poll"),
    ("socket", "socket"),
    ("subprocess", "Popen"),
)


def check_unpatched() -> None:
    """Raise `MoonpoolError` if gevent or eventlet has replaced threads, sockets or processes of this program.

    A runtime would wait for ever: all its threads would be one, and the first call that blocks would stop them all.
    """
    libraries = [name for name in _PATCHING if name in sys.modules]
    if not libraries:
        return
    replaced = []
    for module, name in _RELIED_ON:
        there = getattr(importlib.import_module(module), name, None)
        # They take away what they have no replacement for.
        if there is None or str(there.__module__).partition(".")[0] in libraries:
            replaced.append(f"{module}.{name}")
    if replaced:
        raise MoonpoolError(
            f"{' or '.join(libraries)} has replaced {', '.join(replaced)} in this program, and a runtime cannot work "
            "with that: host the models in a process of its own (`moonpool serve`), and send it requests from here"
        )


# The thread on which signal handlers run, None if no handler of this process raises. In a list, where compiled code
# finds it without a call of Python's, in which a handler could raise.
INTERRUPTIBLE: list[int | None] = [threading.main_thread().ident]


def is_interruptible() -> bool:
    """Return True if signal handlers run on this thread, which may raise between any two instructions."""
    return threading.get_ident() == INTERRUPTIBLE[0]


def _learn_main_thread() -> None:
    """Note the main thread again: a fork has the thread that forked."""
    if INTERRUPTIBLE[0] is not None:
        INTERRUPTIBLE[0] = threading.main_thread().ident


os.register_at_fork(after_in_child=_learn_main_thread)


@contextlib.contextmanager
def trusted_handlers() -> Iterator[None]:
    """Count on it that no signal handler raises meanwhile, if this is the main thread. For a server, whose event loop
    handles all signals.
    """
    before = INTERRUPTIBLE[0]
    if is_interruptible():
        INTERRUPTIBLE[0] = None
    try:
        yield
    finally:
        INTERRUPTIBLE[0] = before


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises `OutOfThreads` if the operating system refuses it, or the program ends."""
    try:
        thread.start()
    except RuntimeError as error:
        why = f"{error}; the program ends" if "shutdown" in str(error) else f"{error}; {_WHAT_TO_DO}"
        raise OutOfThreads(f"the runtime has no thread for {thread.name}: {why}") from error


def start_thread_safely(thread: threading.Thread) -> None:
    """Start a thread as `start_thread` does, also where a signal handler may raise: then it starts all the same, or
    nothing has happened.
    """
    apart(partial(start_thread, thread))


def apart(act: Callable[[], R]) -> R:
    """Return the result of a call, or raise its error. Where a signal handler may raise, another thread makes the call.

    If a handler raises meanwhile, the call goes on, and its result is dropped.
    """
    if not is_interruptible():
        return act()
    results: list[R] = []
    errors: list[BaseException] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # there is no thread
        return act()
    done.acquire()
    if errors:
        raise errors[0]
    return results[0]


class TaskPool(Executor):
    """Runs tasks on so many threads at most, which start as they are needed. Any thread may call any method.

    If the operating system refuses another thread, tasks wait for those that run. The threads are daemons.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start no thread yet. `name` is that of the threads, with a number."""
        self.most, self._name = most, name
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a function on a thread of the pool. Raises `Closed` after `shutdown`, and `OutOfThreads`; then it is not
        called.
        """
        future: Future[R] = Future()
        with self._changed:
            if self._is_closed:
                raise Closed(f"the threads {self._name} have ended")
            if len(self._tasks) >= self._idle and len(self._threads) < self.most:
                self._add_thread()
            self._tasks.append((future, partial(function, *args, **kwargs)))
            self._changed.notify()
        return future

    def _add_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            start_thread(thread)
        except OutOfThreads:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                self._idle -= 1
                if not self._tasks:
                    return
                future, task = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                self._run(future, task)
            # While this thread waits, it must not keep what the task had.
            del future, task

    @staticmethod
    def _run(future: Future[Any], task: Callable[[], Any]) -> None:
        try:
            try:
                result = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        except BaseException:
            # Callbacks of the future run here, and the thread has other tasks to do.
            _log.exception("a callback of a task's future failed")
        finally:
            # An error refers to this frame. With the future, it would stay until the collector looks for cycles.
            del future, task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and end the threads when those that were taken are done, or with `cancel_futures`, those
        that run.
        """
        with self._changed:
            self._is_closed = True
            dropped = [future for future, _ in self._tasks] if cancel_futures else []
            if cancel_futures:
                self._tasks.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for future in dropped:
            future.cancel()
        if wait:
            for thread in threads:
                thread.join()


class CountingCondition:
    """A condition that counts who waits. Usually nobody does, and then `notify_all` costs nothing.

    Each who waits has a bell, a bare lock that is released to wake it. So a signal handler may raise anywhere in
    `wait_for`, and leaves nothing behind but a bell that nobody hears, until the next `notify_all`.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._bells: list[threading.Lock] = []
        # The number of threads that wait, and of those who watch.
        self.waiting = 0
        self._watchers: list[Callable[[], object]] = []

    def notify_all(self) -> None:
        """Wake all who wait, and call all who watch. Needs the lock."""
        if self.waiting:
            bells, self._bells = self._bells, []
            self.waiting = len(self._watchers)
            for bell in bells:
                bell.release()
            for tell in self._watchers:
                tell()

    def watch(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call `tell` at each change, with the lock held, until the function is called that this returns."""
        with self._lock:
            self._watchers.append(tell)
            self.waiting += 1

        def end() -> None:
            with self._lock:
                self._watchers.remove(tell)
                self.waiting -= 1

        return end

    def wait_for(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until `condition`, which is called with the lock held. Returns False at the deadline. The caller must
        not hold the lock.
        """
        while True:
            with self._lock:
                if condition():
                    return True
                left_s = -1.0 if deadline is None else deadline - time.monotonic()
                if deadline is not None and left_s <= 0:
                    return False
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
                self.waiting += 1
            if not bell.acquire(timeout=left_s):
                self._forget(bell)

    def _forget(self, bell: threading.Lock) -> None:
        with self._lock:
            if bell in self._bells:
                self._bells.remove(bell)
                self.waiting -= 1
