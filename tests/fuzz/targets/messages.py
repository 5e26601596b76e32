"""Messages of a stub, and the parts of them, one kind at a time."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgpack
from tests.fuzz.choices import Choices
from tests.heap_region import HeapRegion
from tests.ipc.described import TABLES, message_fits

from moonpool.ipc.codec import Codec, check_items
from moonpool.ipc.denials import KINDS
from moonpool.ipc.errors import BadTensor, RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.ipc.policy import LEVELS, Policy
from moonpool.ipc.tensors import check_bytes, decode_bytes, encode_bytes
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation.inspection import confirmed
from moonpool.runtime.model.config.options import PATHS
from moonpool.runtime.model.denials import MOST_TEXTS, DenialBook
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.observe.metrics import BadMetric, MetricRegistry
from moonpool.runtime.process.diagnose import call_in
from moonpool.runtime.stubs.answers import AnswerReader
from moonpool.runtime.stubs.metrics import StubMetrics
from moonpool.runtime.stubs.output import StubOutput

_REGION_BYTES = 4096


def _decode(channel: str, data: bytes) -> None:
    for us in Side:
        codec = Codec(TABLES[channel], us)
        # The first time the check is compiled, the second time it is known.
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
    """Check that no packet unpacks to more than its check found."""
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
    """Read the layout of an answer, check it against blocks, and open them."""
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
    """Check that both readers of BYTES accept the same tensors, and that these can be encoded to the same bytes."""
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
    """Read what a stub sends before it has a model."""
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
    """Make, change, read and drop metrics. None is left at the end."""
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


def denials(data: bytes) -> None:
    """Read denials of a stub, and records of the kernel's log."""
    call_in(data, 1, 0.0)
    choices = Choices(data)
    book, expected = DenialBook(), 0
    while choices:
        rows = []
        for _ in choices.some(len(KINDS)):
            kind, count = choices.byte() % len(KINDS), 1 + choices.byte()
            text = choices.take(choices.byte()).decode("utf-8", "replace")
            rows.append([kind, count, text])
            expected += count
        book.add("m_0", rows)
    told = book.latest("m_0")
    if sum(book.counts("m_0").values()) != expected or len(told) > MOST_TEXTS:
        raise AssertionError(f"{expected} refusals, and {book.counts('m_0')}, {len(told)} told")
    for each in told:
        _, _, paths = each.option.partition("MOONPOOL_SANDBOX_PATHS=")
        if paths and PATHS.read(paths) not in (((paths[3:], True),), ((paths[3:], False),)):
            raise AssertionError(f"{each.option} is read as something else")


def output(data: bytes) -> None:
    """Read what a stub prints and logs."""
    choices = Choices(data)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    printed = StubOutput("m_0", read_fd, choices.byte())
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
