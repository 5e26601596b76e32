"""Models whose `execute` is a coroutine: an event loop on a thread of its own, on which batches overlap."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING

from moonpool.stub import threads

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from typing import Any


class Coroutines:
    """Runs coroutines of the model, at most so many at the same time."""

    def __init__(self, most: int) -> None:
        self._room = threading.BoundedSemaphore(most)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread
        self._starting = threading.Lock()
        # A loop refers to its tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def start(
        self,
        coroutine: Coroutine[Any, Any, object],
        done: Callable[[object, BaseException | None], None],
    ) -> None:
        """Run a coroutine, and then `done` with what it returned or raised, on the loop's thread.

        Blocks while as many run as may. For the main thread.
        """
        self._room.acquire()
        try:
            loop = self._running_loop()
            loop.call_soon_threadsafe(self._create_task, loop, self._run(coroutine, done))
        except BaseException:
            self._room.release()
            coroutine.close()
            raise

    def wait_for(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Run a coroutine beside those, and wait for what it returns or raises. Not for the loop's thread."""
        import asyncio

        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop()).result()

    def _create_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]
    ) -> None:
        try:
            task = loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        except MemoryError:  # nobody would answer its requests
            threads.end_process()

    async def _run(
        self,
        coroutine: Coroutine[Any, Any, object],
        done: Callable[[object, BaseException | None], None],
    ) -> None:
        try:
            done(await coroutine, None)
        except BaseException as error:  # a model may raise anything, SystemExit included
            self._fail(done, error)
        finally:
            self._room.release()

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
            # Tasks of the model's own may raise SystemExit, and the others depend on this thread.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    def stop(self) -> None:
        """Stop the loop: what still runs is not run any further."""
        self._is_stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self, timeout_s: float) -> None:
        """As `stop`, in a process that goes on: what still runs is cancelled, and nothing of the loop is left.

        Where a coroutine blocks the loop for longer than that, it is left alone.
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
