"""The same thing for several objects at the same time."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")
# A signal that comes in the moment before a wait begins is noticed when that wait ends.
_NOTICE_S = 0.5


def in_parallel(
    function: Callable[[T], R],
    items: Sequence[T],
    name: str,
    interrupted: Callable[[], object] | None = None,
) -> list[R]:
    """The results in the order of the items, each from a thread of its own; the first exception is raised.

    What a signal handler raises is raised when all have ended; `interrupted` is called at once, to
    have them end sooner.

    Not concurrent.futures: its pools take nothing once the interpreter is on its way out, and that is
    when a forgotten runtime is closed. Where no thread can be started then, one follows the other.
    """
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    waiting = [[item] for item in items]
    ended = [threading.Event() for _ in items]

    def run(index: int) -> None:
        try:
            item = waiting[index].pop()
        except IndexError:
            return
        try:
            results[index] = function(item)
        except BaseException as error:
            errors.append(error)
        finally:
            ended[index].set()

    threads = [
        threading.Thread(target=run, args=(index,), name=f"{name}-{index}")
        for index in range(len(items))
    ]
    starts = iter(enumerate(threads))
    while True:
        try:
            for index, thread in starts:
                try:
                    thread.start()
                except RuntimeError:
                    run(index)
            # Not `Thread.join`: interrupted by a signal handler, Python 3.11 takes the thread for ended.
            for event in ended:
                while not event.wait(_NOTICE_S):
                    pass
            break
        except BaseException as error:
            # What a signal handler raises waits: whoever cleans up after it must find it all done.
            errors.insert(0, error)
            for item, event in zip(waiting, ended, strict=True):
                with contextlib.suppress(IndexError):
                    item.pop()
                    event.set()
            if interrupted is not None:
                interrupted()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]
