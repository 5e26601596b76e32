"""What a stub says, one thing at a time."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgpack
from tests.fuzz.choices import Choices
from tests.ipc.described import TABLES, message_fits

from moonpool.ipc.bounds import check_items
from moonpool.ipc.bytes_tensor import check_bytes, decode_bytes, encode_bytes
from moonpool.ipc.codec import Codec
from moonpool.ipc.errors import BadTensor, RemoteProtocolError
from moonpool.ipc.heap import HeapRegion
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.policy import LEVELS, Policy
from moonpool.runtime.answer_reader import AnswerReader
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.metrics import BadMetric, MetricRegistry
from moonpool.runtime.output import Output
from moonpool.runtime.request import InferenceRequest
from moonpool.runtime.sandbox.confinement import confirmed
from moonpool.runtime.stub_metrics import StubMetrics

_REGION_BYTES = 4096


def _decode(channel: str, data: bytes) -> None:
    for us in Side:
        codec = Codec(TABLES[channel], us)
        # The first time, the check is made; the second time, it is known.
        for _ in range(2):
            try:
                fields = codec.decode(data)
            except RemoteProtocolError:
                continue
            if not message_fits(TABLES[channel], us, fields):
                raise AssertionError(f"{fields!r} is no message")


def work(data: bytes) -> None:
    _decode("work", data)


def control(data: bytes) -> None:
    _decode("control", data)


def calls(data: bytes) -> None:
    _decode("calls", data)


def stored(data: bytes) -> None:
    """No packet unpacks to more than was found beforehand."""
    most = data[0] if data else 0
    try:
        check_items(data[1:], most)
    except RemoteProtocolError:
        return
    try:
        value = msgpack.unpackb(data[1:], strict_map_key=True, max_ext_len=0)
    except Exception:  # any of the six classes of msgpack
        return
    if _items(value) > max(most, len(data)):
        raise AssertionError(f"{most} values were allowed")


def _items(value: object) -> int:
    if isinstance(value, list):
        return 1 + sum(map(_items, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_items, value.values()))
    return 1


def layout(data: bytes) -> None:
    """The layout of an answer, read, checked against blocks, and opened."""
    choices = Choices(data)
    count = choices.byte() % 4
    sizes = [choices.number(0, 16, 64, 4096) % _REGION_BYTES for _ in choices.some()]
    wants_wire = bool(choices.byte() % 2)
    region = HeapRegion(1, _REGION_BYTES)
    reader = AnswerReader()
    reader.output_names = ["Y", "Z"]
    try:
        read = reader.layout(choices.rest(), count)
        reader.check_blocks(read, sizes)
        leases = [region.lease(0, size, id, None) for size in sizes]
        reader.check(read, leases)
        request = InferenceRequest.__new__(InferenceRequest)
        request.allocator = request.details = None
        request.wants_wire = wants_wire
        for outputs in read.responses:
            response = reader.outcome(request, outputs, None, leases)
            arrays: dict[str, Any] = response.outputs  # type: ignore[union-attr]
            for array in arrays.values():
                raw = array.raw if wants_wire else array
                if raw.nbytes > _REGION_BYTES * 64:
                    raise AssertionError(f"{raw.nbytes} bytes of {_REGION_BYTES}")
                raw.tobytes()
    except RemoteProtocolError:
        return


def strings(data: bytes) -> None:
    """BYTES: what is accepted is the same in both ways of looking at it, and comes back as it was."""
    choices = Choices(data)
    shape = [choices.number(0, 1, 2, 3) for _ in choices.some(4)]
    raw = choices.rest()
    try:
        array = decode_bytes(raw, shape)
    except BadTensor:
        array = None
    try:
        check_bytes(raw, shape)
    except BadTensor:
        if array is not None:
            raise
        return
    if array is None or encode_bytes(array) != raw or list(array.shape) != shape:
        raise AssertionError(f"{shape} of {raw!r}")


def start(data: bytes) -> None:
    """What a stub says of itself before it has a model."""
    choices = Choices(data)
    policy = Policy(level=choices.of(LEVELS))
    try:
        fields = Codec(TABLES["work"], Side.RUNTIME).decode(choices.rest())
        if fields[0] == Kind.CONFINED:
            told = confirmed("m_0", os.getpid(), policy, [], fields[2], fields[3])
            str(told)
            told.as_dict()
    except (RemoteProtocolError, LoadFailed):
        return


def metrics(data: bytes) -> None:
    """Metrics are made, changed, read and dropped; what is left of them in the end is nothing."""
    choices = Choices(data)
    registry = MetricRegistry({"taken": 0})
    ours, others = (StubMetrics(registry, lambda: None) for _ in range(2))
    texts = ["a", "taken", "le", "__b", "", "ä", "x" * 5000]
    try:
        while choices:
            held = choices.of((ours, others))
            operation = choices.byte() % 4
            with contextlib.suppress(BadMetric):
                if operation == 0:
                    labels = [(choices.of(texts), choices.of(texts)) for _ in choices.some()]
                    buckets = [float(choices.number(1, 2)) for _ in choices.some()]
                    name, kind = choices.of(texts), choices.byte() % 3
                    held.hold(name, choices.of(texts), kind, labels, buckets or None)
                elif operation == 1:
                    value = float(choices.number(0, 1)) * choices.of((1.0, -1.0, float("nan")))
                    row = [choices.number(1, 2), choices.byte() % 3, value, choices.number(1)]
                    held.change([row], [])
                elif operation == 2:
                    held.change([], [choices.number(1, 2) for _ in choices.some()])
                else:
                    held.value(choices.number(1, 2))
            registry.families()
    except RemoteProtocolError:
        pass
    ours.close()
    others.close()
    if registry.families() or ours._size or others._size:
        raise AssertionError("something is left")


def output(data: bytes) -> None:
    """What a stub prints and logs."""
    choices = Choices(data)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    printed = Output("m_0", read_fd, choices.byte())
    try:
        while choices:
            piece = choices.take(1 + choices.byte())
            if choices.byte() % 2:
                os.write(write_fd, piece)
                printed.ready()
            else:
                text = piece.decode("utf-8", "replace")
                printed.log(choices.byte() % 4, text, text[:9], choices.byte() % 2)
        printed.drain()
        shown = "".join(printed.tail()).replace("\t", "")
        if any(ord(each) < 32 or 127 <= ord(each) < 160 for each in shown):
            raise AssertionError(shown)
    finally:
        os.close(write_fd)
        printed.close()
