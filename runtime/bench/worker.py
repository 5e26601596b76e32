"""A process of the load generator: told by its parent through standard input, it answers on standard output.

Both ways msgpack. The first message says what to send where; each further one is a window, which is answered
by what was seen in it.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.generator import Generator, Stopped
from moonpool.runtime.bench.grpc_wire import GrpcWire
from moonpool.runtime.bench.http_wire import HttpWire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from moonpool.runtime.bench.tally import Tally
    from moonpool.runtime.bench.wire import Wire

# A message holds a request, and requests are up to 2 GiB.
LIMIT_BYTES = (1 << 32) - 1
_READ_BYTES = 1 << 20


def main() -> int:
    """Work until the parent says no more."""
    messages = _messages(sys.stdin.buffer)
    try:
        plan = next(messages)
    except StopIteration:
        return 0
    generator = Generator(
        (plan["host"], plan["port"]),
        [_maker(plan, request) for request in plan["requests"]],
        timeout_s=plan["timeout_s"],
        is_stream=plan["is_stream"],
        stop_descriptor=sys.stdin.fileno(),
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


def _maker(plan: Mapping[str, Any], request: bytes) -> Callable[[], Wire]:
    if plan["scheme"] == "http":
        return lambda: HttpWire(request)
    return lambda: GrpcWire(
        plan["authority"],
        plan["method"],
        request,
        is_stream=plan["is_stream"],
        metadata=plan["metadata"],
    )


def _window(generator: Generator, command: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        if "in_flight" in command:
            tally = generator.closed_loop(
                command["in_flight"], command["seconds"], command["begin_ns"]
            )
        else:
            due_ns = array("q", command["due_ns"])
            tally = generator.open_loop(due_ns, command["most"], command["begin_ns"])
    except Stopped:
        raise
    except MoonpoolError as error:
        return {"error": str(error)}
    return _packed(tally)


def _packed(tally: Tally) -> Mapping[str, Any]:
    return {
        "latencies_ns": tally.latencies_ns.tobytes(),
        "late_ns": tally.late_ns.tobytes(),
        "first_ns": tally.first_ns.tobytes(),
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
