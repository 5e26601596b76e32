"""The processes of the load generator, and what they saw put together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.connection import Unreachable
from moonpool.runtime.bench.load import Concurrency, Load
from moonpool.runtime.bench.question import METHOD, STREAM_METHOD
from moonpool.runtime.bench.window import Window
from moonpool.runtime.bench.worker import LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moonpool.runtime.bench.endpoint import Endpoint

# Where this moonpool is found.
_ROOT = Path(__file__).parents[3]
# From the command to the beginning of a window, so that all processes begin together.
_LEAD_NS = 20_000_000
_READ_BYTES = 1 << 20


class Crew:
    """Started when it is made, ended by `close`. For one thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        *,
        processes: int,
        timeout_s: float,
        is_stream: bool = False,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`requests` are what `Question` makes of itself; caller i sends the i-th, round and round."""
        self._windows = 0
        self._workers: list[_Worker] = []
        try:
            for index in range(processes):
                self._workers.append(_Worker())
                mine = requests[index::processes] or requests
                self._workers[-1].tell(
                    {
                        "scheme": endpoint.scheme,
                        "host": endpoint.host,
                        "port": endpoint.port,
                        "authority": endpoint.authority,
                        "method": STREAM_METHOD if is_stream else METHOD,
                        "requests": mine,
                        "is_stream": is_stream,
                        "metadata": headers,
                        "timeout_s": timeout_s,
                    }
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def window(self, load: Load, seconds: float, most_connections: int) -> Window:
        """Press for so long. Raises `Unreachable` where the server is not there (any more)."""
        self._windows += 1
        begin_ns = time.perf_counter_ns() + _LEAD_NS
        working = []
        for worker, command in zip(
            self._workers, self._commands(load, seconds, most_connections), strict=True
        ):
            if command:
                worker.tell({**command, "begin_ns": begin_ns})
                working.append(worker)
        return _together([worker.hear() for worker in working])

    def _commands(
        self, load: Load, seconds: float, most_connections: int
    ) -> Iterable[Mapping[str, Any] | None]:
        """What each process has to do; None where there is nothing left for it."""
        count = len(self._workers)
        if isinstance(load, Concurrency):
            for index in range(count):
                share = len(range(index, load.callers, count))
                yield {"in_flight": share, "seconds": seconds} if share else None
            return
        due_ns = load.due_ns(seconds, self._windows)
        for index in range(count):
            mine = due_ns[index::count]
            most = max(1, most_connections // count)
            yield {"due_ns": mine.tobytes(), "most": most} if len(mine) else None


class _Worker:
    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moonpool.runtime.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            # Whoever interrupts the command means its parent, which ends it.
            process_group=0,
        )
        self._unpacker = msgpack.Unpacker(max_buffer_size=LIMIT_BYTES)

    def tell(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise MoonpoolError("a process of the load generator has no input")
        try:
            stdin.write(msgpack.packb(message))
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def hear(self) -> Mapping[str, Any]:
        stdout = self._process.stdout
        while stdout is not None:
            for message in self._unpacker:
                if "error" in message:
                    raise Unreachable(message["error"])
                heard: Mapping[str, Any] = message
                return heard
            data = stdout.read1(_READ_BYTES)  # type: ignore[attr-defined]
            if not data:
                break
            self._unpacker.feed(data)
        raise self._gone()

    def _gone(self) -> MoonpoolError:
        return MoonpoolError(
            f"a process of the load generator ended with {self._process.wait()}; its reason is above"
        )

    def close(self) -> None:
        """It ends as its input does, in the middle of a window too."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    # It ended by itself, with something still to be read.
                    continue
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _together(seen: Sequence[Mapping[str, Any]]) -> Window:
    """Processes that worked side by side."""

    def times(name: str) -> Any:
        return np.concatenate([np.frombuffer(part[name], np.int64) for part in seen])

    return Window(
        seconds=max(part["seconds"] for part in seen),
        latencies_ns=times("latencies_ns"),
        errors=sum((Counter(part["errors"]) for part in seen), Counter()),
        late_ns=times("late_ns"),
        unsent=sum(part["unsent"] for part in seen),
        first_ns=times("first_ns"),
        between_ns=times("between_ns"),
        generator_share=max(part["busy_s"] / part["seconds"] for part in seen),
    )
