"""Chats of models of Triton's kind: the text that a chat template makes of messages, in the model's own process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.http.serving import Serving
from tests.server.openai.test_conventions import DECOUPLED, TRTLLM, WHOLE, vllm
from tests.server.openai.test_texts import CHAT, COMPLETIONS, chunks

import moonpool
from moonpool import testing

MODEL = Path(__file__).parents[2] / "models" / "generator.py"
KEY = "MOONPOOL_CHAT_TEMPLATE"
TEMPLATE = """\
{%- if tools %}{{ tools | map(attribute="function.name") | join(",") }} {{ tool_choice }}|{% endif %}
{%- for message in messages %}
    {%- if message.content == "fails" %}{{ raise_exception("only answers, please") }}{% endif %}
    {%- if message.content == "floods" %}{% for _ in range(99999) %}{{ "x" * 1000 }}{% endfor %}{% endif %}
    {%- if message.content == "nobody says this" %}{{ 9 ** 9 ** 9 ** 9 }}{{ "x" | center(99999999999) }}{% endif %}
    {%- if message.content == "breaks out" %}{{ ().__class__.__base__.__subclasses__() }}{% endif %}
    {{- "<" + message.role + ">" }}
    {%- if message.role == "assistant" %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or () %}{{ call.function.arguments.city }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
{%- if mood is defined %}{{ mood | tojson }}{% endif %}"""
JOINED = {"max_queue_delay_microseconds": 60_000_000, "preferred_batch_size": [3]}
TOKENIZER = {"bos_token": {"content": "[BOS]"}, "eos_token": "[EOS]", "model_max_length": 1}


def write_model(folder: Path, **files: str) -> str:
    (folder / "1").mkdir(parents=True)
    shutil.copy(MODEL, folder / "1" / "model.py")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    room = tmp_path_factory.mktemp("models")
    plain = write_model(room / "plain", chat_template__jinja=TEMPLATE)
    tokens = json.dumps({**TOKENIZER, "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"})
    tokenizer = write_model(room / "tokenizer", tokenizer_config__json=tokens)
    several = json.dumps(
        {"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}
    )
    configs: dict[str, tuple[str, dict[str, Any], str | None]] = {
        "flat": (plain, vllm(1, **DECOUPLED), "chat_template.jinja"),
        "deep": (plain, vllm(1, 1, **DECOUPLED), "chat_template.jinja"),
        "batched": (plain, vllm(1, max_batch_size=4, dynamic_batching={}, **WHOLE), "chat_template.jinja"),
        "joined": (plain, vllm(1, max_batch_size=3, dynamic_batching=JOINED, **WHOLE), "chat_template.jinja"),
        "trtllm": (plain, TRTLLM, "chat_template.jinja"),
        "tokens": (tokenizer, TRTLLM, "tokenizer_config.json"),
        "several": (write_model(room / "several", tokenizer_config__json=several), TRTLLM, "tokenizer_config.json"),
        "operators": (write_model(room / "bare"), TRTLLM, tokenizer),
        "without": (plain, TRTLLM, None),
    }
    with moonpool.Runtime() as runtime:
        for name, (folder, config, template) in configs.items():
            runtime.load(name, folder, config=config, options={} if template is None else {KEY: template})
        with Serving(runtime) as made:
            yield made


def ask(serving: Serving, model: str, *messages: dict[str, Any] | str, **fields: Any) -> Any:
    said = [each if isinstance(each, dict) else {"role": "user", "content": each} for each in messages]
    return serving.post(CHAT, {"model": model, "messages": said, **fields})


def told(reply: Any) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.value["choices"][0]["message"]["content"])
    return found


@pytest.mark.promise("OpenAI", "A model of Triton's kind with a chat template answers chats, and sees a text alone.")
@pytest.mark.parametrize(("model", "shape"), [("flat", [1]), ("deep", [1, 1]), ("batched", [1, 1]), ("trtllm", [1, 1])])
def test_a_chat_becomes_a_text(serving: Serving, model: str, shape: list[int]) -> None:
    given = told(ask(serving, model, {"role": "system", "content": "Be kind."}, "hi", max_tokens=7))

    assert given["text_input"] == [shape, ["<system>Be kind.<user>hi<assistant>"]]
    assert "messages" not in given


def test_a_chat_streams(serving: Serving) -> None:
    found = chunks(ask(serving, "flat", "hi", stream=True, stream_options={"include_usage": True}).body)

    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in found if each["choices"])
    assert json.loads(text)["text_input"][1] == ["<user>hi<assistant>"]
    assert found[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def test_tools_calls_parts_and_variables_reach_the_template(serving: Serving) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": parts}]
    fields = {"chat_template_kwargs": {"mood": "<"}, "add_generation_prompt": False}
    given = told(ask(serving, "flat", *messages, tools=tools, tool_choice="auto", **fields))

    assert given["text_input"][1] == ['weather,time auto|<assistant>Bern<user>a\nb"<"']
    assert not {"tools", "tool_choice", "chat_template_kwargs"} & json.loads(given["sampling_parameters"][1][0]).keys()


def test_a_tokenizer_s_file_has_tokens_and_perhaps_several_templates(serving: Serving) -> None:
    assert told(ask(serving, "tokens", "hi"))["text_input"][1] == ["[BOS]hi[EOS]"]
    assert told(ask(serving, "several", "hi"))["text_input"][1] == ["plain"]
    tools = [{"type": "function", "function": {"name": "time"}}]
    assert told(ask(serving, "several", "hi", tools=tools))["text_input"][1] == ["tools"]


def test_the_operator_s_folder_serves_a_model_without_a_template(serving: Serving) -> None:
    assert told(ask(serving, "operators", "hi"))["text_input"][1] == ["[BOS]hi[EOS]"]


@pytest.mark.promise("OpenAI", "A template that fails is an error of its request alone.")
@pytest.mark.parametrize("model", ["flat", "batched"])
@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("fails", "the chat template failed: only answers, please"),
        ("floods", "it wrote more than 16777216 bytes"),
        ("breaks out", "SecurityError"),
    ],
)
def test_a_template_that_fails_is_an_error_of_its_request(serving: Serving, model: str, said: str, text: str) -> None:
    reply = ask(serving, model, said)

    assert reply.status == 400
    assert text in reply.value["error"]["message"]
    assert told(ask(serving, model, "hi"))["text_input"][1] == ["<user>hi<assistant>"]


def test_a_batch_goes_on_without_the_request_whose_template_failed(serving: Serving) -> None:
    """The batch waits for three requests."""
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(partial(ask, serving, "joined"), ("one", "fails", "two")))

    assert [reply.status for reply in replies] == [200, 400, 200]
    assert [told(reply)["text_input"][1] for reply in replies[::2]] == [
        [f"<user>{said}<assistant>"] for said in ("one", "two")
    ]
    stats = serving.get("/v2/models/joined/stats").value["model_stats"][0]
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in stats["batch_stats"]] == [(3, 1)]


def test_a_chat_without_a_template_says_what_is_missing(serving: Serving) -> None:
    reply = ask(serving, "without", "hi")

    assert reply.status == 500
    assert reply.value["error"]["message"].startswith("Unknown tokenizer")
    assert KEY in reply.value["error"]["message"]
    assert reply.value["detail"] == "Unknown tokenizer"
    assert serving.post(COMPLETIONS, {"model": "without", "prompt": "hi"}).status == 200


def test_completions_of_a_model_with_a_template_are_as_before(serving: Serving) -> None:
    text = serving.post(COMPLETIONS, {"model": "flat", "prompt": "hi"}).value["choices"][0]["text"]

    assert json.loads(text)["text_input"][1] == ["hi"]


def test_a_forced_tool_gives_the_schema_to_the_model_and_its_answer_to_the_call(serving: Serving) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "weather"}}
    message = ask(serving, "flat", "hi", tools=tools, tool_choice=named).value["choices"][0]["message"]

    call = message["tool_calls"][0]["function"]
    assert (message["content"], call["name"]) == (None, "weather")
    sampling = json.loads(json.loads(call["arguments"])["sampling_parameters"][1][0])
    assert json.loads(json.loads(sampling["structured_outputs"])["json"]) == schema


@pytest.mark.parametrize(
    "options",
    [
        {"MOONPOOL_SANDBOX": "strict"},
        {"MOONPOOL_PREFORK": "imports"},
        {"MOONPOOL_PREFORK": "initialize"},
        {"MOONPOOL_INSTANCES_PER_PROCESS": "2"},
    ],
)
def test_a_template_is_there_however_the_process_is_made(tmp_path: Path, options: dict[str, str]) -> None:
    folder = write_model(tmp_path / "m", chat_template__jinja=TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]

    with moonpool.Runtime() as runtime:
        runtime.load("m", folder, config=TRTLLM, options={KEY: "chat_template.jinja", **options})
        answer = runtime.chat("m", messages)

    assert json.loads(answer["choices"][0]["message"]["content"])["text_input"][1] == ["<user>hi<assistant>"]


def test_tests_of_models_have_chats_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", chat_template__jinja="<{{ messages[0].content }}>")
    asked = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    inputs = {
        "text_input": np.array([[b""]], np.object_),
        "messages": np.array([[asked.encode()]], np.object_),
        "max_tokens": np.array([[1]], np.int32),
    }
    config = {**TRTLLM, "parameters": {KEY: {"string_value": "chat_template.jinja"}}}

    with testing.load(folder, config=config) as model:
        answered = json.loads(model.infer(inputs)["text_output"].reshape(-1)[0])

    assert answered["text_input"][1] == ["<hi>"]


@pytest.mark.parametrize(
    ("template", "text"), [("{% for %}", "cannot read the chat template"), (None, "cannot read chat_template.jinja")]
)
def test_a_template_that_cannot_be_read_fails_the_load(tmp_path: Path, template: str | None, text: str) -> None:
    folder = write_model(tmp_path / "m", **({} if template is None else {"chat_template__jinja": template}))

    with moonpool.Runtime() as runtime, pytest.raises(moonpool.MoonpoolError, match=text):
        runtime.load("m", folder, config=TRTLLM, options={KEY: "chat_template.jinja"})


@pytest.mark.parametrize("path", ["../secret.jinja", "link.jinja"])
def test_a_template_in_the_model_s_folder_must_not_lead_out_of_it(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.jinja").write_text("secret")
    folder = write_model(tmp_path / "m")
    (tmp_path / "m" / "link.jinja").symlink_to(tmp_path / "secret.jinja")

    with moonpool.Runtime() as runtime, pytest.raises(moonpool.MoonpoolError, match="outside of"):
        runtime.load("m", folder, config=TRTLLM, options={KEY: path})


def test_a_model_at_strict_gets_no_file_of_others_by_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "secret.jinja").write_text("secret")
    folder = write_model(tmp_path / "m")
    config = {**TRTLLM, "parameters": {KEY: str(tmp_path / "secret.jinja")}}

    with (
        moonpool.Runtime(sandbox="strict") as runtime,
        pytest.raises(moonpool.MoonpoolError, match="cannot give it the file"),
    ):
        runtime.load("m", folder, config=config)
