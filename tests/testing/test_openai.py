"""OpenAI's API of a model under test, in its own process and in a stub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

import moonpool
from moonpool import testing

WRITER = Path(__file__).parents[1] / "models" / "writer.py"


@pytest.fixture(params=[testing.load, testing.load_in_stub], ids=["here", "in_stub"])
def writer(request: pytest.FixtureRequest) -> Iterator[testing.LoadedModel]:
    with request.param(WRITER) as model:
        yield model


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.promise("Testing models", "A model under test answers as clients of OpenAI's API see it.")
def test_a_chat_is_whole_or_a_stream(writer: testing.LoadedModel) -> None:
    whole = writer.chat(said("one two"))
    with writer.chat(said("one two"), stream=True) as chunks:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]

    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == "one two "
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "one "}, {"content": "two "}, {}]


def test_fields_reach_the_model_and_usage_the_test(writer: testing.LoadedModel) -> None:
    told = writer.chat(said("tells"), temperature=0.5, odd=1)["choices"][0]["message"]["content"]

    assert "0.5" in told
    assert "'odd'" in told
    assert writer.chat(said("counts"), max_tokens=2)["usage"]["total_tokens"] == 5


def test_completions_and_embeddings(writer: testing.LoadedModel) -> None:
    assert writer.complete("a")["choices"][0]["text"] == "a!"
    assert writer.complete([1, 2])["choices"][0]["text"] == "[1, 2]"
    assert writer.embed(["abc", "x"])[:, 0].tolist() == [3, 1]
    assert writer.embed(["x"] * 70).shape == (70, 4)


def test_what_the_model_and_the_checks_raise(writer: testing.LoadedModel) -> None:
    with pytest.raises(moonpool.ModelError, match="no idea"):
        writer.chat(said("raises"))
    with pytest.raises(moonpool.ModelError, match="I will not"):
        writer.chat(said("refuses"))
    with pytest.raises(moonpool.InvalidRequest, match="less than or equal to 2"):
        writer.chat(said("x"), temperature=3)
    with pytest.raises(moonpool.InvalidRequest, match="at least one text"):
        writer.embed([])


def test_a_stream_that_is_closed_ends_the_models_iterator(writer: testing.LoadedModel) -> None:
    stream = writer.chat(said("waits here"), stream=True)
    assert [next(stream)["choices"][0]["delta"].get("content") for _ in range(2)] == ["", "first"]

    stream.close()

    wait_until(lambda: writer.chat(said("left"))["choices"][0]["message"]["content"] == "here")


def test_a_program_without_logging_gets_the_models_errors_once() -> None:
    program = (
        f"from moonpool import testing\nwith testing.load({str(WRITER)!r}) as model:\n"
        " try: model.chat([{'role': 'user', 'content': 'raises'}])\n except Exception: pass\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=150)

    assert ended.returncode == 0
    assert ended.stderr.count("failed to answer: ValueError: no idea") == 1
    assert "Logging error" not in ended.stderr
