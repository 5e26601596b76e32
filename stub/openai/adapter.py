"""Presents a class with methods of OpenAI's API to the loop as a model of Triton's kind.

Theory of operation. A request comes as one text, its JSON, in the input `request`, and asks for one output: that names
the method. Each thing that the method yields is a response with one JSON object in that output. So the model is
decoupled, and what the runtime does for decoupled models, it does here: queues, deadlines, cancellation, backlogs.

Texts to embed come as rows of the input `texts`, which the scheduler joins over clients. `embed` is called once for all
of them, on the main thread, as any model of moonpool's own. A class with nothing but `embed` is not decoupled.

Coroutines and generators with `async` run in tasks of the model's event loop. If the client leaves, the control thread
has the loop cancel the task: the model sees CancelledError where it awaits, or GeneratorExit at its `yield`. Plain
generators and functions hold the main thread, and look at `is_cancelled` between their pieces, so requests to such a
model wait for each other.

An error belongs to the one request, whatever it was batched with: it is logged, and becomes the last response.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moonpool.ipc.tensors import BYTES
from moonpool.stub.native.model import DEFAULT_MAX_BATCH_SIZE, ClassAdapter, cut, joined
from moonpool.stub.native.signature import BadHint, methods_of
from moonpool.stub.openai.pieces import BadRequest, encoded
from moonpool.stub.openai.requests import KINDS, OpenAIRequest, TranscriptionRequest
from moonpool.stub.pb_utils import logger
from moonpool.stub.pb_utils.config import Json, ModelConfig
from moonpool.stub.pb_utils.errors import InvalidReturn, TritonError
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse, Reply
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.report import describe, traceback_of

if TYPE_CHECKING:
    import asyncio

REQUEST, TEXTS, FILE = "request", "texts", "file"
"""The inputs: the JSON of a request, texts to embed, and a recording."""
EMBEDDING = "embedding"
"""The output of `embed`: a row of numbers for each text."""
PROMPT_TOKENS = "prompt_tokens"
"""The parameter of a response that says how many tokens its texts have."""
# The outputs of the other methods, which carry pieces.
_OUTPUTS = {"chat": "chat", "complete": "completion", "rerank": "ranking", "transcribe": "transcription"}


def complete_config(model: type, config: ModelConfig) -> ModelConfig:
    """Complete a configuration with the tensors of the class's endpoints.

    Raises BadHint, and ValueError if class and configuration contradict each other.
    """
    methods = methods_of(model)
    embeds, is_alone = "embed" in methods, methods == ["embed"]
    size: object = getattr(model, "max_batch_size", DEFAULT_MAX_BATCH_SIZE if embeds else 0)
    if type(size) is not int or size < 0:
        raise BadHint(f"{model.__qualname__}: max_batch_size must be an integer of at least 0, not {size!r}")
    configured = config.as_dict()["max_batch_size"]
    config.set_max_batch_size(configured if 0 < configured < size else size)
    names = [] if is_alone else [REQUEST]
    names += [FILE] * ("transcribe" in methods) + [TEXTS] * embeds
    for name in names:
        is_optional = len(names) > 1
        config.add_input({"name": name, "data_type": "TYPE_STRING", "dims": [1], "optional": is_optional})
    for method in methods:
        if method in _OUTPUTS:
            output = {"name": _OUTPUTS[method], "data_type": "TYPE_STRING", "dims": [1]}
        else:
            output = {"name": EMBEDDING, "data_type": "TYPE_FP32", "dims": [-1]}
        config.add_output(output)
    if not is_alone:
        config.set_model_transaction_policy({"decoupled": True})
    if size and "sequence_batching" not in config.as_dict():
        config.set_dynamic_batching()
    return config


class _Ask:
    """Is one request on its way: what the model gets, and where its pieces go."""

    __slots__ = ("_output", "_shape", "reply", "request")

    def __init__(self, request: OpenAIRequest, reply: Reply, output: str, shape: tuple[int, ...]):
        self.request = request
        self.reply = reply
        self._output = output
        self._shape = shape

    def send(self, piece: object) -> None:
        """Send a piece. Raises TypeError and ValueError for one that cannot travel."""
        text = encoded(piece)
        wire = np.frombuffer(len(text).to_bytes(4, "little") + text, np.uint8)
        self.reply.send(InferenceResponse([Tensor.from_wire(self._output, BYTES, self._shape, wire)]), final=False)

    def fail(self, error: BaseException, name: str) -> None:
        """End the request with an error, and log it if the model is to blame."""
        if self.reply.is_cancelled:
            self.reply.finish(_failure("the client has left", TritonError.CANCELLED))
        elif isinstance(error, BadRequest):
            text = str(error) if error.param is None else f"{error.param}: {error}"
            self.reply.finish(_failure(text, TritonError.INVALID_ARG))
        else:
            text = f"model '{name}' failed to answer: {describe(error)}"
            logger.Logger.log_error(f"{text}\n{traceback_of(error)}")
            self.reply.finish(_failure(text, TritonError.INTERNAL))

    def end(self) -> None:
        """Tell that the last piece was sent."""
        if not self.reply.is_closed:
            self.reply.send(None, final=True)


def _failure(text: str, code: Any) -> InferenceResponse:
    return InferenceResponse(error=TritonError(text, code))


class OpenAIAdapter(ClassAdapter):
    """Runs one instance of a class with methods of OpenAI's API. `config` is the complete configuration."""

    def __init__(self, model: type, config: Json) -> None:
        super().__init__(model, config)
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._methods = {_OUTPUTS[name]: name for name in methods_of(model) if name in _OUTPUTS}

    def execute(
        self, requests: Sequence[InferenceRequest]
    ) -> list[InferenceResponse] | Coroutine[Any, Any, None] | None:
        """Answer the requests, or return the coroutine that will. Raises only what ends a process."""
        texts = [each for each in requests if EMBEDDING in each._requested_output_names]
        if not self._is_decoupled:
            return self._embed(texts)
        for request, response in zip(texts, self._embed(texts)):
            request.reply().finish(response)
        later: list[Coroutine[Any, Any, None]] = []
        for request in requests:
            if EMBEDDING not in request._requested_output_names:
                ask, method = self._ask(request)
                answer = self._begin(ask, method)
                if answer is not None:
                    later.append(_cancellable(ask, answer))
        return _all(later) if later else None

    def _ask(self, request: InferenceRequest) -> tuple[_Ask, str | None]:
        tensors = {tensor._name: tensor._as_array() for tensor in request._inputs}
        output = next((each for each in request._requested_output_names if each in self._methods), "")
        method = self._methods.get(output)
        reply = request.reply()
        how: dict[str, Any] = {
            "request_id": request.request_id(),
            "is_cancelled": lambda: reply.is_cancelled,
            "parameters": request._details.parameters,
        }
        body = _only(tensors, REQUEST)
        made = KINDS.get(method or "", OpenAIRequest)(body, **how)
        if isinstance(made, TranscriptionRequest):
            made.file = _only(tensors, FILE)
        return _Ask(made, reply, output, (1, 1) if self.is_batched else (1,)), method

    def _begin(self, ask: _Ask, method: str | None) -> Coroutine[Any, Any, None] | None:
        """Call the method. Answers at once, or returns the coroutine that does."""
        try:
            if method is None:
                raise BadRequest(f"ask for one of the outputs {', '.join(self._methods)}")
            returned = getattr(self._object, method)(ask.request)
            if inspect.isasyncgen(returned) or hasattr(returned, "__aiter__"):
                return self._stream(ask, returned)
            if inspect.iscoroutine(returned):
                return self._await(ask, returned, method)
            for piece in _pieces(returned, method):
                if ask.reply.is_cancelled:
                    close = getattr(returned, "close", None)
                    if close is not None:
                        close()
                    break
                ask.send(piece)
            ask.end()
        except BaseException as error:  # a model may raise anything, SystemExit included
            ask.fail(error, self._name)
        return None

    async def _stream(self, ask: _Ask, pieces: AsyncIterator[object]) -> None:
        try:
            try:
                async for piece in pieces:
                    ask.send(piece)
                    if ask.reply.is_cancelled:
                        break
            finally:
                close = getattr(pieces, "aclose", None)
                if close is not None:
                    await close()
            ask.end()
        except BaseException as error:
            ask.fail(error, self._name)

    async def _await(self, ask: _Ask, coroutine: Coroutine[Any, Any, object], method: str) -> None:
        try:
            for piece in _pieces(await coroutine, method):
                ask.send(piece)
            ask.end()
        except BaseException as error:
            ask.fail(error, self._name)

    # Texts

    def _embed(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Return the embeddings of all texts, which the model gets in one call. An error is that of all requests."""
        if not requests:
            return []
        try:
            arrays = [_texts(request) for request in requests]
            texts = [_text(each) for each in joined(arrays).reshape(-1)]
            given, tokens = self._object.embed(texts), None
            # Not the rows of two texts.
            if type(given) is tuple and len(given) == 2 and np.ndim(given[0]) == 2:
                given, tokens = given
            rows = np.asarray(given)
            if rows.ndim != 2 or len(rows) != len(texts) or rows.dtype.kind not in "fiu":
                raise InvalidReturn(
                    f"embed returned {rows.dtype} of shape {list(rows.shape)} for {len(texts)} texts, and must return "
                    f"numbers of the shape [{len(texts)}, size of an embedding]"
                )
            rows = np.ascontiguousarray(rows, np.float32)
            counts = [len(array) if self.is_batched else array.size for array in arrays]
            pieces = cut(rows, counts) if self.is_batched else [rows[0]]
            told = [{}] * len(pieces) if tokens is None else _sums(tokens, counts)
            return [
                InferenceResponse([Tensor(EMBEDDING, each)], parameters=parameters)
                for each, parameters in zip(pieces, told)
            ]
        except BadRequest as error:
            return [_failure(str(error), TritonError.INVALID_ARG) for _ in requests]
        except BaseException as error:  # a model may raise anything, SystemExit included
            text = f"model '{self._name}' failed to embed: {describe(error)}"
            logger.Logger.log_error(f"{text}\n{traceback_of(error)}")
            return [_failure(text, TritonError.INTERNAL) for _ in requests]


def _sums(tokens: Any, counts: Sequence[int]) -> list[dict[str, int]]:
    """Return the parameters that tell the tokens of each request. Raises InvalidReturn."""
    array = np.asarray(tokens)
    if array.shape != (sum(counts),) or array.dtype.kind not in "iu":
        raise InvalidReturn(
            f"embed returned {array.dtype} of shape {list(array.shape)} as the numbers of tokens, and must return an "
            f"integer for each of {sum(counts)} texts"
        )
    return [{PROMPT_TOKENS: int(each.sum())} for each in cut(array, counts)]


def _pieces(returned: Any, method: str) -> Iterable[object]:
    """Return the pieces of what a method returned: one thing, or many of them."""
    if method == "rerank":
        return ({"scores": [float(score) for score in returned]},)
    if isinstance(returned, (str, Mapping)) or not isinstance(returned, Iterable):
        return (returned,)
    return returned


def _only(tensors: Mapping[str, Any], name: str) -> bytes:
    array = tensors.get(name)
    if array is None or array.size != 1:
        return b""
    value = array.reshape(-1)[0]
    return value if isinstance(value, bytes) else bytes(str(value), "utf-8")


def _texts(request: InferenceRequest) -> Any:
    for tensor in request._inputs:
        if tensor._name == TEXTS:
            return tensor._as_array()
    raise BadRequest(f"the input '{TEXTS}' is missing", TEXTS)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


async def _all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    import asyncio

    if len(coroutines) == 1:
        await coroutines[0]
    else:
        await asyncio.gather(*coroutines)


async def _cancellable(ask: _Ask, answer: Coroutine[Any, Any, None]) -> None:
    """Run an answer in this task, which is cancelled when the client leaves."""
    import asyncio

    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())
    ask.reply.when_cancelled(lambda: _cancel(loop, task))
    try:
        await answer
    except asyncio.CancelledError:
        if not ask.reply.is_closed:
            ask.fail(asyncio.CancelledError(), "")


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed, at the end of the process
        loop.call_soon_threadsafe(task.cancel)
