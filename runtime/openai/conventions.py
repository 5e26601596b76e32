"""Asks models with the tensors of vLLM's or TensorRT-LLM's backend, as Triton's own front end for OpenAI does.

`text_input` with `sampling_parameters`, a JSON, is vLLM's convention; without it, TensorRT-LLM's, where each setting
has a tensor of its own. `embedding_request` is vLLM's for embeddings. An input that the model does not have is not
sent, and a model with a required input that is unknown has no endpoint. A tensor has as many dimensions as the
configuration says, after that of the batch if the model takes batches; all of them are 1.

These models take one prompt and give one answer. They take texts, so they have chats if something makes a text of
messages: the input `messages` is there for that. A model with a chat template gets it (`stub/openai/templates.py`), and
another one may have it in its configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.tensors import CODES, DTYPES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ModelConfig, TensorConfig
from moonpool.runtime.model.request import Response
from moonpool.runtime.openai.endpoints import (
    EmbeddingEndpoint,
    Fields,
    Inputs,
    ModelEndpoints,
    TextEndpoint,
    needs_only,
    numbers,
    only_string,
    own_endpoints,
    strings,
)
from moonpool.runtime.openai.fields import BadField
from moonpool.runtime.openai.pieces import Piece, held_bytes_of, usage_in, value_of

_TEXT_INPUT, _TEXT_OUTPUT, _SAMPLING = "text_input", "text_output", "sampling_parameters"
_EMBEDDING_REQUEST = "embedding_request"
_MESSAGES = "messages"
# The fields of a chat that say what the text is.
_OF_MESSAGES = (_MESSAGES, "tools", "tool_choice", "documents", "add_generation_prompt", "chat_template_kwargs")
_LOGPROBS = "logprobs"
_TOKENS_IN, _TOKENS_OUT = "num_input_tokens", "num_output_tokens"
# The bytes of a token are a list of numbers, which the chosen token has twice.
_LISTED_BYTES = 16
DEFAULT_MAX_TOKENS = 16
"""The limit of a client that names none, as in Triton's front end."""
# Fields that say nothing about how tokens are sampled.
_NOT_SAMPLING = frozenset(
    (
        *_OF_MESSAGES,
        "audio",
        "best_of",
        "echo",
        "function_call",
        "functions",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "modalities",
        "model",
        "parallel_tool_calls",
        "prediction",
        "prompt",
        "prompt_cache_key",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "suffix",
        "top_logprobs",
        "user",
        "verbosity",
        "web_search_options",
    )
)


# For as long as the models are there, with the configuration that they follow from: a live update replaces it.
_found: WeakKeyDictionary[Model, tuple[ModelConfig, ModelEndpoints]] = WeakKeyDictionary()


def endpoints_of(model: Model) -> ModelEndpoints:
    """Return the endpoints of a model that is loaded; none for most models."""
    config = model.config
    found = _found.get(model)
    if found is None or found[0] is not config:
        found = _found[model] = config, endpoints_in(config)
    return found[1]


def endpoints_in(config: ModelConfig) -> ModelEndpoints:
    """Return the endpoints of a model with this configuration."""
    own = own_endpoints(config)
    if own.texts or own.embedding is not None:
        return own
    inputs = {tensor.name: tensor for tensor in config.inputs}
    outputs = {tensor.name for tensor in config.outputs}
    texts: dict[str, TextEndpoint] = {}
    embedding: EmbeddingEndpoint | None = None
    if _TEXT_OUTPUT in outputs:
        if _TEXT_INPUT in inputs and needs_only(config, _KNOWN.keys() | {_TEXT_INPUT, _SAMPLING}):
            texts["complete"] = _Generation(config)
            if _MESSAGES in inputs:
                texts["chat"] = _Chat(config)
        if _EMBEDDING_REQUEST in inputs and needs_only(config, {_EMBEDDING_REQUEST, *_COUNTS}):
            embedding = _Embedding(config)
    return ModelEndpoints(texts, embedding, needs_template="complete" in texts and "chat" not in texts)


