"""A model in the process of another host, which gives it bodies of the KServe v2 protocol or arrays.

This runs in the environment of that host, which has numpy and msgpack beside the host itself. The model is loaded by
the code that loads it in a stub, so it is the same file with the same configuration everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any

import numpy as np

from moonpool.ipc.tensors import BYTES, CODES, DTYPES, NAMES, code_of, decode_bytes, encode_bytes
from moonpool.stub.model import load_model
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor

# Nearly all heads are shorter.
_HEAD_BYTES = 1 << 14
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


class Failed(Exception):
    """The model could not answer; the text says why."""


class ModelInHost:
    """The model of a START, initialized. For one thread at a time."""

    def __init__(self, start_file: str) -> None:
        """Load the model that a file describes. Raises `LoadError`."""
        start = json.loads(Path(start_file).read_text(encoding="utf-8"))
        self._name: str = start["args"]["model_name"]
        self._outputs: list[str] = start["outputs"]
        self._model = load_model(start, None)

    def infer(self, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        """Execute one request. Raises `Failed`."""
        tensors = [Tensor(name, array) for name, array in arrays.items()]
        request = InferenceRequest(inputs=tensors, requested_output_names=self._outputs, model_name=self._name)
        returned = self._model.execute([request])
        if type(returned) is CoroutineType:
            returned.close()
            raise Failed("execute is a coroutine, which other hosts cannot run")
        (response,) = self._model.responses(returned, [request])
        if response is None:
            raise Failed("the model did not return its response")
        error = response.error()
        if error is not None:
            raise Failed(str(error))
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    def answer(self, body: bytes) -> bytes:
        """Execute the request in a body and return that of the answer. Raises `Failed`, and ValueError for a malformed
        one.
        """
        return written(self._name, self.infer(read(body)))


def read(body: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Read the inputs of a request, which are binary."""
    header, at = head_of(body)
    arrays = {}
    for entry in header["inputs"]:
        size = int(entry["parameters"]["binary_data_size"])
        data, shape = body[at : at + size], tuple(entry["shape"])
        at += size
        arrays[entry["name"]] = (
            decode_bytes(data, shape)
            if entry["datatype"] == "BYTES"
            else np.frombuffer(data, DTYPES[CODES[entry["datatype"]]]).reshape(shape)
        )
    return arrays


def head_of(body: bytes) -> tuple[dict[str, Any], int]:
    """Read the JSON at the beginning of a body; return it, and its length. Not every host shows the header with the
    length.
    """
    decoder = json.JSONDecoder()
    try:
        # Large tensors may follow.
        return decoder.raw_decode(body[:_HEAD_BYTES].decode("latin-1"))
    except ValueError:
        return decoder.raw_decode(body.decode("latin-1"))


def written(model: str, arrays: Arrays) -> bytes:
    """Write the body of an answer, with binary outputs."""
    outputs, parts = [], []
    for name, array in arrays.items():
        code = code_of(array.dtype, name)
        data = encode_bytes(array, name) if code == BYTES else array.tobytes()
        outputs.append(
            {
                "name": name,
                "datatype": NAMES[code],
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(data)},
            }
        )
        parts.append(data)
    return b"".join([json.dumps({"model_name": model, "outputs": outputs}).encode(), *parts])
