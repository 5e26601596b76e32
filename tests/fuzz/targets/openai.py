"""Fuzz targets for OpenAI's API: requests of clients, chats that a template renders, and pieces of models."""

from __future__ import annotations

from typing import Any

import orjson
from tests.runtime.recorder import tensor

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.openai.answers import CHAT, COMPLETION, TextAnswer
from moonpool.runtime.openai.conventions import endpoints_of
from moonpool.runtime.openai.fields import check_chat, check_completion, check_embeddings, check_rerank
from moonpool.runtime.openai.pieces import piece_of
from moonpool.stub.openai.templates import ChatTemplate


class _Model:
    """Stands in for a model that is loaded."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config


def _endpoints(*inputs: dict[str, Any]) -> Any:
    texts = [tensor("text_input", "STRING", 1), {**tensor("messages", "STRING", 1), "optional": True}]
    raw = {
        "name": "m",
        "backend": "any",
        "input": [*texts, *({**each, "optional": True} for each in inputs)],
        "output": [tensor("text_output", "STRING", 1), tensor("logprobs", "STRING", 1)],
    }
    model: Any = _Model(ModelConfig.from_dict(raw))
    return endpoints_of(model)


_CONVENTIONS = (
    _endpoints(tensor("sampling_parameters", "STRING", 1), tensor("return_logprobs", "BOOL", 1)),
    _endpoints(
        tensor("max_tokens", "INT32", 1),
        tensor("seed", "UINT64", 1),
        tensor("temperature", "FP32", 1),
        tensor("stop_words", "STRING", -1),
        tensor("guided_decoding_guide", "STRING", 1),
        tensor("guided_decoding_guide_type", "STRING", 1),
    ),
)
_TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}", "")


def openai_request(data: bytes) -> None:
    """Check a body as each endpoint does, and make the tensors of models of Triton's kind."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    if not isinstance(fields, dict):
        return
    for check, method in (
        (check_chat, "chat"),
        (check_completion, "complete"),
        (check_embeddings, ""),
        (check_rerank, ""),
    ):
        try:
            check(fields)
            for endpoints in _CONVENTIONS if method else ():
                endpoints.texts[method].inputs(fields, data)
                endpoints.texts[method].reader(fields)
        except InvalidRequest as error:
            str(error)


def chat_template(data: bytes) -> None:
    """Render a chat; what a template raises is an error of its request."""
    try:
        _TEMPLATE.render(data)
    except Exception as error:
        str(error)


def openai_piece(data: bytes) -> None:
    """Read pieces, one a line, into an answer that is streamed and one that is whole."""
    for kind in (CHAT, COMPLETION):
        streamed, whole = (TextAnswer(kind, "1", {"model": "m", "n": 2}) for _ in range(2))
        try:
            for line in data.split(b"\n"):
                piece = piece_of(memoryview(line), "m")
                orjson.dumps(streamed.chunks(piece, 0))
                whole.add(piece_of(memoryview(line), "m"), 0)
            whole.end(0)
            orjson.dumps([streamed.end_chunks(0), whole.whole()])
        except (ModelError, orjson.JSONEncodeError) as error:
            str(error)
