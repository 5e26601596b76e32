"""Models of Triton's kind behind OpenAI's API: the tensors that they get, by their configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.http.served import tensor
from tests.server.http.serving import Serving
from tests.server.openai.test_texts import COMPLETIONS, chunks

import moonpool

MODEL = Path(__file__).parents[2] / "models" / "generator.py"
TOLD = MODEL.with_name("told_tensors.py")
FLAGS = ("stream", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
COUNTS = ("num_input_tokens", "num_output_tokens")
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}
WHOLE = {"model_transaction_policy": {"decoupled": False}}


def vllm(*dims: int, **more: Any) -> dict[str, Any]:
    return {
        "input": [
            tensor("text_input", "STRING", *dims),
            *(tensor(name, "BOOL", *dims, optional=True) for name in (*FLAGS, "return_logprobs")),
            tensor("sampling_parameters", "STRING", *dims, optional=True),
        ],
        "output": [
            tensor("text_output", "STRING", *(-1 for _ in dims)),
            tensor("logprobs", "STRING", *(-1 for _ in dims)),
            *(tensor(name, "UINT32", *(-1 for _ in dims)) for name in COUNTS),
        ],
        **more,
    }


TRTLLM: dict[str, Any] = {
    "input": [
        tensor("text_input", "STRING", 1),
        tensor("max_tokens", "INT32", 1),
        tensor("stop_words", "STRING", -1, optional=True),
        *(tensor(name, "FP32", 1, optional=True) for name in ("temperature", "top_p")),
        *(tensor(f"guided_decoding_guide{part}", "STRING", 1, optional=True) for part in ("", "_type")),
        tensor("min_tokens", "INT32", 1, optional=True),
        tensor("seed", "UINT64", 1, optional=True),
        tensor("stream", "BOOL", 1, optional=True),
    ],
    "output": [tensor("text_output", "STRING", -1), *(tensor(name, "UINT32", -1) for name in COUNTS)],
    "max_batch_size": 8,
    **WHOLE,
}
EMBEDS: dict[str, Any] = {
    "input": [tensor("embedding_request", "STRING", 1), tensor("return_num_input_tokens", "BOOL", 1, optional=True)],
    "output": [tensor("text_output", "STRING", 1), tensor("num_input_tokens", "UINT32", 1)],
    **WHOLE,
}
HOSTILE: dict[str, Any] = {
    "input": [tensor("text_input", "STRING", 1), tensor("sampling_parameters", "STRING", 1, optional=True)],
    "output": [
        *(tensor(name, "STRING", 1) for name in ("text_output", "logprobs")),
        *(tensor(name, "UINT64", 1) for name in COUNTS),
    ],
    **DECOUPLED,
}
HOSTILE_EMBEDS: dict[str, Any] = {
    "input": [tensor("embedding_request", "STRING", 1)],
    "output": [tensor("text_output", "STRING", 1), tensor("num_input_tokens", "FP32", 1)],
    **DECOUPLED,
}
NEEDS_MORE = {**TRTLLM, "input": [*TRTLLM["input"], tensor("odd", "FP32", 1)]}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    configs = {
        "flat": vllm(1, **DECOUPLED),
        "deep": vllm(1, 1, **DECOUPLED),
        "batched": vllm(1, max_batch_size=4, dynamic_batching={}, **WHOLE),
        "trtllm": TRTLLM,
        "embeds": EMBEDS,
        "needs_more": NEEDS_MORE,
    }
    with moonpool.Runtime() as runtime:
        for name, config in configs.items():
            runtime.load(name, str(MODEL), config=config)
        runtime.load("hostile", str(TOLD), config=HOSTILE)
        runtime.load("hostile_embeds", str(TOLD), config=HOSTILE_EMBEDS)
        with Serving(runtime) as made:
            yield made


def ask(serving: Serving, model: str, **fields: Any) -> Any:
    return serving.post(COMPLETIONS, {"model": model, "prompt": "hi", **fields})


@pytest.mark.promise("OpenAI", "Tensors of vLLM's and TensorRT-LLM's conventions are recognised by name and rank.")
@pytest.mark.parametrize(("model", "shape"), [("flat", [1]), ("deep", [1, 1]), ("batched", [1, 1])])
def test_vllms_tensors_have_the_rank_of_the_configuration(serving: Serving, model: str, shape: list[int]) -> None:
    fields = {"temperature": 0.5, "stop": ["x"], "max_tokens": 7, "odd": 1, "echo": True, "user": "me"}
    answer = ask(serving, model, **fields).value
    told = json.loads(answer["choices"][0]["text"])

    assert {name: value[0] for name, value in told.items()} == dict.fromkeys(told, shape)
    assert told["text_input"][1] == ["hi"]
    assert {name: told[name][1] for name in FLAGS} == {
        "stream": [False],
        "exclude_input_in_output": [False],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }
    sampling = json.loads(told["sampling_parameters"][1][0])
    assert sampling == {"temperature": 0.5, "stop": ["x"], "max_tokens": 7, "odd": 1}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


@pytest.mark.promise("OpenAI", "Tensors of vLLM's and TensorRT-LLM's conventions are …")
def test_tensorrt_llms_settings_are_tensors_of_their_own(serving: Serving) -> None:
    told = json.loads(ask(serving, "trtllm", stop=["x", "y"], seed=5, top_p=0.5).value["choices"][0]["text"])

    assert told == {
        "max_tokens": [[1, 1], [16]],
        "seed": [[1, 1], [5]],
        "stop_words": [[1, 2], ["x", "y"]],
        "stream": [[1, 1], [False]],
        "text_input": [[1, 1], ["hi"]],
        "top_p": [[1, 1], [0.5]],
    }


@pytest.mark.parametrize(
    ("wanted", "kind", "guide"),
    [
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}, "json_schema", "array"),
        ({"type": "json_object"}, "json", None),
        ({"type": "text"}, None, None),
    ],
)
def test_the_form_of_the_answer_is_a_guide(
    serving: Serving, wanted: dict[str, Any], kind: str | None, guide: str | None
) -> None:
    fields = {"response_format": wanted, "min_tokens": 3}
    told = json.loads(ask(serving, "trtllm", **fields).value["choices"][0]["text"])
    vllms = json.loads(ask(serving, "flat", **fields).value["choices"][0]["text"])

    assert told["min_tokens"] == [[1, 1], [3]]
    assert told.get("guided_decoding_guide_type") == (None if kind is None else [[1, 1], [kind]])
    assert told.get("guided_decoding_guide") == (None if guide is None else [[1, 1], [json.dumps({"type": guide})]])
    sampling = json.loads(vllms["sampling_parameters"][1][0])
    assert sampling.keys() == {"max_tokens", "min_tokens", *(["structured_outputs"] if kind else [])}


def test_a_stream_has_the_pieces_and_the_sum_of_tokens(serving: Serving) -> None:
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    found = chunks(ask(serving, "flat", **wanted).body)

    text = "".join(each["choices"][0]["text"] for each in found if each["choices"])
    assert json.loads(text)["stream"][1] == [True]
    assert found[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def test_logprobs_come_in_openais_form(serving: Serving) -> None:
    logprobs = ask(serving, "flat", logprobs=2).value["choices"][0]["logprobs"]

    assert logprobs == {
        "tokens": ["so", "so"],
        "token_logprobs": [-0.5, -0.5],
        "text_offset": [0, 2],
        "top_logprobs": [{"so": -0.5, "no": -2.0}] * 2,
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 2}, "Received n=2, but only single choice (n=1) is currently supported"),
        ({"suffix": "x"}, "suffix is not currently supported"),
        ({"logit_bias": {}}, "logit bias is not supported"),
        ({"best_of": 1}, "best_of is no longer supported in vLLM backend, removed from vLLM V1 engine"),
        ({"prompt": [1, 2]}, "only single string input is supported"),
    ],
)
def test_what_these_models_cannot_do_is_refused(serving: Serving, fields: dict[str, Any], text: str) -> None:
    reply = ask(serving, "flat", **fields)

    error = reply.value["error"]
    assert (reply.status, error["message"], error["param"]) == (400, text, next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"best_of": 2}, "Received best_of=2, but only single choice (best_of=1) is currently supported"),
        ({"logprobs": 1}, "logprobs are currently available only for the vLLM backend"),
    ],
)
def test_what_tensorrt_llms_models_cannot_do_is_refused(serving: Serving, fields: dict[str, Any], text: str) -> None:
    reply = ask(serving, "trtllm", **fields)

    error = reply.value["error"]
    assert (reply.status, error["message"], error["param"]) == (400, text, next(iter(fields)))


@pytest.mark.parametrize("odd", [5, "x", [], {}, {"type": 1}, {"type": "json_schema", "json_schema": 1}])
@pytest.mark.parametrize("model", ["flat", "trtllm"])
def test_odd_forms_of_an_answer_are_none(serving: Serving, model: str, odd: object) -> None:
    told = json.loads(ask(serving, model, response_format=odd, tool_choice=odd).value["choices"][0]["text"])

    assert "guide" not in json.dumps(told)
    assert "structured_outputs" not in json.dumps(told)


def test_a_value_that_does_not_fit_its_tensor_is_refused(serving: Serving) -> None:
    reply = ask(serving, "trtllm", seed=-1)

    assert (reply.status, reply.value["error"]["param"]) == (400, "seed")
    assert "'seed'" in reply.value["error"]["message"]


def test_an_error_of_the_model_is_told(serving: Serving) -> None:
    reply = ask(serving, "flat", prompt="raises")

    assert (reply.status, reply.value["error"]["message"]) == (500, "no idea")


def test_vllms_embeddings(serving: Serving) -> None:
    fields = {"model": "embeds", "input": ["abc", "x"]}
    answer = serving.post("/v1/embeddings", fields).value
    tokens = serving.post("/v1/embeddings", {**fields, "input": [1, 2, 3, 4]}).value

    assert [each["embedding"] for each in answer["data"]] == [[1, 3], [1, 1]]
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [each["embedding"] for each in tokens["data"]] == [[1, 4]]


@pytest.mark.parametrize("model", ["needs_more", "embeds"])
def test_a_model_with_other_required_inputs_has_no_endpoint(serving: Serving, model: str) -> None:
    assert ask(serving, model).value["error"]["code"] == "model_not_found"


# Outputs of a hostile model, behind one that is right.
COUNT = 2**64 - 1
TELLS: dict[str, dict[str, Any]] = {
    "more tokens than there can be": {"num_input_tokens": [COUNT], "num_output_tokens": [COUNT]},
    "logprobs that are none": {"logprobs": ["5"]},
    "a logarithm of many digits": {"logprobs": ['[{"1":{"decoded_token":"a","logprob":%s}}]' % ("9" * 400)]},
    "ranks of two kinds": {
        "logprobs": ['[{"1":{"rank":"x","decoded_token":"a","logprob":1},"2":{"decoded_token":"a","logprob":1}}]']
    },
    "logprobs with very many objects": {"logprobs": ["[%s{}]" % ("{}," * (1 << 18))]},
}


@pytest.mark.promise("OpenAI", "No text of a model …")
@pytest.mark.parametrize("what", TELLS)
def test_a_wrong_tensor_is_the_models_error(serving: Serving, what: str, caplog: pytest.LogCaptureFixture) -> None:
    told = {"prompt": json.dumps([{"text_output": ["good"]}, {"text_output": ["bad"], **TELLS[what]}]), "logprobs": 1}
    whole = ask(serving, "hostile", **told)
    stream = ask(serving, "hostile", **told, stream=True, stream_options={"include_usage": True})

    assert (whole.status, whole.value["error"]["code"]) == (500, "model_error")
    events = [json.loads(each.removeprefix("data: ")) for each in stream.body.decode().split("\n\n")[:-1]]
    assert [each["text"] for each in events[0]["choices"]] == ["good"]
    assert events[-1]["error"]["code"] == "model_error"
    assert "answering" not in caplog.text


@pytest.mark.parametrize(
    "told",
    [
        {"text_output": ["[1, %s]" % ("9" * 400)]},
        {"text_output": ["{}"]},
        {"text_output": ["[1]"], "num_input_tokens": [1e30]},
        {"text_output": ["[1]"], "num_input_tokens": [-1]},
    ],
)
def test_a_wrong_embedding_is_the_models_error(serving: Serving, told: Any, caplog: pytest.LogCaptureFixture) -> None:
    reply = serving.post("/v1/embeddings", {"model": "hostile_embeds", "input": json.dumps([told])})

    assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")
    assert "answering" not in caplog.text


@pytest.mark.promise("OpenAI", "Pieces, answers and what …")
def test_a_large_text_is_refused_unread() -> None:
    # A server of its own: its regions grow.
    with moonpool.Runtime() as runtime:
        runtime.load("hostile", str(TOLD), config=HOSTILE)
        with Serving(runtime) as serving:
            reply = ask(serving, "hostile", prompt=json.dumps([{"text_output": ["x", 9 << 20]}]), stream=True)

    assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")
    assert "8388608 are the most" in reply.value["error"]["message"]


def test_a_token_without_a_text_keeps_its_logprobs(serving: Serving) -> None:
    logprobs = ['[{"1":{"decoded_token":"a","logprob":-1}}]']
    counts = {"num_input_tokens": [1], "num_output_tokens": [1]}
    prompt = json.dumps([{"text_output": [text], "logprobs": logprobs, **counts} for text in ("", "aa")])
    whole = ask(serving, "hostile", prompt=prompt, logprobs=1).value["choices"][0]
    streamed = chunks(ask(serving, "hostile", prompt=prompt, logprobs=1, stream=True).body)

    assert whole["logprobs"]["tokens"] == ["a", "a"]
    assert [each["choices"][0]["logprobs"] is None for each in streamed] == [False, False, True]


def test_a_body_that_is_nested_too_deeply_is_the_clients_mistake(serving: Serving) -> None:
    body = b'{"model":"flat","prompt":"x","odd":%b%b}' % (b"[" * 1000, b"]" * 1000)
    reply = serving.ask("POST", COMPLETIONS, body)

    assert (reply.status, reply.value["error"]["type"]) == (400, "invalid_request_error")
    assert "nested too deeply" in reply.value["error"]["message"]
