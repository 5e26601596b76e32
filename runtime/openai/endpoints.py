"""Finds out which endpoints a model has, by the names and types of its tensors.

A model of this API has the input `request`, which is the JSON of a request, and an output for each endpoint, whose only
element is a piece (`pieces.py`). It embeds if it has the input `texts` and the output `embedding`. That is what
moonpool makes of a class with the methods, and what any model of Triton's may have in its configuration. Models with
the tensors of vLLM's and TensorRT-LLM's backends have endpoints, too (`conventions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.tensors import BYTES, CODES, DTYPES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.config.model import ModelConfig, TensorConfig
from moonpool.runtime.model.request import Response, WireTensor
from moonpool.runtime.openai.pieces import Piece, check_size, object_of, piece_of, usage_in

REQUEST, TEXTS, FILE, EMBEDDING = "request", "texts", "file", "embedding"
# The output of each endpoint that answers with pieces.
_OUTPUTS = {"chat": "chat", "complete": "completion", "rerank": "ranking", "transcribe": "transcription"}
Inputs = dict[str, WireTensor | NDArray[Any]]
Fields = Mapping[str, Any]


class NoTemplate(ModelError):
    """A model answers with texts, and nothing makes a text of the messages of a chat."""

    detail = "Unknown tokenizer"
    """All that Triton's front end says."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{self.detail}: nothing makes a text of messages for model '{model}'; its parameter "
            "MOONPOOL_CHAT_TEMPLATE, or --model-option, names a chat template (docs/OPENAI.md)"
        )


class PieceReader(Protocol):
    """Reads the responses to one request."""

    def piece(self, response: Response) -> Piece:
        """Return what a response says. Raises `ModelError`."""


class TextEndpoint(Protocol):
    """Answers with pieces. For any thread."""

    @property
    def outputs(self) -> Sequence[str]:
        """The outputs that requests ask for."""

    def inputs(self, fields: Fields, body: bytes, file: bytes | None = None) -> Inputs:
        """Return the inputs for a request, whose body has these fields. Raises `InvalidRequest`."""

    def reader(self, fields: Fields) -> PieceReader:
        """Return a reader of the responses to a request with these fields."""


class EmbeddingEndpoint(Protocol):
    """Answers with a row of numbers for each text. For any thread."""

    takes_tokens: bool
    """True if a list of the ids of tokens may stand for a text."""

    @property
    def outputs(self) -> Sequence[str]:
        """The outputs that requests ask for."""

    def requests(self, texts: Sequence[Any], fields: Fields) -> list[tuple[Inputs, int]]:
        """Return the inputs of each request that these texts need, with the number of its texts."""

    def rows(self, response: Response, count: int) -> tuple[NDArray[np.float32], int | None]:
        """Return the embeddings of so many texts, a copy, and the number of their tokens if it is known.

        Raises `ModelError`.
        """


class ModelEndpoints:
    """The endpoints of a model."""

    def __init__(
        self, texts: Mapping[str, TextEndpoint], embedding: EmbeddingEndpoint | None, *, needs_template: bool = False
    ) -> None:
        self.texts = texts
        """By method: chat, complete, rerank, transcribe."""
        self.embedding = embedding
        self._needs_template = needs_template

    def text(self, model: str, method: str) -> TextEndpoint | None:
        """Return the endpoint of a method, None if the model of this name has none. Raises `ModelError` for a chat
        that lacks nothing but a template.
        """
        if method == "chat" and self._needs_template:
            raise NoTemplate(model)
        return self.texts.get(method)


class PieceEndpoint:
    """An endpoint of a model that writes pieces itself, into one output."""

    def __init__(self, model: str, output: str, *, is_batched: bool) -> None:
        self.outputs = [output]
        self._model = model
        self._rank = 1 + is_batched

    def inputs(self, fields: Fields, body: bytes, file: bytes | None = None) -> Inputs:  # noqa: ARG002
        """Return the body as it is."""
        inputs: Inputs = {REQUEST: strings([body], self._rank)}
        if file is not None:
            inputs[FILE] = strings([file], self._rank)
        return inputs

    def reader(self, fields: Fields) -> PieceEndpoint:  # noqa: ARG002
        """Return this object, as a piece says all."""
        return self

    def piece(self, response: Response) -> Piece:
        """Return the piece. Raises `ModelError`."""
        return piece_of(only_string(response, self.outputs[0], self._model), self._model)

    def object(self, response: Response) -> dict[str, Any]:
        """Return the fields of a response that is no piece of a text. Raises `ModelError`."""
        return object_of(only_string(response, self.outputs[0], self._model), self._model)


