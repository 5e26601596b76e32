"""Embeddings and rankings over OpenAI's API."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.http.serving import Serving

import moonpool

WRITER = Path(__file__).parents[2] / "models" / "writer.py"
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with moonpool.Runtime() as runtime:
        runtime.load("writer", str(WRITER))
        with Serving(runtime) as made:
            yield made


def vectors(reply: Any) -> list[list[float]]:
    return [each["embedding"] for each in reply.value["data"]]


@pytest.mark.promise("OpenAI", "A class with `embed` answers `/v1/embeddings`, as floats and as base64.")
def test_each_text_has_its_embedding(serving: Serving) -> None:
    one = serving.post(EMBEDDINGS, {"model": "writer", "input": "abc"})
    two = serving.post(EMBEDDINGS, {"model": "writer", "input": ["abc", "x"]})

    assert vectors(one) == [[3, 1, 0.5, -1]]
    assert vectors(two) == [[3, 2, 0.5, -1], [1, 2, 0.5, -1]]
    assert [each["index"] for each in two.value["data"]] == [0, 1]
    assert (two.value["object"], two.value["data"][0]["object"]) == ("list", "embedding")


@pytest.mark.promise("OpenAI", "A class with `embed` answers `/v1/embeddings`, as floats …")
def test_base64_has_the_bytes_of_float32(serving: Serving) -> None:
    fields = {"model": "writer", "input": ["abc", "x"], "encoding_format": "base64"}

    texts = [each["embedding"] for each in serving.post(EMBEDDINGS, fields).value["data"]]

    rows = [np.frombuffer(base64.b64decode(text), "<f4") for text in texts]
    np.testing.assert_array_equal(rows, [[3, 2, 0.5, -1], [1, 2, 0.5, -1]])


def test_a_model_that_only_embeds_answers_with_its_batch(tmp_path: Path) -> None:
    model = tmp_path / "lengths.py"
    model.write_text(
        "class Lengths:\n"
        "    max_batch_size = 4\n"
        "    def embed(self, texts):\n"
        "        return [[len(each), 1 / len(each)] for each in texts]\n"
    )
    with moonpool.Runtime() as runtime:
        runtime.load("lengths", str(model))
        with Serving(runtime) as serving:
            texts = ["x" * (1 + number % 7) for number in range(50)]
            found = vectors(serving.post(EMBEDDINGS, {"model": "lengths", "input": texts}))
            assert [row[0] for row in found] == [len(text) for text in texts]
            assert vectors(serving.post(EMBEDDINGS, {"model": "lengths", "input": "ab"})) == [[2, 0.5]]


@pytest.mark.parametrize("counts_tokens", [True, False])
def test_a_model_tells_the_tokens_of_its_texts(tmp_path: Path, counts_tokens: bool) -> None:
    model = tmp_path / "lengths.py"
    tokens = ", [len(each) for each in texts]" if counts_tokens else ""
    model.write_text(
        "class Lengths:\n"
        "    max_batch_size = 2\n"
        "    def embed(self, texts):\n"
        f"        return [[len(each), 1.0] for each in texts]{tokens}\n"
    )
    with moonpool.Runtime() as runtime:
        runtime.load("lengths", str(model))
        with Serving(runtime) as serving:
            reply = serving.post(EMBEDDINGS, {"model": "lengths", "input": ["a", "bcd", "ef"]})
    assert [row[0] for row in vectors(reply)] == [1, 3, 2]
    assert reply.value.get("usage") == ({"prompt_tokens": 6, "total_tokens": 6} if counts_tokens else None)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("([[1.0]] * len(texts), [1, 2, 3, 4])", "an integer for each of 1 texts"),
        ("([[1.0]] * len(texts), [0.5])", "an integer for each of 1 texts"),
        ("([[1.0]] * len(texts), [-1])", "'usage' has the counts"),
        ("[[float('nan')]] * len(texts)", "a number that is not finite"),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_model_that_tells_wrong_numbers_fails(tmp_path: Path, returned: str, words: str, encoding: str) -> None:
    model = tmp_path / "wrong.py"
    model.write_text(f"class Wrong:\n    def embed(self, texts):\n        return {returned}\n")
    with moonpool.Runtime() as runtime:
        runtime.load("wrong", str(model))
        with Serving(runtime) as serving:
            reply = serving.post(EMBEDDINGS, {"model": "wrong", "input": "a", "encoding_format": encoding})
    assert reply.status == 500
    assert words in reply.value["error"]["message"]


def test_more_texts_than_the_model_takes_are_several_requests(serving: Serving) -> None:
    texts = [str(number) for number in range(150)]

    found = vectors(serving.post(EMBEDDINGS, {"model": "writer", "input": texts}))

    assert [row[0] for row in found] == [len(text) for text in texts]
    assert max(row[1] for row in found) <= 64


@pytest.mark.promise("OpenAI", "Texts of several clients are embedded together.")
def test_texts_of_several_clients_are_embedded_together(serving: Serving) -> None:
    def ask(number: int) -> float:
        together: float = vectors(serving.post(EMBEDDINGS, {"model": "writer", "input": str(number)}))[0][1]
        return together

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(ask, range(400))) > 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": ""}, 422, "input"),
        ({"input": []}, 422, "input"),
        ({"input": 5}, 422, "input"),
        ({"input": ["a", 5]}, 422, "input"),
        ({"input": [1, 2]}, 400, "input"),
        ({"input": ["x"] * 2049}, 400, "input"),
        ({"input": "a", "encoding_format": "x"}, 422, "encoding_format"),
        ({"input": "a", "dimensions": 3}, 400, "dimensions"),
    ],
)
def test_wrong_requests_name_the_field(serving: Serving, fields: dict[str, Any], status: int, param: str) -> None:
    reply = serving.post(EMBEDDINGS, {"model": "writer", **fields})

    assert (reply.status, reply.value["error"]["param"]) == (status, param)


def test_an_error_of_the_model_is_told(serving: Serving) -> None:
    reply = serving.post(EMBEDDINGS, {"model": "writer", "input": "raises"})

    assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")
    assert "no idea" in reply.value["error"]["message"]


@pytest.mark.promise("OpenAI", "A class with `rerank` answers the three paths of rankings.")
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_back_with_their_scores(serving: Serving, path: str) -> None:
    documents = ["none", "a a a", {"text": "a"}]
    fields = {"model": "writer", "query": "a", "documents": documents}

    reply = serving.post(path, fields).value
    few = serving.post(path, {**fields, "top_n": 1, "return_documents": True}).value

    assert [(each["index"], each["relevance_score"]) for each in reply["results"]] == [(1, 3), (2, 1), (0, 0)]
    assert few["results"] == [{"index": 1, "relevance_score": 3, "document": {"text": "a a a"}}]


def test_a_server_may_be_without_this_api() -> None:
    with moonpool.Runtime() as runtime, Serving(runtime, allow_openai=False) as serving:
        assert serving.get("/v1/models").status == 404
        assert json.loads(serving.get("/v2").body)["name"] == "triton"
