"""Messages for the models of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from tests.server.grpc.serving import TIMEOUT_S, messages

FOUR = np.arange(4, dtype=np.float32)


def add_sub(left: bytes = FOUR.tobytes(), right: bytes = FOUR.tobytes(), request_id: str = "") -> Any:
    """Return a request to the example model: two inputs of four floats."""
    asked = messages.ModelInferRequest(model_name="add_sub", id=request_id)
    for name, data in (("INPUT0", left), ("INPUT1", right)):
        asked.inputs.add(name=name, datatype="FP32", shape=[4])
        asked.raw_input_contents.append(data)
    return asked


def repeat(count: int, *, fail: bool = False, size: int = 0, request_id: str = "") -> Any:
    """Return a request to the decoupled model."""
    asked = messages.ModelInferRequest(model_name="repeat", id=request_id)
    for name, datatype, data in (
        ("COUNT", "INT32", np.int32(count).tobytes()),
        ("FAIL", "BOOL", bytes([fail])),
        ("SIZE", "INT32", np.int32(size).tobytes()),
    ):
        asked.inputs.add(name=name, datatype=datatype, shape=[1])
        asked.raw_input_contents.append(data)
    return asked


def text(model: str, name: str, value: str, request_id: str = "") -> Any:
    """Return a request to a model with one input of one string."""
    asked = messages.ModelInferRequest(model_name=model, id=request_id)
    asked.inputs.add(name=name, datatype="BYTES", shape=[1])
    asked.raw_input_contents.append(packed([value.encode()]))
    return asked


def packed(strings: Sequence[bytes]) -> bytes:
    """Return strings as they travel."""
    return b"".join(len(each).to_bytes(4, "little") + each for each in strings)


def refused(call: Any, asked: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of an RPC that must fail."""
    with pytest.raises(grpc.RpcError) as raised:
        call(asked, timeout=TIMEOUT_S)
    return raised.value.code(), raised.value.details()