class RowEndpoint:
    """The embeddings of a model that takes several texts at a time."""

    takes_tokens = False
    outputs = (EMBEDDING,)

    def __init__(self, model: str, most_rows: int) -> None:
        """A model that takes no batches has 0 for `most_rows`."""
        self._model = model
        self._most_rows = most_rows

    def requests(self, texts: Sequence[Any], fields: Fields) -> list[tuple[Inputs, int]]:  # noqa: ARG002
        """Return as many texts for each request as the model takes in a batch."""
        most, rank = max(1, self._most_rows), 1 + (self._most_rows > 0)
        parts = [texts[at : at + most] for at in range(0, len(texts), most)]
        return [
            ({TEXTS: strings([each.encode("utf-8", "replace") for each in part], rank)}, len(part)) for part in parts
        ]

    def rows(self, response: Response, count: int) -> tuple[NDArray[np.float32], int | None]:
        """Return the rows, and the tokens if the model has counted them. Raises `ModelError`."""
        values = numbers(response, EMBEDDING, self._model).astype(np.float32, copy=False)
        if not values.size or values.size % count:
            raise ModelError(f"model '{self._model}' gave {values.size} numbers for {count} texts")
        tokens = response.parameters.get("prompt_tokens")
        counted = usage_in(None if tokens is None else {"prompt_tokens": tokens}, self._model)
        return values.reshape(count, -1), None if counted is None else counted["prompt_tokens"]


def own_endpoints(config: ModelConfig) -> ModelEndpoints:
    """Return the endpoints that a model has by moonpool's own tensors."""
    inputs = {tensor.name: tensor for tensor in config.inputs}
    outputs = {tensor.name: tensor for tensor in config.outputs}
    is_batched = config.max_batch_size > 0
    texts: dict[str, TextEndpoint] = {}
    if _is_text(inputs.get(REQUEST)) and needs_only(config, {REQUEST}):
        for method, output in _OUTPUTS.items():
            if _is_text(outputs.get(output)) and (method != "transcribe" or _is_text(inputs.get(FILE))):
                texts[method] = PieceEndpoint(config.name, output, is_batched=is_batched)
    row = outputs.get(EMBEDDING)
    embeds = (
        _is_text(inputs.get(TEXTS))
        and row is not None
        and row.datatype == "FP32"
        and len(row.dims) == 1
        and needs_only(config, {TEXTS})
    )
    return ModelEndpoints(texts, RowEndpoint(config.name, config.max_batch_size) if embeds else None)


def _is_text(tensor: TensorConfig | None) -> bool:
    return tensor is not None and tensor.datatype == "BYTES" and tuple(tensor.dims) in ((1,), (-1,))


def needs_only(config: ModelConfig, names: set[str]) -> bool:
    """Return whether a request with these inputs lacks none."""
    return all(tensor.optional or tensor.name in names for tensor in config.inputs)


def strings(values: Sequence[bytes], rank: int) -> WireTensor:
    """Return a tensor of strings, one in each row or, for a rank of 1, all in one."""
    raw = b"".join([part for each in values for part in (len(each).to_bytes(4, "little"), each)])
    shape = (len(values), *[1] * (rank - 1))
    return WireTensor(BYTES, shape, np.frombuffer(raw, np.uint8))


def only_string(response: Response, output: str, model: str) -> memoryview:
    """Return the only element of an output of strings, to be copied: the stub may write to it. Raises `ModelError`,
    also for one that is larger than a piece may be.
    """
    tensor = response.outputs.get(output)
    if not isinstance(tensor, WireTensor) or tensor.datatype != BYTES:
        raise ModelError(f"the response of model '{model}' has no strings in the output '{output}'")
    raw = memoryview(tensor.raw).cast("B")
    if len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
        raise ModelError(f"the output '{output}' of model '{model}' must have one string")
    check_size(len(raw) - 4, model)
    return raw[4:]


def numbers(response: Response, output: str, model: str) -> NDArray[Any]:
    """Return the elements of an output of numbers, a copy: the stub may write to its memory. Raises `ModelError`."""
    tensor = response.outputs.get(output)
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).copy()
    if not isinstance(tensor, WireTensor) or tensor.datatype == BYTES or tensor.datatype == CODES["BF16"]:
        raise ModelError(f"the response of model '{model}' has no numbers in the output '{output}'")
    return np.frombuffer(bytes(memoryview(tensor.raw).cast("B")), DTYPES[tensor.datatype])
