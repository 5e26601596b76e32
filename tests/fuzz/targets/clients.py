"""Fuzz targets for clients' bytes: inference requests over HTTP and gRPC, and places in shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from tests.fuzz.choices import Choices
from tests.runtime.recorder import tensor
from tritonclient.grpc import service_pb2 as kserve

from moonpool.ipc import port
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.tensors import CODES
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.protobuf import BadProtobuf
from moonpool.runtime.model.request import InferenceRequest, Response, WireTensor
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.server.grpc.infer_request import GrpcRequestPlan, InferMessage
from moonpool.runtime.server.http import generate, infer_request, infer_response, json_text
from moonpool.runtime.server.inference import request as requests
from moonpool.runtime.server.shared_memory import SharedMemoryError, SystemSharedMemory, _Region

_CONFIG = ModelConfig.from_dict(
    {
        "name": "m",
        "backend": "any",
        "max_batch_size": 8,
        "input": [
            tensor("X", "FP32", -1),
            {**tensor("S", "STRING", -1), "optional": True},
            {**tensor("B", "BOOL", 2, -1), "optional": True},
            {**tensor("I", "INT64", 1), "optional": True},
        ],
        "output": [tensor("Y", "FP32", -1), tensor("T", "STRING", -1)],
    }
)

_ALONE = ModelConfig.from_dict({**_CONFIG.raw, "input": [tensor("X", "FP32", -1)]})


class _Service:
    """Stands in for a server. Its clients share no memory, and its model has no folder."""

    models = SimpleNamespace(find=lambda *_: _HOSTED)

    def lender(self, *_: Any) -> None:
        return None

    def read_shared(self, *_: Any) -> Any:
        raise InvalidRequest("Unable to find shared memory region")

    def write_shared(self, *_: Any) -> None:
        raise InvalidRequest("Unable to find shared memory region")


_HOSTED: Any = SimpleNamespace(model=SimpleNamespace(config=_CONFIG, name="m", version=1), signature=Signature(_CONFIG))
_SERVICE: Any = _Service()
_EXTENSION = load_if_there("moonpool.runtime.server.http._scan") if is_wanted() else None
_SCAN = _EXTENSION and _EXTENSION.scanner(requests.InputPlan, CODES)
_PIECE_BYTES = 64
_ODD = re.compile(rb"^\xef\xbb\xbf|NaN|Inf|[-+.0-9Ee]{%d}" % _PIECE_BYTES)
_OUTPUTS: dict[str, Any] = {
    "Y": WireTensor(11, (1, 4), np.zeros(16, np.uint8)),
    "T": WireTensor(13, (1, 1), np.frombuffer(b"\x01\0\0\0a", np.uint8)),
}
_RESPONSE = Response(_OUTPUTS, {"a": 1})


def _travels(request: InferenceRequest) -> None:
    """Check that a parsed request can be sent to a stub."""
    packed = encode(request.details)[1:]
    if port.compiled is not None and request.details is not None:
        written = port.compiled.packed_details(request.details)
        if written not in (None, packed):
            raise AssertionError(f"the port writes {written!r} for {packed!r}")
    for array in request.arrays:
        array.tobytes()


def _check_scan(text: bytes) -> None:
    """Check that a text which is read in one step means the same to the general reader."""
    found = None if _SCAN is None else _SCAN(text)
    if found is None:
        return
    try:
        one, other = (infer_request.HttpRequestPlan(each) for each in (found, json_text.loads(text)))
    except MoonpoolError:
        return
    for name in ("details", "id_text", "inputs", "is_plain", "outputs", "request_id", "rest", "wanted"):
        if getattr(one, name) != getattr(other, name):
            raise AssertionError(f"{name}: {getattr(one, name)!r}, not {getattr(other, name)!r}")


def http_infer(data: bytes) -> None:
    """JSON, then tensors; and, where that is a request, its response as it is wanted."""
    length, body = int.from_bytes(data[:2], "big") % (len(data) - 1 or 1), data[2:]
    length = min(length, len(body)) or len(body)
    try:
        if data[:1] == b"\xff":
            plan, body = infer_request.raw_plan(_ALONE, body)  # type: ignore[assignment]
            length = 0
        else:
            _check_scan(body[:length])
            plan = infer_request.read_plan(body[:length])
        arrays = plan.arrays("m", body, length)
        if not plan.has_shared:
            _travels(requests.make_request(_HOSTED, arrays, plan.outputs, plan.details))
            infer_response.render(_SERVICE, _HOSTED.model, plan, _RESPONSE, 1 << 20)
    except MoonpoolError as error:
        str(error)


def http_json(data: bytes) -> None:
    """Check that a text in pieces is read where orjson reads the whole, and nowhere else."""
    try:
        orjson.loads(data)
        is_json = True
    except orjson.JSONDecodeError:
        is_json = False
    piece_bytes, json_text._PIECE_BYTES = json_text._PIECE_BYTES, _PIECE_BYTES
    try:
        json_text.loads(data)
        is_read = True
    except json_text.NotJson:
        is_read = False
    finally:
        json_text._PIECE_BYTES = piece_bytes
    # A number has to fit into a piece, as have all but 64 levels of arrays; and some texts are JSON for Triton alone.
    is_odd = _ODD.search(data) is not None or data.count(b"[") + data.count(b"{") >= 64
    if is_json != is_read and not is_odd:
        raise AssertionError(is_json)


def http_generate(data: bytes) -> None:
    try:
        _travels(generate._request(_HOSTED, {}, lambda values: values, data))
    except MoonpoolError as error:
        str(error)


def grpc_wire(data: bytes) -> None:
    """Check that our reader reads every message that protobuf accepts, and no other, with the same fields."""
    try:
        whole = kserve.ModelInferRequest.FromString(data)
    except DecodeError:
        whole = None
    try:
        asked = InferMessage(data)
    except BadProtobuf:
        # Our reader refuses groups, which protobuf accepts. No message of today has any.
        if whole is not None and not any(byte & 7 in (3, 4) for byte in data):
            raise AssertionError("a message that is refused") from None
        return
    if whole is None:
        raise AssertionError("a message that is no message")
    tensors = [data[at : at + size] for at, size in asked.tensors]
    named = asked.model, asked.version, asked.request_id, tensors
    if named != (whole.model_name, whole.model_version, whole.id, [*whole.raw_input_contents]):
        raise AssertionError(named)
    counts = len(whole.inputs), len(whole.outputs)
    if _planned(lambda: GrpcRequestPlan([None] * counts[0], [None] * counts[1], {}, whole)) != _planned(asked.read):
        raise AssertionError("another plan")


def _planned(plan: Callable[[], GrpcRequestPlan]) -> object:
    """Return what stands in a plan, or its error."""
    try:
        made = plan()
    except MoonpoolError as error:
        return str(error)
    inputs = made.inputs
    return inputs, [*made.contents], made.parameters, made.outputs, made.classes, made.places


def grpc_infer(data: bytes) -> None:
    try:
        asked = InferMessage(data)
        asked.read()
        _travels(asked.usual(_SERVICE, _HOSTED, {}) or asked.request(_SERVICE, _HOSTED, {}))
    except (BadProtobuf, MoonpoolError) as error:
        str(error)


_OBJECT_BYTES, _BEGIN, _END = 4096, 1024, 3072


def shared_memory(data: bytes) -> None:
    """Check that only the registered range is read or written, and that the object does not grow."""
    choices = Choices(data)
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    os.pwrite(fd, b"o" * _OBJECT_BYTES, 0)
    memory = SystemSharedMemory()
    memory._regions["r"] = _Region("r", "r", _BEGIN, _END - _BEGIN, os.dup(fd))
    try:
        while choices:
            _ask(memory, choices)
        whole = os.pread(fd, 2 * _OBJECT_BYTES, 0)
        if len(whole) != _OBJECT_BYTES or whole[:_BEGIN].strip(b"o") or whole[_END:].strip(b"o"):
            raise AssertionError("something else was written")
    finally:
        os.close(fd)


def _ask(memory: SystemSharedMemory, choices: Choices) -> None:
    name = choices.of(["r", "r", "r", "", "other"])
    offset, size = choices.number(0, 1024, 2047, 2048), choices.number(0, 1, 1024, 2048)
    if choices.byte() % 5 == 0:
        offset, size = -offset, size * choices.of((1, -1))
    operation = choices.byte() % 4
    try:
        if operation == 0:
            memory.check(name, offset, size)
        elif operation == 1:
            into = np.zeros(size % 5000, np.uint8)
            memory.read(name, offset, into)
            if into.tobytes().strip(b"ow"):
                raise AssertionError("something else was read")
        elif operation == 2:
            memory.write(name, offset, [memoryview(b"w" * (size % 5000))])
        else:
            key = choices.take(choices.byte() % 20).decode("utf-8", "replace")
            # No object has such a name, whatever else is on this machine.
            memory.register(name + "2", key + "/no such thing", offset, size)
    except (SharedMemoryError, InvalidRequest) as error:
        str(error)