# Each setting of TensorRT-LLM's convention, and what both have: its value for a request, None if it is not sent.
_COUNTS: dict[str, Callable[[Fields], Any]] = {
    "return_num_input_tokens": lambda _: True,
    "return_num_output_tokens": lambda _: True,
}
_KNOWN: dict[str, Callable[[Fields], Any]] = {
    **_COUNTS,
    "stream": lambda fields: bool(fields.get("stream")),
    "max_tokens": lambda fields: _max_tokens(fields),
    "min_tokens": lambda fields: fields.get("min_tokens"),
    "stop_words": lambda fields: _stop(fields),
    "top_p": lambda fields: fields.get("top_p"),
    "temperature": lambda fields: fields.get("temperature"),
    "frequency_penalty": lambda fields: fields.get("frequency_penalty"),
    "presence_penalty": lambda fields: fields.get("presence_penalty"),
    "seed": lambda fields: fields.get("seed"),
    "guided_decoding_guide_type": lambda fields: _guide(fields)[0],
    "guided_decoding_guide": lambda fields: _guide(fields)[1],
    "exclude_input_in_output": lambda fields: not fields.get("echo"),
    "sampling_param_exclude_input_from_output": lambda fields: not fields.get("echo"),
    "return_logprobs": lambda fields: _logprobs(fields) > 0,
    "return_finish_reason": lambda _: True,
}


class _Tensors:
    """Makes the tensors of one model."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = config.name
        self._inputs = {tensor.name: tensor for tensor in config.inputs}
        self._batch = int(config.max_batch_size > 0)

    def add(self, inputs: Inputs, name: str, value: Any) -> None:
        """Add an input, unless the model does not have it or there is no value. Raises `BadField`."""
        tensor = self._inputs.get(name)
        if tensor is None or value is None:
            return
        rank = self._batch + len(tensor.dims)
        values = value if isinstance(value, list) else [value]
        if tensor.datatype == "BYTES":
            texts = strings([str(each).encode("utf-8", "replace") for each in values], 1)
            # All in the last dimension.
            inputs[name] = texts._replace(shape=(*[1] * (rank - 1), len(values)))
        else:
            inputs[name] = self._numbers(tensor, values).reshape((*[1] * (rank - 1), len(values)))

    def add_required(self, inputs: Inputs, name: str, value: Any) -> None:
        """Add an input that the model cannot do without."""
        if not self._inputs[name].optional:
            self.add(inputs, name, value)

    def _numbers(self, tensor: TensorConfig, values: Sequence[Any]) -> NDArray[Any]:
        try:
            return np.array(values, DTYPES[CODES[tensor.datatype]])
        except (OverflowError, ValueError, TypeError):
            raise BadField(
                f"the model's input '{tensor.name}' of the datatype {tensor.datatype} cannot have the value "
                f"{values[0]!r:.100}",
                (tensor.name,),
            ) from None


class _Generation:
    """Completions of a model with one of the conventions."""

    def __init__(self, config: ModelConfig) -> None:
        self._tensors = _Tensors(config)
        there = {tensor.name for tensor in config.outputs}
        wanted = (_TEXT_OUTPUT, _LOGPROBS, "finish_reason", _TOKENS_IN, _TOKENS_OUT)
        self.outputs = [name for name in wanted if name in there]
        self._is_vllms = any(tensor.name == _SAMPLING for tensor in config.inputs)

    def inputs(self, fields: Fields, body: bytes, file: bytes | None = None) -> Inputs:  # noqa: ARG002
        """Return the tensors. Raises `BadField` for what these models cannot do, with Triton's texts."""
        fields = self._own(fields)
        self._check(fields)
        inputs: Inputs = {}
        self._add_text(inputs, fields)
        for name, value in _KNOWN.items():
            self._tensors.add(inputs, name, value(fields))
        self._tensors.add(inputs, _SAMPLING, _json(_sampling(fields)))
        return inputs

    def _add_text(self, inputs: Inputs, fields: Fields) -> None:
        self._tensors.add(inputs, _TEXT_INPUT, fields["prompt"])

    def _check(self, fields: Fields) -> None:
        if fields.get("suffix") is not None:
            raise BadField("suffix is not currently supported", ("suffix",))
        if type(fields.get("prompt")) is not str:
            raise BadField("only single string input is supported", ("prompt",))
        if self._is_vllms and fields.get("best_of") is not None:
            raise BadField("best_of is no longer supported in vLLM backend, removed from vLLM V1 engine", ("best_of",))
        self._check_choices(fields)
        if fields.get("logit_bias") is not None:
            raise BadField("logit bias is not supported", ("logit_bias",))
        self._check_logprobs(fields)

    def _check_choices(self, fields: Fields) -> None:
        for name in ("n", "best_of"):
            if (fields.get(name) or 1) > 1:
                raise BadField(
                    f"Received {name}={fields[name]}, but only single choice ({name}=1) is currently supported", (name,)
                )

    def _check_logprobs(self, fields: Fields) -> None:
        if _logprobs(fields) and _LOGPROBS not in self.outputs:
            raise BadField("logprobs are currently available only for the vLLM backend", ("logprobs",))

    def reader(self, fields: Fields) -> _Reader:
        """Return what reads the responses to one request, and adds up its tokens."""
        return _Reader(self._tensors.model, self.outputs, self._own(fields))

    def _own(self, fields: Fields) -> Fields:
        """Return the fields of this endpoint. Those of a chat were not checked, and mean nothing."""
        return {name: value for name, value in fields.items() if name not in _OF_MESSAGES}


