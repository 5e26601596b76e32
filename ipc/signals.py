"""Gives a new process the default dispositions of signals, and takes several steps that no handler of a signal can come
between.

An exec keeps the signals that its parent ignored or blocked.

CPython runs handlers between the instructions of Python's code, on the main thread, and a handler may raise. None runs
inside a function of C. So steps that must all be taken, or none, are functions of C that one other function of C calls.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_, setitem
from typing import Any

# Drops whatever is put into it.
NOWHERE: deque[Any] = deque(maxlen=0)
if sys.version_info >= (3, 11):
    from operator import call

    _results_of = partial(map, call)
else:

    def _results_of(steps: Sequence[Callable[[], object]]) -> Iterator[object]:
        return map(partial.__call__, map(partial, steps))


# Every Python ignores these two.
_PYTHONS_OWN = frozenset((signal.SIGPIPE, signal.SIGXFSZ))


def use_defaults() -> None:
    """Give all signals their default disposition, and block none. For the main thread of a process that has just
    started.

    A shell starts a background job with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and some daemons with SIGCHLD,
    after which the kernel would reap the children of a model's process before anybody could ask for their exit codes.
    """
    for number in signal.valid_signals() - _PYTHONS_OWN:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Last: what was held back until now has its default effect.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def set_at_once(tables: Sequence[Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign one item of each table, in this order, as `at_once` does, in a third of its time.

    With a slice for a key, this adds or removes items of a list.
    """
    NOWHERE.extend(map(setitem, tables, keys, values))


def at_once(*steps: Callable[[], object]) -> None:
    """Call functions of C in this order.

    If one raises, those behind it are not called, nor are they after `replacing`, if that finds another value.
    """
    NOWHERE.extend(_results_of(steps))


def replacing(
    owner: object, name: str, before: object, after: object
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the steps by which `at_once` replaces the value of an attribute, and goes on only if that was this very
    object until then.

    For steps that were prepared from a value which a handler or a destructor, or another thread, may have replaced
    meanwhile. There is no error then. A last step, which notes that it was taken, tells whether they were.
    """
    # `next` raises StopIteration, which is the end of the steps.
    values = map(getattr, (owner,), (name,))
    return partial(next, filter(partial(is_, before), values)), partial(setattr, owner, name, after)


def raised_again(act: Callable[[], object]) -> Exception | None:
    """Call a function that has raised, and return what it raises now. None says that a signal handler has raised in it
    before.

    No type of an exception tells the two apart where a function may raise anything. But what its arguments make it
    raise, it raises again, and the handler has run. For functions that take a moment and change nothing.
    """
    try:
        act()
    except Exception as error:
        # A frame that gets an error whose traceback leads back to it would keep itself, and with it the tensors of a
        # model, until garbage is collected.
        error.__context__ = None
        return error.with_traceback(None)
    return None


def pass_on(error: BaseException) -> None:
    """Raise an error that is not of the function of C just called, but of a signal handler that ran in the call: it
    has the handler's frame.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        try:
            raise error
        finally:
            # This frame is in its traceback. The error would keep itself, and the tensors in the frames of a model,
            # until garbage is collected.
            del error
