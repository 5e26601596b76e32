"""Models that ask each other under the rate limiter: a request that would wait for ever is refused, and others are
not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.ensemble_repositories import chain, ensemble_text

import moonpool

# Asks the models that the request names, one after the other and through each other: "b c" asks b to ask c.
ASKS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", self.ask(each))]) for each in requests]

    def ask(self, request):
        names = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0].decode().split()
        if names in ([], ["answered"]):
            return np.array([b"answered"], object)
        x = pb_utils.Tensor("X", np.array([" ".join(names[1:]).encode()], object))
        asked = pb_utils.InferenceRequest(
            model_name=names[0], requested_output_names=["Y"], inputs=[x]
        ).exec()
        if asked.has_error():
            raise pb_utils.TritonModelException(asked.error().message())
        return pb_utils.get_output_tensor_by_name(asked, "Y").as_numpy()
"""


def needs(count: int = 1, **resources: int) -> dict[str, Any]:
    named = [{"name": name, "global": True, "count": each} for name, each in resources.items()]
    return {"kind": "KIND_CPU", "count": count, "rate_limiter": {"resources": named}}


@contextmanager
def limited(folder: Path, groups: Mapping[str, dict[str, Any]], *given: str) -> Iterator[moonpool.Runtime]:
    file = folder / "asks.py"
    file.write_text(ASKS)
    strings = {"input": [tensor("X", "STRING", 1)], "output": [tensor("Y", "STRING", 1)]}
    with moonpool.Runtime(rate_limit=given, drain_timeout_s=5.0) as runtime:
        for name, group in groups.items():
            runtime.load(name, file, config=strings | {"instance_group": [group]})
        yield runtime


def ask(runtime: moonpool.Runtime, first: str, others: str) -> str:
    (text,) = runtime.infer(first, {"X": [others]}, timeout_s=30.0)["Y"]
    return str(text.decode())


@pytest.mark.promise(
    "Batching",
    "A request of a model that would wait for resources which the model keeps until it is answered is refused, with "
    "the names of the models.",
)
@pytest.mark.parametrize(
    ("groups", "first", "others", "names"),
    [
        ({"a": needs(R=1), "b": needs(R=1)}, "a", "b", ["'a'", "'b'", "model 'a' keeps"]),
        # Through a model that needs something else.
        ({"a": needs(R=1), "b": needs(S=1)}, "a", "b a", ["'b' to model 'a'", "models 'a', 'b' keep"]),
        (
            {"a": needs(R=1), "b": needs(S=1), "c": needs(T=1)},
            "a",
            "b c a",
            ["'c' to model 'a'", "models 'a', 'b', 'c' keep"],
        ),
        # Half of what it needs is not enough.
        ({"a": needs(R=1), "b": needs(R=2)}, "a", "b", ["'a' to model 'b'"]),
    ],
)
def test_a_request_that_closes_a_circle_is_refused(
    tmp_path: Path, groups: dict[str, Any], first: str, others: str, names: list[str]
) -> None:
    with limited(tmp_path, groups) as runtime:
        with pytest.raises(moonpool.ModelError) as raised:
            ask(runtime, first, others)
        for name in [*names, "would wait for ever"]:
            assert name in str(raised.value)
        # Nothing is kept by what was refused, or was asked before.
        for name in groups:
            assert ask(runtime, name, "") == "answered"


@pytest.mark.parametrize(
    ("groups", "given", "others"),
    [
        ({"a": needs(R=1), "b": needs(S=1)}, [], "b"),
        ({"a": needs(R=1), "b": needs(R=1)}, ["R:2"], "b"),
        ({"a": needs(2, R=1), "b": needs(R=1)}, ["R:3"], "b a"),
    ],
)
def test_a_request_for_which_there_is_enough_goes_on(
    tmp_path: Path, groups: dict[str, Any], given: list[str], others: str
) -> None:
    with limited(tmp_path, groups, *given) as runtime:
        for _ in range(3):
            assert ask(runtime, "a", others) == "answered"


def test_two_models_that_ask_each_other_at_once_both_go_on(tmp_path: Path) -> None:
    """Two requests that wait for each other: the later one is refused, whichever that is."""
    with limited(tmp_path, {"a": needs(R=1), "b": needs(S=1)}) as runtime:
        for _ in range(10):
            futures = [runtime.submit(first, {"X": [other]}) for first, other in (("a", "b"), ("b", "a"))]
            errors = [future.exception(30.0) for future in futures]
            assert None in errors
            assert all("would wait for ever" in str(each) for each in errors if each is not None)


def test_the_steps_of_an_ensemble_are_looked_at(tmp_path: Path) -> None:
    groups = {"a": needs(R=1), "b": needs(S=1), "c": needs(R=1)}
    with limited(tmp_path, groups) as runtime:
        steps = chain(["b", "c"])
        folder = tmp_path / "pipe"
        (folder / "1").mkdir(parents=True)
        text = ensemble_text(steps).replace("TYPE_FP32", "TYPE_STRING")
        (folder / "config.pbtxt").write_text(
            text.replace('"A"', '"X"')
            .replace('"B"', '"Y"')
            .replace("dims: [ 3 ]", "dims: [ 1 ]")
            .replace("dims: [3]", "dims: [1]")
        )
        runtime.load("pipe", folder)
        with pytest.raises(moonpool.ModelError, match="'a' to model 'c' would wait for ever"):
            ask(runtime, "a", "pipe")
        assert ask(runtime, "pipe", "") == "answered"
