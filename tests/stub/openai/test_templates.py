"""Chat templates as models have them, without a server."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import pytest

from moonpool.stub.openai.templates import BadTemplate, ChatTemplate
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor


def test_without_jinja_the_load_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(BadTemplate, match="install jinja2"):
        ChatTemplate("{{ messages }}", "")


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        ("{}", "there is no chat_template"),
        ("[]", "holds an object"),
        ("nothing", "JSONDecodeError"),
        ('{"chat_template": [{"name": "odd", "template": ""}]}', "there is no chat_template"),
    ],
)
def test_a_file_without_a_template_is_refused(tokenizer: str, text: str) -> None:
    with pytest.raises(BadTemplate, match=text):
        ChatTemplate("", tokenizer)


@pytest.mark.parametrize("body", ["[]", "{}", '{"messages": 1}', "[" * 100_000])
def test_a_body_without_messages_is_refused(body: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        ChatTemplate("{{ messages }}", "").render(body.encode())


def test_loops_may_be_left_and_the_date_is_there() -> None:
    template = '{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ strftime_now("%Y") | length }}'
    messages = [{"role": "user", "content": "é"}, {"role": "user", "content": "b"}]

    assert ChatTemplate(template, "").render(json.dumps({"messages": messages}).encode()) == "é4".encode()


def request(said: str) -> InferenceRequest:
    body = json.dumps({"messages": [{"role": "user", "content": said}]})
    tensors = [Tensor("messages", np.array([body.encode()], np.object_))]
    return InferenceRequest(inputs=tensors, requested_output_names=["text_output"], model_name="m")


def test_a_coroutine_gets_the_texts_too() -> None:
    async def execute(requests: list[InferenceRequest]) -> object:
        return [each.inputs()[0].as_numpy()[0] for each in requests]

    returned: Any = ChatTemplate("<{{ messages[0].content }}>", "").before(execute)([request("a"), request("b")])

    assert asyncio.run(returned) == [b"<a>", b"<b>"]
