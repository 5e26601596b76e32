"""Load workers: processes that run the engine, and the parent's side that starts them and joins their figures.

Theory of operation. One Python process may send fewer requests than a server can answer, so `--processes` starts
several. Each runs this file as a program, with one thread and no code of a model. The parent writes msgpack messages to
its standard input: first the requests and their server, then one command for each window. The worker answers each
command with its tally on standard output. All commands of a window carry the same time to begin, a little ahead, so
that the workers start together. Callers are divided evenly among workers; of an open loop's planned times, worker i
gets every n-th.

A worker ends when its input ends. Its engine polls that input, too, so this works in the middle of a window and
whatever ended the parent. Workers have a process group of their own: Ctrl-C reaches only the parent, which then closes
their inputs.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgpack
import numpy as np
from numpy.typing import NDArray

from moonpool import MoonpoolError
from moonpool.benchmarks.generator.blocking import context_of, make_wire
from moonpool.benchmarks.generator.engine import COLUMNS, Cancellation, Generator, SequenceLengths, Stopped, Tally
from moonpool.benchmarks.generator.grpc import session_maker
from moonpool.benchmarks.hosts.process import with_moonpool
from moonpool.benchmarks.loads import Concurrency, Load, Schedule
from moonpool.benchmarks.windows import Log, Window, joined
from moonpool.runtime.client.request import Endpoint, Tls, Unreachable

# Time from the command to the beginning of a window, in which all workers get the command.
_LEAD_NS = 20_000_000


# What a connection sends: a message, or its parts, between which the id of a sequence goes.
Prepared = bytes | Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Sending:
    """Prepared requests and the way to send them, apart from their times."""

    # For each connection in turns, the requests that it may send, by their numbers.
    requests: Sequence[Sequence[Prepared]]
    # The numbers of the requests in the order in which they are sent, again and again.
    order: NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))
    # A share of the requests that is cancelled, and the seconds after which each is.
    cancelled: tuple[float, float] | None = None
    # The least and the greatest length of sequences. Then there are four forms of each request, by their place there.
    sequences: tuple[int, int] | None = None
    is_stream: bool = False


class LoadWorkers:
    """The load workers of one server. Making it starts them, `close` ends them. For one thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        sending: Sending,
        *,
        processes: int,
        timeout_s: float,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Start the workers. Raises `MissingHttp2`."""
        if endpoint.scheme == "grpc":
            # So that the reason is not told by a process that ends.
            session_maker()
        self._windows = 0
        self._order = sending.order
        requests, is_stream = sending.requests, sending.is_stream
        # Ids of sequences have eleven digits, and as varints five bytes, so all messages of a kind are equally long. No
        # two workers, and hardly two commands, use the same ones.
        first_id = 10**10 + random.randrange(10**9)
        self._workers: list[_Worker] = []
        try:
            for index in range(processes):
                self._workers.append(_Worker())
                mine = requests[index::processes] or requests
                self._workers[-1].send(
                    {
                        "endpoint": endpoint,
                        "requests": mine,
                        "is_stream": is_stream,
                        "metadata": headers,
                        "timeout_s": timeout_s,
                        "cancelled": sending.cancelled,
                        "sequences": sending.sequences,
                        "first_id": first_id + index * 10**9 // 8,
                    }
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def window(self, load: Load, seconds: float, most_connections: int) -> Window:
        """Measure one window. Raises `Unreachable` if the server does not answer, or no longer."""
        self._windows += 1
        begin_ns = time.perf_counter_ns() + _LEAD_NS
        working = []
        for worker, command in zip(self._workers, self._commands(load, seconds, most_connections), strict=True):
            if command:
                worker.send({**command, "begin_ns": begin_ns})
                working.append(worker)
        return _together([worker.receive() for worker in working])

    def _commands(self, load: Load, seconds: float, most_connections: int) -> Iterable[Mapping[str, Any] | None]:
        """Yield the command for each worker; None if nothing is left for it."""
        count = len(self._workers)
        if isinstance(load, Concurrency):
            for index in range(count):
                share = len(range(index, load.callers, count))
                kinds = self._order[index::count] if len(self._order) >= count else self._order
                yield ({"in_flight": share, "seconds": seconds, "kinds": kinds.tobytes()} if share else None)
            return
        due_ns = load.due_ns(seconds, self._windows)
        kinds = np.resize(self._order, len(due_ns))
        if isinstance(load, Schedule) and load.kinds is not None:
            kinds = load.kinds
        for index in range(count):
            mine = due_ns[index::count]
            most = max(1, most_connections // count)
            yield (
                {"due_ns": mine.tobytes(), "most": most, "kinds": kinds[index::count].tobytes()} if len(mine) else None
            )


class _Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moonpool.benchmarks.generator.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=with_moonpool(),
            # Ctrl-C is for the parent, which ends the workers.
            process_group=0,
        )
        self._unpacker = msgpack.Unpacker(max_buffer_size=LIMIT_BYTES)

    def send(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise MoonpoolError("a process of the load generator has no input")
        try:
            stdin.write(msgpack.packb(message))
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self) -> Mapping[str, Any]:
        stdout = self._process.stdout
        while stdout is not None:
            for message in self._unpacker:
                if "error" in message:
                    raise Unreachable(message["error"])
                received: Mapping[str, Any] = message
                return received
            data = stdout.read1(_READ_BYTES)  # type: ignore[attr-defined]
            if not data:
                break
            self._unpacker.feed(data)
        raise self._gone()

    def _gone(self) -> MoonpoolError:
        return MoonpoolError(f"a process of the load generator ended with {self._process.wait()}; its reason is above")

    def close(self) -> None:
        """End the process by closing its input, also in the middle of a window."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    # The worker has ended by itself before it read everything.
                    continue
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _together(seen: Sequence[Mapping[str, Any]]) -> Window:
    """Join the figures of workers that worked side by side."""

    def times(name: str) -> Any:
        return np.concatenate([np.frombuffer(part[name], np.int64) for part in seen])

    log = joined([_log_of(part) for part in seen])
    return Window(
        seconds=max(part["seconds"] for part in seen),
        latencies_ns=log.latencies_ns,
        errors=sum((Counter(part["errors"]) for part in seen), Counter()),
        late_ns=times("late_ns"),
        unsent=sum(part["unsent"] for part in seen),
        first_ns=log.first_ns,
        between_ns=times("between_ns"),
        generator_share=max(part["busy_s"] / part["seconds"] for part in seen),
        log=log,
    )


