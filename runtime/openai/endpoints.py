"""Finds out which endpoints a model has, by the names and types of its tensors, and makes their requests.

A model of this API has the input `request`, which is the JSON of a request, and an output for each endpoint, whose only
element is a piece (`pieces.py`). It embeds if it has the input `texts` and the output `embedding`. That is what
moonpool makes of a class with the methods, and what any model of Triton's may have in its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.tensors import BYTES, CODES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.config.model import ModelConfig, TensorConfig
from moonpool.runtime.model.request import Response, WireTensor

REQUEST, TEXTS, FILE = "request", "texts", "file"
# The output of each endpoint.
_OUTPUTS = {
    "chat": "chat",
    "complete": "completion",
    "rerank": "ranking",
    "transcribe": "transcription",
}
EMBED = "embed"
_EMBEDDING = "embedding"
ENDPOINTS = (*_OUTPUTS, EMBED)


class ModelEndpoint(NamedTuple):
    """Holds the tensors of one endpoint of a model."""

    output: str
    is_batched: bool
    """Whether tensors have a dimension for the batch before their own."""
    most_rows: int
    """The rows that a request may have; 1 if the model takes no batches."""

    def inputs(self, body: bytes, file: bytes | None = None) -> dict[str, WireTensor]:
        """Return the inputs for one request."""
        inputs = {REQUEST: self._strings([body])}
        if file is not None:
            inputs[FILE] = self._strings([file])
        return inputs

    def texts(self, texts: Sequence[bytes]) -> dict[str, WireTensor]:
        """Return the inputs for at most `most_rows` texts to embed."""
        return {TEXTS: self._strings(texts)}

    def answer(self, response: Response, model: str) -> bytes:
        """Return the only element of the output, which is a text. Raises `ModelError`; `model` is for its text."""
        tensor = response.outputs.get(self.output)
        if not isinstance(tensor, WireTensor) or tensor.datatype != BYTES:
            raise ModelError(
                f"the response of model '{model}' has no strings in the output '{self.output}'"
            )
        raw = memoryview(tensor.raw).cast("B")
        if len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
            raise ModelError(f"the output '{self.output}' of model '{model}' must have one element")
        return bytes(raw[4:])

    def rows(self, response: Response, count: int, model: str) -> NDArray[np.float32]:
        """Return the embeddings of so many texts, a copy: the stub may write to its memory. Raises as `answer`."""
        tensor = response.outputs.get(self.output)
        if not isinstance(tensor, WireTensor) or tensor.datatype != CODES["FP32"]:
            raise ModelError(
                f"the response of model '{model}' has no numbers in the output '{self.output}'"
            )
        values = np.frombuffer(bytes(memoryview(tensor.raw).cast("B")), np.float32)
        if not values.size or values.size % count:
            raise ModelError(f"model '{model}' gave {values.size} numbers for {count} texts")
        return values.reshape(count, -1)

    def _strings(self, values: Sequence[bytes]) -> WireTensor:
        raw = b"".join(
            [part for each in values for part in (len(each).to_bytes(4, "little"), each)]
        )
        shape = (len(values), 1) if self.is_batched else (len(values),)
        return WireTensor(BYTES, shape, np.frombuffer(raw, np.uint8))


def endpoints_of(config: ModelConfig) -> Mapping[str, ModelEndpoint]:
    """Return the endpoints of a model by name; none for most models."""
    inputs, outputs = _named(config.inputs), _named(config.outputs)
    found: dict[str, ModelEndpoint] = {}
    is_batched, most_rows = config.max_batch_size > 0, max(1, config.max_batch_size)
    if _is_text(inputs.get(REQUEST)) and _needs_only(config, {REQUEST}):
        for name, output in _OUTPUTS.items():
            if _is_text(outputs.get(output)) and (
                name != "transcribe" or _is_text(inputs.get(FILE))
            ):
                found[name] = ModelEndpoint(output, is_batched, 1)
    embedding = outputs.get(_EMBEDDING)
    if (
        _is_text(inputs.get(TEXTS))
        and embedding is not None
        and embedding.datatype == "FP32"
        and len(embedding.dims) == 1
        and _needs_only(config, {TEXTS})
    ):
        found[EMBED] = ModelEndpoint(_EMBEDDING, is_batched, most_rows)
    return found


def _named(tensors: Sequence[TensorConfig]) -> dict[str, TensorConfig]:
    return {tensor.name: tensor for tensor in tensors}


def _is_text(tensor: TensorConfig | None) -> bool:
    return tensor is not None and tensor.datatype == "BYTES" and list(tensor.dims) in ([1], [-1])


def _needs_only(config: ModelConfig, names: set[str]) -> bool:
    return all(tensor.optional or tensor.name in names for tensor in config.inputs)
