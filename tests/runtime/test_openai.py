"""Chats and embeddings from Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

import moonpool

WRITER = Path(__file__).parents[1] / "models" / "writer.py"


@pytest.fixture(scope="module")
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as made:
        made.load("writer", str(WRITER))
        yield made


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.promise("OpenAI", "`Runtime.chat` and `embed` ask the same models from Python.")
def test_a_whole_chat(runtime: moonpool.Runtime) -> None:
    answer = runtime.chat("writer", said("counts"), temperature=0)

    assert answer["choices"][0]["message"]["content"] == "one two"
    assert answer["usage"]["total_tokens"] == 5
    assert asyncio.run(runtime.achat("writer", said("a b")))["choices"][0]["message"]["content"] == "a b "


@pytest.mark.promise("OpenAI", "`Runtime.chat` and `embed` ask the same models …")
def test_a_stream_is_for_threads_and_for_tasks(runtime: moonpool.Runtime) -> None:
    async def read() -> list[Any]:
        return [chunk async for chunk in runtime.chat("writer", said("counts"), **wanted)]

    wanted: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(runtime.chat("writer", said("counts"), **wanted))

    assert [each["choices"][0]["delta"] for each in chunks if each["choices"]] == [
        {"role": "assistant", "content": ""},
        {"content": "one two"},
        {},
    ]
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert [each["choices"] for each in asyncio.run(read())] == [each["choices"] for each in chunks]


def test_a_stream_that_is_closed_ends_the_models_iterator(runtime: moonpool.Runtime) -> None:
    with runtime.chat("writer", said("waits here"), stream=True) as stream:
        next(stream)

    def left() -> bool:
        told: str = runtime.chat("writer", said("left"))["choices"][0]["message"]["content"]
        return "here" in told

    wait_until(left, 30.0, "the end of the iterator")


@pytest.mark.promise("OpenAI", "`Runtime.chat` and `embed` ask the same models …")
def test_texts_become_rows(runtime: moonpool.Runtime) -> None:
    rows = runtime.embed("writer", ["abc", "x"])

    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, [[3, 2, 0.5, -1], [1, 2, 0.5, -1]])
    assert runtime.embed("writer", [str(n) for n in range(100)]).shape == (100, 4)


def test_what_is_wrong_is_named(runtime: moonpool.Runtime) -> None:
    with pytest.raises(moonpool.InvalidRequest, match=r"^temperature: Input should be less"):
        runtime.chat("writer", said("x"), temperature=3)
    with pytest.raises(moonpool.ModelError, match="no idea"):
        runtime.chat("writer", said("raises"))
    with pytest.raises(moonpool.ModelError, match="I will not"):
        list(runtime.chat("writer", said("refuses"), stream=True))
    with pytest.raises(moonpool.InvalidRequest, match="at least one text"):
        runtime.embed("writer", [])
    with pytest.raises(moonpool.ModelNotFound):
        runtime.embed("nobody", ["x"])