def _log_of(part: Mapping[str, Any]) -> Log:
    # The errors' texts are in the order of their numbers, because a dictionary keeps the order of its first entries.
    rows = np.frombuffer(part["log"], np.int64).reshape(-1, len(COLUMNS))
    return Log(rows, list(part["errors"]))


# A message holds a request, and requests are up to 2 GiB.
LIMIT_BYTES = (1 << 32) - 1
_READ_BYTES = 1 << 20


def main() -> int:
    """Run a worker until its input ends."""
    messages = _messages(sys.stdin.buffer)
    try:
        plan = next(messages)
    except StopIteration:
        return 0
    endpoint = _endpoint(plan)
    generator = Generator(
        (endpoint.host, endpoint.port),
        [make_wire(endpoint, requests, plan["metadata"], is_stream=plan["is_stream"]) for requests in plan["requests"]],
        timeout_s=plan["timeout_s"],
        is_stream=plan["is_stream"],
        stop_descriptor=sys.stdin.fileno(),
        cancellation=_cancellation(plan["cancelled"]),
        sequences=_sequences(plan),
        tls=context_of(endpoint),
    )
    try:
        for command in messages:
            _answer(_window(generator, command))
    except (Stopped, BrokenPipeError):
        return 1
    finally:
        generator.close()
    return 0


def _messages(stream: BinaryIO) -> Iterator[Mapping[str, Any]]:
    unpacker = msgpack.Unpacker(max_buffer_size=LIMIT_BYTES)
    while data := stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
        unpacker.feed(data)
        yield from unpacker


def _cancellation(cancelled: Sequence[float] | None) -> Cancellation | None:
    return Cancellation(cancelled[0], round(cancelled[1] * 1e9)) if cancelled else None


def _sequences(plan: Mapping[str, Any]) -> SequenceLengths | None:
    if not plan["sequences"]:
        return None
    least, most = plan["sequences"]
    return SequenceLengths(least, most, plan["first_id"], len(plan["requests"][0]) // 4)


def _endpoint(plan: Mapping[str, Any]) -> Endpoint:
    scheme, host, port, path, tls = plan["endpoint"]
    return Endpoint(scheme, host, port, path, None if tls is None else Tls(*tls))


def _window(generator: Generator, command: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = array("i", command["kinds"])
    try:
        if "in_flight" in command:
            tally = generator.closed_loop(command["in_flight"], command["seconds"], command["begin_ns"], kinds)
        else:
            due_ns = array("q", command["due_ns"])
            tally = generator.open_loop(due_ns, command["most"], command["begin_ns"], kinds)
    except Stopped:
        raise
    except MoonpoolError as error:
        return {"error": str(error)}
    return _packed(tally)


def _packed(tally: Tally) -> Mapping[str, Any]:
    return {
        "log": tally.log.tobytes(),
        "late_ns": tally.late_ns.tobytes(),
        "between_ns": tally.between_ns.tobytes(),
        "errors": dict(tally.errors),
        "unsent": tally.unsent,
        "seconds": tally.seconds,
        "busy_s": tally.busy_s,
    }


def _answer(message: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(msgpack.packb(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
