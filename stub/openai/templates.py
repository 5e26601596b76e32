"""Renders the messages of a chat by a chat template, into the text that a model of Triton's kind goes on with.

A request for a chat has the input `messages`, a JSON object with the fields of OpenAI's API that concern the text:
`messages`, `tools`, `tool_choice`, `documents`, `add_generation_prompt` and `chat_template_kwargs`. It becomes the
input `text_input` before `execute` sees the request, so the model knows nothing of chats.

A template is a program that came with somebody's weights. So it runs here, where the model's own code runs, and in
Jinja's immutable sandbox, with the functions and variables that transformers gives it. Its time is that of the batch.
An error of a template is that of its request alone: the model gets the batch without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import CoroutineType
from typing import Any

import numpy as np

from moonpool.stub.pb_utils.errors import TritonError
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

MESSAGES, TEXT_INPUT = "messages", "text_input"
MOST_RENDERED_BYTES = 16 << 20
"""A template that writes more fails."""
_FIELDS = ("documents", "tool_choice", "tools")
Execute = Callable[["list[InferenceRequest]"], object]


class BadTemplate(Exception):
    """A chat template that cannot be used, and why."""


class ChatTemplate:
    """Holds the compiled templates of a model. For any thread."""

    def __init__(self, template: str, tokenizer: str) -> None:
        """Take the text of a template, or "", and that of a `tokenizer_config.json`, or "". Raises `BadTemplate`."""
        try:
            settings = json.loads(tokenizer) if tokenizer else {}
            if not isinstance(settings, dict):
                raise ValueError("a tokenizer_config.json holds an object")
            self._tokens = _tokens_in(settings)
            named = {"default": template} if template else _templates_in(settings)
            environment = _environment()
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except ImportError:
            raise BadTemplate(
                "the model has a chat template (MOONPOOL_CHAT_TEMPLATE), and its interpreter lacks jinja2, which "
                "renders it: install jinja2 there"
            ) from None
        except Exception as error:  # a template is a stranger's
            raise BadTemplate(f"cannot read the chat template: {_text_of(error)}") from None

    def render(self, body: bytes) -> bytes:
        """Return the text for the fields of a chat, in JSON. Raises what the template raises, and ValueError."""
        fields = json.loads(body)
        if not isinstance(fields, dict) or not isinstance(fields.get("messages"), list):
            raise ValueError(f"the input '{MESSAGES}' must be a JSON object with a list of messages")
        tools = fields.get("tools")
        template = self._templates.get("tool_use" if tools else "default") or self._templates["default"]
        more = fields.get("chat_template_kwargs")
        variables = {
            **self._tokens,
            "add_generation_prompt": fields.get("add_generation_prompt", True),
            **(more if isinstance(more, dict) else {}),
            **{name: fields.get(name) for name in _FIELDS},
            "messages": [_prepared(message) for message in fields["messages"]],
        }
        parts, size_bytes = [], 0
        for part in template.generate(variables):
            parts.append(part.encode("utf-8", "replace"))
            size_bytes += len(parts[-1])
            if size_bytes > MOST_RENDERED_BYTES:
                raise ValueError(f"it wrote more than {MOST_RENDERED_BYTES} bytes")
        return b"".join(parts)

    def before(self, execute: Execute) -> Execute:
        """Return a function that renders the chats of a batch, and then calls the model's `execute`."""

        def execute_rendered(requests: list[InferenceRequest]) -> object:
            failed = {place for place, request in enumerate(requests) if not self._rendered(request)}
            if not failed:
                return execute(requests)
            rest = [request for place, request in enumerate(requests) if place not in failed]
            returned = execute(rest) if rest else None
            if type(returned) is CoroutineType:
                return _awaited(returned, failed, len(requests))
            return _with_gaps(returned, failed, len(requests))

        return execute_rendered

    def _rendered(self, request: InferenceRequest) -> bool:
        """Put the text of a chat into a request. Answers the request and returns False if the template fails."""
        asked = next((tensor for tensor in request._inputs if tensor._name == MESSAGES), None)
        if asked is None:
            return True
        try:
            given = asked._as_array()
            texts = np.empty(given.shape, np.object_)
            for place, body in np.ndenumerate(given):
                texts[place] = self.render(body)
        except Exception as error:  # a template may raise anything
            text = f"the chat template failed: {_text_of(error)}"
            failure = InferenceResponse(error=TritonError(text, TritonError.INVALID_ARG))
            request.reply().finish(failure)
            return False
        kept = [tensor for tensor in request._inputs if tensor._name not in (MESSAGES, TEXT_INPUT)]
        request._inputs = [Tensor(TEXT_INPUT, texts), *kept]
        return True


def _with_gaps(returned: object, failed: set[int], count: int) -> object:
    """Return what the model returned, with nothing for the requests that it did not get."""
    if not isinstance(returned, list) or len(returned) != count - len(failed):
        return returned
    responses = iter(returned)
    return [None if place in failed else next(responses) for place in range(count)]


async def _awaited(coroutine: Coroutine[Any, Any, object], failed: set[int], count: int) -> object:
    return _with_gaps(await coroutine, failed, count)


def _text_of(error: BaseException) -> str:
    """Return an error of a template for a client. Those of Jinja say all in their text."""
    name = type(error).__name__
    return str(error) if name in ("TemplateError", "ValueError") and str(error) else f"{name}: {error}"


def _prepared(message: Any) -> Any:
    """Return a message as templates expect it: parts that are all texts as one, and arguments of calls as objects."""
    if not isinstance(message, dict):
        return message
    content, calls = message.get("content"), message.get("tool_calls")
    made = dict(message)
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        made["content"] = "\n".join(part["text"] for part in content)
    if isinstance(calls, list):
        made["tool_calls"] = [_parsed_call(call) for call in calls]
    return made


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _tokens_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a `tokenizer_config.json`, which are texts or objects with a text."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _templates_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a `tokenizer_config.json` by name. Raises ValueError if it has none."""
    given = settings.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    named = {each["name"]: each["template"] for each in given} if isinstance(given, list) else {}
    if "default" not in named:
        raise ValueError("there is no chat_template in it")
    return named


def _environment() -> Any:
    """Return Jinja's environment as transformers has it. Raises ImportError."""
    from jinja2 import TemplateError, nodes, pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads `{% generation %}`, which marks the assistant's part for training."""

        tags = {"generation"}  # noqa: RUF012 - as in Extension

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    @pass_context
    def as_it_is(_: object, value: object) -> object:
        return value

    # Without `optimized`, and with a `finalize` that wants the context, Jinja computes no expression of constants when
    # the model starts. One may take for ever; then that is a request's time, which has a deadline.
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=as_it_is, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
