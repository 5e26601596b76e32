"""The example models do what they say; those that need more than numpy where that is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from tests.runtime.cli.shell import MODELS, PATIENCE_S, environment
from tests.waiting import wait_until

import moonpool

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
