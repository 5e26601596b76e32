"""Runs models whose `execute` is a coroutine: on an event loop with its own thread, where batches overlap.

Theory of operation. The main thread hands over a coroutine and goes on to the next batch. The requests stay open, and
`done` answers them on the loop's thread. `_room` bounds the coroutines that run at once: the main thread waits for a
place, and so reads no further EXECUTE. `_run` gives the place back in any case. If a coroutine could not be handed
over, the main thread does. A signal handler may raise there when the loop has the coroutine already, or not yet: the
one that takes the place out of the list of the two goes on, and the other one leaves the coroutine alone.

`_starting` makes sure that there is one loop, as the main thread and the thread that asks `is_ready` may both need the
first one. The loop keeps only weak references to its tasks, so `_tasks` holds them. SystemExit and KeyboardInterrupt of
a task leave `run_forever`; `_serve` goes on, since other batches depend on the thread. If memory runs out while a
coroutine is handed over or answered, nobody would ever answer its requests, so the process ends.

At the end `stop` only stops the loop, and the process ends with what still runs. A process that goes on, as that of a
test, calls `close`: it waits for the thread and then runs the loop itself until all tasks are cancelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from moonpool.ipc.signals import at_once
from moonpool.stub import threads

if TYPE_CHECKING:
    import asyncio

# The argument of a `get` that blocks.
_WAITING = (True,)


class Coroutines:
    """Runs coroutines of the model, at most `most` at the same time."""

    def __init__(self, most: int) -> None:
        # The places that are free.
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(most):
            self._room.put(None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threads.Thread
        self._starting = threads.Lock()
        # A loop refers to its tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def start(
        self, coroutine: Coroutine[Any, Any, object], done: Callable[[object, BaseException | None], None]
    ) -> None:
        """Run a coroutine, and then `done` with its result or its exception, on the loop's thread.

        Blocks while the most coroutines run. For the main thread. If a signal handler raises meanwhile, the coroutine
        may run all the same.
        """
        place: list[None] = []
        try:
            # One call into C takes the place and notes it: no signal handler runs in between.
            place.extend(map(self._room.get, _WAITING))
            loop = self._running_loop()
            loop.call_soon_threadsafe(self._create_task, loop, coroutine, done, place)
        except BaseException:
            with contextlib.suppress(IndexError):  # it has none, or it runs
                at_once(place.pop, partial(self._room.put, None))
                coroutine.close()
            raise

    def wait_for(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Run a coroutine outside of that bound; wait for its result, or raise its exception. Not for the loop's
        thread.

        If a signal handler raises meanwhile, the coroutine is cancelled.
        """
        import asyncio

        running = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def _create_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, object],
        done: Callable[[object, BaseException | None], None],
        place: list[None],
    ) -> None:
        try:
            place.pop()
        except IndexError:  # the main thread was interrupted, and has closed it
            return
        try:
            task = loop.create_task(self._run(coroutine, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        except MemoryError:  # nobody would answer its requests
            threads.end_process()

    async def _run(
        self, coroutine: Coroutine[Any, Any, object], done: Callable[[object, BaseException | None], None]
    ) -> None:
        try:
            done(await coroutine, None)
        except BaseException as error:  # a model may raise anything, SystemExit included
            self._fail(done, error)
        finally:
            self._room.put(None)

    @staticmethod
    def _fail(done: Callable[[object, BaseException | None], None], error: BaseException) -> None:
        try:
            done(None, error)
        except MemoryError:  # its requests have no answer
            threads.end_process()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            return self._loop or self._start_loop()

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio  # Slow to import, and most models do without it.

        loop = asyncio.new_event_loop()
        try:
            self._thread = threads.start(partial(self._serve, loop), "moonpool-asyncio")
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        while not self._is_stopped:
            # A task of the model may raise SystemExit, and other tasks depend on this thread.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    def stop(self) -> None:
        """Stop the loop. Coroutines that still run do not go on."""
        self._is_stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self, timeout_s: float) -> None:
        """Stop the loop in a process that goes on: cancel all tasks and close the loop.

        If a coroutine blocks the loop for longer than `timeout_s`, the loop is left as it is.
        """
        self.stop()
        if self._loop is None:
            return
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.run_until_complete(_cancel_all(self._loop))
            self._loop.close()


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