class _Chat(_Generation):
    """Chats of a model with one of the conventions, for which something makes a text of the messages."""

    def _own(self, fields: Fields) -> Fields:
        return fields

    def _add_text(self, inputs: Inputs, fields: Fields) -> None:
        asked = {name: fields[name] for name in _OF_MESSAGES if fields.get(name) is not None}
        self._tensors.add(inputs, _MESSAGES, _json(asked))
        # The text takes its place.
        self._tensors.add_required(inputs, _TEXT_INPUT, "")

    def _check(self, fields: Fields) -> None:
        self._check_choices(fields)
        if fields.get("logit_bias") is not None:
            raise BadField("logit bias is not currently supported", ("logit_bias",))
        self._check_logprobs(fields)


class _Reader:
    """Reads the responses to one request."""

    def __init__(self, model: str, outputs: Sequence[str], fields: Fields) -> None:
        self._model = model
        self._outputs = outputs
        self._is_chat = _MESSAGES in fields
        tool = _forced(fields)
        # The call that the answer is, with the name of its function until that was told.
        self._call = None if tool is None else {"name": str(tool.get("name"))}
        self._prompt_tokens: int | None = None
        self._completion_tokens = 0
        self._offset = 0

    def piece(self, response: Response) -> Piece:
        """Return the text of a response, with all tokens until now. Raises `ModelError`."""
        text = self._text(response, _TEXT_OUTPUT) or ""
        usage = None
        if _TOKENS_IN in response.outputs and _TOKENS_OUT in response.outputs:
            if self._prompt_tokens is None:
                self._prompt_tokens = _count(response, _TOKENS_IN, self._model)
            self._completion_tokens += _count(response, _TOKENS_OUT, self._model)
            counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._completion_tokens}
            usage = usage_in(counts, self._model)
        reason = self._text(response, "finish_reason")
        logprobs, extra_bytes = self._logprobs(response)
        return Piece(self._delta(text), 0, reason or None, logprobs, usage, extra_bytes)

    def _delta(self, text: str) -> dict[str, Any]:
        if self._call is None:
            return {"content": text} if text else {}
        named, self._call = self._call, {}
        begins = {"type": "function"} if named else {}
        return {"tool_calls": [{"index": 0, **begins, "function": {**named, "arguments": text}}]}

    def _text(self, response: Response, name: str) -> str | None:
        if name not in response.outputs:
            return None
        return str(only_string(response, name, self._model), "utf-8", "replace")

    def _logprobs(self, response: Response) -> tuple[dict[str, Any] | None, int]:
        """Return vLLM's form, a dict of alternatives by the token's id for each token, in OpenAI's, with about the
        memory that it takes beyond its text.
        """
        text = self._text(response, _LOGPROBS)
        if text is None or text == "null":
            return None, 0
        raw = text.encode()
        value = value_of(raw, self._model)
        try:
            found = [_alternatives(each) for each in value if each]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise ModelError(f"the output 'logprobs' of model '{self._model}' is not in vLLM's form") from None
        token_bytes = sum(len(token) for each in found for token, _ in each)
        return self._in_openais(found), held_bytes_of(raw) + token_bytes * _LISTED_BYTES

    def _in_openais(self, found: Sequence[list[tuple[str, float]]]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": [{**_token(*each[0]), "top_logprobs": [_token(*one) for one in each]} for each in found]}
        offsets = []
        for each in found:
            offsets.append(self._offset)
            self._offset += len(each[0][0])
        return {
            "text_offset": offsets,
            "token_logprobs": [each[0][1] for each in found],
            "tokens": [each[0][0] for each in found],
            "top_logprobs": [dict(each) for each in found],
        }


def _count(response: Response, name: str, model: str) -> int:
    values = numbers(response, name, model)
    if values.size != 1 or values.dtype.kind not in "iu" or values[0] < 0:
        raise ModelError(f"the output '{name}' of model '{model}' must be one number of tokens")
    return int(values[0])


def _alternatives(token: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the texts and the logarithms for one token, the chosen one first."""
    ranked = sorted(token.values(), key=lambda each: each.get("rank") or 1 << 30)
    return [(str(each["decoded_token"]), float(each["logprob"])) for each in ranked]


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


class _Embedding:
    """Embeddings of a model with vLLM's convention: one text for each request."""

    takes_tokens = True

    def __init__(self, config: ModelConfig) -> None:
        self._tensors = _Tensors(config)
        there = {tensor.name for tensor in config.outputs}
        self.outputs = [name for name in (_TEXT_OUTPUT, _TOKENS_IN) if name in there]

    def requests(self, texts: Sequence[Any], fields: Fields) -> list[tuple[Inputs, int]]:
        """Return a request for each text, or for each list of tokens."""
        wanted = fields.get("dimensions")
        pooling = {} if wanted is None else {"dimensions": [wanted]}
        made = []
        for text in texts:
            inputs: Inputs = {}
            asked = {"input": text, "pooling_params": pooling}
            self._tensors.add(inputs, _EMBEDDING_REQUEST, json.dumps(asked))
            for name, value in _COUNTS.items():
                self._tensors.add(inputs, name, value(fields))
            made.append((inputs, 1))
        return made

    def rows(self, response: Response, count: int) -> tuple[NDArray[np.float32], int | None]:  # noqa: ARG002
        """Return the row, which comes as JSON. Raises `ModelError`."""
        model = self._tensors.model
        try:
            row = np.array(value_of(only_string(response, _TEXT_OUTPUT, model), model), np.float32)
        except (ValueError, TypeError, OverflowError):
            raise ModelError(f"the output '{_TEXT_OUTPUT}' of model '{model}' is not a list of numbers") from None
        if row.ndim != 1 or not row.size:
            raise ModelError(f"the output '{_TEXT_OUTPUT}' of model '{model}' is not a list of numbers")
        if _TOKENS_IN not in response.outputs:
            return row.reshape(1, -1), None
        tokens = _count(response, _TOKENS_IN, model)
        usage_in({"prompt_tokens": tokens}, model)
        return row.reshape(1, -1), tokens


def _json(value: Fields) -> str:
    """Return fields of a request as JSON. Raises `BadField`."""
    try:
        return json.dumps(value)
    except RecursionError:
        raise BadField("the body is nested too deeply") from None


def _max_tokens(fields: Fields) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        if fields.get(name) is not None:
            return int(fields[name])
    return DEFAULT_MAX_TOKENS


def _stop(fields: Fields) -> list[str] | None:
    found = fields.get("stop")
    return [found] if isinstance(found, str) else found or None


def _logprobs(fields: Fields) -> int:
    """Return the number of alternatives that the client wants for each token; 0 for no logarithms."""
    wanted = fields.get("logprobs")
    if type(wanted) is int:
        return wanted
    if not wanted:
        return 0
    top = fields.get("top_logprobs")
    return 1 if top is None else int(top)


def _forced(fields: Fields) -> Fields | None:
    """Return the function that the model has to call, whose arguments are then all that it answers. As in Triton's
    front end, it is the first one if the client leaves the choice to the model.
    """
    choice = fields.get("tool_choice")
    if _MESSAGES not in fields or choice in (None, "none", "auto"):
        return None
    tools: list[Fields] = [tool["function"] for tool in fields.get("tools") or () if type(tool.get("function")) is dict]
    if choice == "required":
        return next(iter(tools), None)
    name = choice["function"]["name"]
    return next(tool for tool in tools if tool.get("name") == name)


def _guide(fields: Fields) -> tuple[str | None, str | None]:
    """Return the form that the answer must have: its kind in TensorRT-LLM's words, and a schema in JSON.

    That of a tool which the model has to call goes first, as in Triton's front end.
    """
    tool = _forced(fields)
    if tool is not None:
        return "json_schema", _json(tool.get("parameters") or {"type": "object"})
    form = fields.get("response_format")
    if type(form) is not dict:
        return None, None
    if form.get("type") == "json_schema" and type(form.get("json_schema")) is dict:
        return "json_schema", _json(form["json_schema"].get("schema") or {"type": "object"})
    return ("json", None) if form.get("type") == "json_object" else (None, None)


def _sampling(fields: Fields) -> dict[str, Any]:
    """Return the fields that say how to sample, as vLLM takes them."""
    found = {name: value for name, value in fields.items() if name not in _NOT_SAMPLING and value is not None}
    found["max_tokens"] = _max_tokens(fields)
    if _logprobs(fields):
        found["logprobs"] = _logprobs(fields)
    kind, schema = _guide(fields)
    if kind is not None:
        found["structured_outputs"] = json.dumps({"json_object": True} if schema is None else {"json": schema})
    return found
