"""The example models do what they say; those that need more than numpy where that is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.runtime.cli.shell import MODELS, PATIENCE_S, environment
from tests.waiting import wait_until

import moonpool

OPENAI = MODELS.with_name("models_openai")
PYTHON_TOOL = [{"type": "function", "function": {"name": "python"}}]
WITH_TORCH = MODELS.with_name("models_with_torch")
SENTENCES = WITH_TORCH / "sentence_embedding" / "env"
HAS_SENTENCES = SENTENCES.exists()
no_sentences = pytest.mark.skipif(
    not HAS_SENTENCES,
    reason="its environment is not made; see examples/models_with_torch/sentence_embedding/config.pbtxt",
)


def test_primes_and_normalise_compute() -> None:
    rows = np.random.default_rng(1).normal(7, 3, (4, 100)).astype(np.float32)
    with moonpool.Runtime(MODELS, models=["primes", "normalise"]) as runtime:
        count = runtime.infer("primes", {"LIMIT": [[100]]})["COUNT"].tolist()
        result = runtime.infer("normalise", {"X": rows})["Y"].copy()

    assert count == [[25]]
    np.testing.assert_allclose(result.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(result.std(axis=1), 1, rtol=1e-5)


def test_crashes_answers_dies_and_comes_back() -> None:
    with moonpool.Runtime(MODELS, models=["crashes"]) as runtime:
        for wish in (b"segfault", b"exit"):
            with pytest.raises(moonpool.StubDied):
                runtime.infer("crashes", {"WISH": [[wish]]}, timeout_s=PATIENCE_S)
            answer = runtime.infer("crashes", {"WISH": [[b"hello"]]}, timeout_s=PATIENCE_S)
            assert answer["ANSWER"].tolist() == [[b"alive: hello"]]
        with pytest.raises(moonpool.ModelError, match="as you wish"):
            runtime.infer("crashes", {"WISH": [[b"raise"]]}, timeout_s=PATIENCE_S)


def test_hangs_is_cut_off() -> None:
    with moonpool.Runtime(MODELS, models=["hangs"]) as runtime:
        with pytest.raises(moonpool.ExecuteTimedOut):
            runtime.infer("hangs", {"SECONDS": [[3600.0]]}, timeout_s=PATIENCE_S)

        def slept() -> list[list[float]] | None:
            # On a busy machine the first answer of a process may take longer than the half second that it has.
            with contextlib.suppress(moonpool.ExecuteTimedOut):
                answer = runtime.infer("hangs", {"SECONDS": [[0.0]]}, timeout_s=PATIENCE_S)
                return answer["SLEPT"].tolist()  # type: ignore[no-any-return]
            return None

        assert wait_until(slept) == [[0.0]]


@pytest.mark.skipif(
    not (HAS_SENTENCES or importlib.util.find_spec("torch")), reason="PyTorch is not installed (pip install torch)"
)
def test_torch_linear_answers_every_row_as_if_it_were_alone() -> None:
    parameters = {"MOONPOOL_THREADS": {"string_value": "1"}}
    if not importlib.util.find_spec("torch"):
        parameters["EXECUTION_ENV_PATH"] = {"string_value": str(SENTENCES)}
    rows = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    with moonpool.Runtime() as runtime:
        runtime.load("torch_linear", WITH_TORCH / "torch_linear", config={"parameters": parameters})

        together = runtime.infer("torch_linear", {"X": rows})["Y"]
        alone = [runtime.infer("torch_linear", {"X": row[None]})["Y"] for row in rows]

    assert together.shape == (3, 4)
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-6)
    assert np.abs(together).max() > 0


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_texts_with_the_same_words_are_closest_to_the_embedder() -> None:
    with moonpool.Runtime(OPENAI, models=["embedder"]) as runtime:
        rows = runtime.embed("embedder", ["A man eats bread.", "Rates went up.", "a man eats the bread"])

    assert (rows @ rows.T)[0].argsort().tolist() == [1, 2, 0]
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)


def test_calculator_runs_a_snippet_in_the_sandbox_or_has_the_agent_run_it() -> None:
    with moonpool.Runtime(OPENAI, models=["calculator"]) as runtime:

        def answer(messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
            found = runtime.chat("calculator", messages, timeout_s=PATIENCE_S, **fields)
            return found["choices"][0]["message"]  # type: ignore[no-any-return]

        called = answer(said("6 * 7"), tools=PYTHON_TOOL)
        told = answer([*said("6 * 7"), {"role": "tool", "content": "42"}])
        printed = answer(said("```python\nkept = 1\nfor n in range(3):\n    print(n)\n```"))
        fresh = answer(said("'kept' in globals()"))
        refused = answer(said("open('/etc/hostname').read()"))

    assert called["tool_calls"][0]["function"] == {"name": "python", "arguments": '{"code":"print(6 * 7)"}'}
    assert told["content"] == "The result is 42."
    assert printed["content"] == "0\n1\n2"
    assert fresh["content"] == "False"
    assert str(refused["content"]).startswith("PermissionError")


def test_relay_passes_pieces_on_as_they_come() -> None:
    with moonpool.Runtime(OPENAI, models=["calculator", "relay"]) as runtime:
        whole = runtime.chat("relay", said("6 * 7"), timeout_s=PATIENCE_S)
        chunks = list(runtime.chat("relay", said("6 * 7"), tools=PYTHON_TOOL, stream=True, timeout_s=PATIENCE_S))

    assert whole["choices"][0]["message"]["content"] == "42"
    assert whole["model"] == "relay"
    assert "tool_calls" in chunks[1]["choices"][0]["delta"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
    reason="PyTorch and transformers are not installed (pip install torch transformers)",
)
def test_tiny_chat_streams_what_it_answers_whole() -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "seed": 1, "timeout_s": PATIENCE_S}
    with moonpool.Runtime() as runtime:
        runtime.load("tiny_chat", WITH_TORCH / "tiny_chat")
        whole = runtime.chat("tiny_chat", said("hello"), **fields)
        chunks = list(runtime.chat("tiny_chat", said("hello"), stream=True, **fields))

    choice = whole["choices"][0]
    assert whole["usage"]["completion_tokens"] == 24
    assert choice["finish_reason"] == "length"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]


@no_sentences
def test_sentences_that_mean_the_same_are_closest() -> None:
    script = MODELS.parent / "closest_sentences.py"
    sentences = ["A man eats bread.", "Rates went up.", "Somebody has a sandwich."]

    ended = subprocess.run(
        [sys.executable, script, *sentences],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=PATIENCE_S,
    )

    assert ended.stderr == ""
    lines = [line.split(maxsplit=1) for line in ended.stdout.splitlines()]
    assert lines[0][1] == sentences[0]
    assert " ".join(lines[1]) == sentences[2]
    assert ended.returncode == 0


def test_the_script_says_what_is_missing_and_fails() -> None:
    if HAS_SENTENCES:
        pytest.skip("nothing is missing: the environment of sentence_embedding is there")

    ended = subprocess.run(
        [sys.executable, MODELS.parent / "closest_sentences.py"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=PATIENCE_S,
    )

    assert ended.returncode == 1
    assert "EXECUTION_ENV_PATH" in ended.stderr
    assert "Traceback" not in ended.stderr
