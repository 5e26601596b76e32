"""Every argument of a wrong type or a wrong value gets a sentence that names it."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import Batch, Float32, MoonpoolError, testing
from moonpool.runtime.model.signature import RequestOptions

SOURCE = """
from moonpool import Batch, Float32

class Scale:
    def __call__(self, X: Float32[Batch, 3]) -> Float32[Batch, 3]:
        return X * 2
"""
X = {"X": np.ones((2, 3), np.float32)}
TEXTS = [5, "text", [5]]
WHOLE = ["1", -1, 1.5]
TIMES = ["1", -1, math.nan, math.inf]

# Wrong values of all arguments by their names.
OF_RUNTIME: Mapping[str, list[Any]] = {
    "repository": [5, [5]],
    "models": TEXTS,
    "backends": [5, [5]],
    "backend_directory": [5],
    "drain_timeout_s": [*TIMES, None],
    "verbose": ["yes"],
    "listener": [5],
    "metrics": [5],
    "config_limits": [*TEXTS, ["x"]],
    "sandbox": [5, "strictt"],
    "sandbox_grants": [*TEXTS, ["m:x"]],
    "model_options": [5, {"m": 5}, {5: {}}, {"m": {"X": 1}}],
    "response_cache_bytes": [*WHOLE, 0],
    "rate_limit": [*TEXTS, ["x"]],
    "resident": [5],
    "spares": [*WHOLE, 5, True],
}
OF_LOAD: Mapping[str, list[Any]] = {
    "name": [5, "", "a/b"],
    "source": [5],
    "instances": [*WHOLE, 0, True],
    "config": [5, "x"],
    "files": [5, {5: b""}, {"a": 1}],
    "sandbox": [5, "strictt"],
    "options": [5, {5: 1}, {"X": 1}, {"MOONPOOL_THREADS": None}],
    "parameters": [5, {5: 1}, {"a": None}],
}
OF_MODEL: Mapping[str, list[Any]] = {"model": [5, None, []], "version": WHOLE}
OF_OPTIONS: Mapping[str, list[Any]] = {
    "outputs": [5, "OUTPUT0"],
    "request_id": [5],
    "correlation_id": [1.5, -1],
    "flags": WHOLE,
    "priority": WHOLE,
    "queue_timeout_us": [*WHOLE, 2**64],
    "parameters": [5],
    "trace_context": [5],
    "allocator": [5],
    "outputs_in": [5, "tpu"],
}
OF_INFER = {**OF_MODEL, "inputs": [5, None], "timeout_s": TIMES, **OF_OPTIONS}
OF_EMPTY = {**OF_MODEL, "name": ["Z"], "shape": [None, "ab", -1, (2, "3"), (1.5,)], "device": ["0", -1]}
OF_TESTING: Mapping[str, list[Any]] = {
    "source": [5],
    "name": [5],
    "version": WHOLE,
    "config": [5, "x"],
    "models": [5, {"a": 5}],
    "backend_directory": [5],
    "timeout_s": TIMES,
    "checks_outputs": ["no"],
}
# What an error calls an argument, if not by its name.
CALLED = {"name": "name|'Z'", "models": "models|model 'a'"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "scale.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def runtime(file: Path) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        runtime.load("scale", file)
        yield runtime


def named(call: Callable[..., object]) -> set[str]:
    """The arguments of a function, and the options of a request if it takes them."""
    found = inspect.signature(call).parameters.values()
    options = (
        RequestOptions.__annotations__
        if any(each.name == "options" and each.kind is each.VAR_KEYWORD for each in found)
        else {}
    )
    return {each.name for each in found if each.kind is not each.VAR_KEYWORD} - {"self", "_sharing"} | set(options) - {
        "userp"
    }


def check(call: Callable[..., object], right: Mapping[str, Any], wrong: Mapping[str, list[Any]]) -> None:
    """Call a function with each wrong value, all else being right.

    The error is moonpool's or ValueError, and names the argument.
    """
    assert named(call) == set(wrong)
    missed = []
    for name, values in wrong.items():
        for value in values:
            try:
                said = call(**{**right, name: value})
                said = asyncio.run(said) if inspect.iscoroutine(said) else said
            except (MoonpoolError, ValueError) as error:
                said = str(error)
                if any(word in said for word in CALLED.get(name, name).split("|")):
                    continue
            except Exception as error:
                said = repr(error)
            missed.append(f"{name}={value!r}: {said!r:.200}")
    assert missed == []


def test_wrong_arguments_of_a_runtime_are_named() -> None:
    check(moonpool.Runtime, {}, OF_RUNTIME)


@pytest.mark.parametrize("field", [each.name for each in fields(moonpool.Resident)])
def test_wrong_limits_of_a_resident_are_named(field: str) -> None:
    for value in ("1", -1):
        with pytest.raises(ValueError, match=rf"Resident\({field}=\) must be .*, not {value!r}"):
            moonpool.Resident(**{field: value})  # type: ignore[arg-type]


def test_wrong_arguments_of_a_load_are_named(runtime: moonpool.Runtime, file: Path) -> None:
    check(runtime.load, {"name": "other", "source": file}, OF_LOAD)
    assert "other" not in runtime.models()


def test_wrong_numbers_of_instances_are_named(runtime: moonpool.Runtime) -> None:
    right = {"name": "scale", "instances": 1}
    check(runtime.scale, right, {"name": [5], "instances": [*WHOLE, 0, None, True]})


@pytest.mark.parametrize("way", ["infer", "request", "ainfer", "arequest", "stream"])
def test_wrong_arguments_of_a_request_are_named(runtime: moonpool.Runtime, way: str) -> None:
    check(getattr(runtime, way), {"model": "scale", "inputs": X}, OF_INFER)


def test_wrong_arguments_of_a_submitted_request_are_named(runtime: moonpool.Runtime) -> None:
    wrong = {name: OF_INFER[name] for name in ("model", "version", "inputs")}
    check(runtime.submit, {"model": "scale", "inputs": X}, wrong)


def test_wrong_arguments_of_a_placed_input_are_named(runtime: moonpool.Runtime) -> None:
    check(runtime.empty, {"model": "scale", "name": "X", "shape": (2, 3)}, OF_EMPTY)


@pytest.mark.parametrize("way", ["config", "statistics", "instances"])
def test_wrong_names_and_versions_are_named(runtime: moonpool.Runtime, way: str) -> None:
    wrong = {"name": OF_MODEL["model"], "version": WHOLE}
    check(lambda name, version=None: getattr(runtime, way)(name, version), {"name": "scale"}, wrong)


@pytest.mark.parametrize("load", [testing.load, testing.load_in_stub])
def test_wrong_arguments_of_a_model_in_a_test_are_named(load: Callable[..., testing.LoadedModel], file: Path) -> None:
    check(load, {"source": file}, OF_TESTING)


def test_wrong_details_of_a_request_in_a_test_are_named() -> None:
    class Scale:
        def __call__(self, X: Float32[Batch, 3]) -> Float32[Batch, 3]:  # noqa: N803
            return X * 2

    def ask(**details: Any) -> object:
        return model.infer(testing.request(X, **details))

    wrong: dict[str, list[Any]] = {
        name: OF_OPTIONS[name] for name in OF_OPTIONS if name in inspect.signature(testing.Request).parameters
    }
    wrong |= {"timeout_us": WHOLE, "cancel_after": WHOLE}
    with testing.load(Scale) as model:
        ask.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in wrong]
        )
        check(ask, {}, wrong)


def test_an_option_that_a_request_has_not_is_named(runtime: moonpool.Runtime) -> None:
    with pytest.raises(TypeError, match="no option 'priorty' of a request; did you mean \"priority\""):
        runtime.infer("scale", X, priorty=1)  # type: ignore[call-arg]


def test_the_model_that_was_meant_is_named_in_the_program_alone(runtime: moonpool.Runtime) -> None:
    for ask in (
        lambda: runtime.infer("scael", X),
        lambda: runtime.scale("scael", 2),
        lambda: runtime.unload("scael"),
        lambda: runtime.empty("scael", "X", (2, 3)),
    ):
        with pytest.raises(moonpool.ModelNotFound, match=r"'scael' is not .*; did you mean \"scale\"\?$") as raised:
            ask()
        # A reader elsewhere may not know which models there are.
        assert "did you mean" not in raised.value.public_text()
        assert "'scael'" in raised.value.public_text()


def test_a_model_of_the_repository_that_was_meant_is_named(file: Path) -> None:
    (file.parent / "scale" / "1").mkdir(parents=True)
    (file.parent / "scale" / "1" / "model.py").write_text(SOURCE)
    with (
        moonpool.Runtime(file.parent, models=[]) as runtime,
        pytest.raises(moonpool.RepositoryError, match='did you mean "scale"') as raised,
    ):
        runtime.load("scael")
    assert "did you mean" not in raised.value.public_text()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python suggests names itself")
def test_the_name_that_an_import_meant_is_named() -> None:
    with pytest.raises(ImportError, match="'Flot32' from 'moonpool'; did you mean \"Float32\""):
        from moonpool import Flot32  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        from moonpool import nothing_like_it  # type: ignore[attr-defined]  # noqa: F401
    # Close to a name, but modules.
    from moonpool import errors, runtime  # noqa: F401

    assert not hasattr(moonpool, "Flot32")
