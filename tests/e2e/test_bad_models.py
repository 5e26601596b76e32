"""Tests of models that are wrong, or treat their process badly: each gets an error or is tolerated, and no other model
notices.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, is_running, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool
from moonpool import LoadFailed, ModelError, StubDied

HEAD = "import triton_python_backend_utils as pb_utils\n"
Y: Config = {"input": [tensor("HOW", "STRING", 1)], "output": [tensor("Y", "FP32", -1)]}

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


# Wrong files

FILES = {
    "a class that is none": ("TritonPythonModel = 7\n", "has no attribute 'TritonPythonModel'"),
    "bytes that are no text": ("\x00TritonPythonModel", "null bytes"),
    "an exception without end": (
        "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('x' * 10**7)\n",
        "more characters)",
    ),
    "nothing": ("", "defines no class at all; name the one to use"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_model_fails_to_load_with_the_reason(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path], name: str
) -> None:
    text, words = FILES[name]

    with pytest.raises(LoadFailed) as caught:
        runtime.load("broken", model_file(text), config=Y)

    assert words in str(caught.value)
    assert len(str(caught.value)) < 100_000
    assert "broken" not in runtime.models()


def test_a_file_that_cannot_be_read_is_named(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "link.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "text.txt").write_text("class TritonPythonModel: pass")

    for name in ("link.py", "text.txt"):
        with pytest.raises(LoadFailed, match=name):
            runtime.load("broken", tmp_path / name, config=Y)


def test_a_model_without_execute_loads_and_says_so_at_each_request(
    runtime: moonpool.Runtime, model_file: Callable[[str], Path]
) -> None:
    file = model_file("class TritonPythonModel:\n    pass\n")
    want = (
        "Failed to process the request(s) for model 'idle_0', message: Python model "
        f"{file} does not implement `execute` method."
    )

    with hosted(runtime, "idle", file, Y):
        for _ in range(2):
            with pytest.raises(ModelError) as caught:
                runtime.infer("idle", {"HOW": ["x"]}, timeout_s=60.0)
            assert str(caught.value) == want


# Wrong returns


@pytest.fixture(scope="module")
def returns(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "returns", MODELS / "returns.py", Y):
        yield


# moonpool's own texts.
REFUSED = {
    "nothing": "the model ended without a last response to this request",
    "a list of nothing": "the model ended without a last response to this request",
    "an output twice": "output 'Y' is given twice",
    "33 dimensions": "output 'Y' has 33 dimensions",
    "a complex array": "NumPy dtype is not supported.",
    "no array": "incompatible constructor arguments",
    "a nameless tensor": "Tensor name cannot be an empty string.",
    "a parameter too large": "parameter",
    "a parameter that is no Unicode": "parameter",
    "an error without Unicode": "on purpose",
    "an error of a megabyte": "on purpose",
    "an error beside outputs": "on purpose",
}


@pytest.mark.usefixtures("returns")
@pytest.mark.parametrize("how", REFUSED)
def test_a_response_that_cannot_be_one_is_an_error_of_the_request(runtime: moonpool.Runtime, how: str) -> None:
    before = runtime.instances("returns")

    with pytest.raises(ModelError) as caught:
        runtime.infer("returns", {"HOW": [how]}, timeout_s=60.0)

    assert REFUSED[how] in str(caught.value)
    assert runtime.infer("returns", {"HOW": ["a response"]}, timeout_s=60.0)["Y"].tolist() == [1, 2]
    assert runtime.instances("returns") == before


@pytest.mark.usefixtures("returns")
def test_unusual_responses_are_passed_on(runtime: moonpool.Runtime) -> None:
    def ask(how: str) -> moonpool.Response:
        return runtime.request("returns", {"HOW": [how]}, timeout_s=60.0)

    assert ask("no outputs").outputs == {}
    assert ask("an unknown output").outputs == {}
    assert ask("another datatype").outputs["Y"].dtype == np.int64
    assert ask("another shape").outputs["Y"].shape == (1, 2, 1)
    assert ask("a subclass of a list").outputs["Y"].tolist() == [1, 2]
    assert ask("a subclass of a response").outputs["Y"].tolist() == [1, 2]
    assert ask("an array of lists").outputs["Y"].tolist() == [b"[1]", b"None"]
    assert ask("parameters").parameters == {"x": 1, "y": "z", "w": True}


# Wrong processes

NUMBER: Config = {"input": [tensor("HOW", "STRING", 1)], "output": [tensor("Y", "INT64", 1)]}


def do(runtime: moonpool.Runtime, how: str) -> int:
    return int(runtime.infer("unruly", {"HOW": [how]}, timeout_s=50.0)["Y"][0])


@pytest.fixture
def unruly(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "unruly", MODELS / "unruly.py", NUMBER | options(RESTART_WINDOW_S=0.001)):
        yield


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the log of the model so far."""
    caplog.set_level(logging.DEBUG, "moonpool.stub")

    def messages() -> list[str]:
        texts = [r.getMessage() for r in caplog.records if r.name == "moonpool.stub"]
        return [text.removeprefix("[unruly_0] ") for text in texts if "unruly_0" in text]

    return messages


@pytest.mark.promise("Containment", "The output of a model …")
@pytest.mark.usefixtures("unruly")
def test_a_model_that_prints_100_mb_is_heard_in_part(runtime: moonpool.Runtime, lines: Callable[[], list[str]]) -> None:
    do(runtime, "print_100_mb")

    wait_until(lambda: any("lines were left out: too many a second" in x for x in lines()), 60.0)
    assert do(runtime, "answer") == 0
    heard = set(lines())
    assert heard - {"x" * 99} == {x for x in heard if "were left out" in x}


def test_a_line_without_end_is_cut_and_half_a_line_is_kept_to_the_end(
    runtime: moonpool.Runtime, lines: Callable[[], list[str]]
) -> None:
    with hosted(runtime, "unruly", MODELS / "unruly.py", NUMBER):
        do(runtime, "endless_line")
        wait_until(lambda: any(x.startswith("yyyy") for x in lines()))
        do(runtime, "half_a_line")

    assert max(len(x) for x in lines()) < 10_000
    assert any(x.endswith(" … (cut)") for x in lines())
    assert any(x.endswith("half a line") for x in lines())


@pytest.mark.promise(
    "Containment",
    "The output of a model reaches the log line by line. Each line is marked with the instance "
    "and harmless to a terminal, and the rate of lines is limited.",
)
@pytest.mark.usefixtures("unruly")
def test_control_characters_are_escaped_and_no_line_is_another_model_s(
    runtime: moonpool.Runtime, lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    do(runtime, "print_escapes")
    do(runtime, "log_escapes")
    do(runtime, "not_utf_8")
    wait_until(lambda: len(lines()) >= 9, what="all lines")

    assert "\\x1b[31mred\\x1b[0m \\x07\\x08 over\\x0dwritten \\x85 \\x9b31m end" in lines()
    assert "first" in lines()
    assert "second" in lines()
    assert "caf\\xe9 \\xff\\xfe" in lines()
    assert any(x.startswith("[sibling_0] a line of another") for x in lines())
    every = [r.getMessage() for r in caplog.records]
    assert [x for x in every if x.startswith("[sibling_0]")] == []
    assert [x for x in every if not x.isprintable()] == []


@pytest.mark.parametrize(
    "how",
    [
        "replace_streams",
        "no_streams",
        "close_streams",
        "close_descriptors",
        "ignore_signals",
        "interrupt_itself",
        "change_place",
        "thread",
        "busy_thread",
        "break_modules",
    ],
)
def test_a_process_that_the_model_turned_upside_down_serves_on_and_ends(runtime: moonpool.Runtime, how: str) -> None:
    with hosted(runtime, "unruly", MODELS / "unruly.py", NUMBER):
        pid = runtime.instances("unruly")[0]["pid"]
        do(runtime, how)
        for _ in range(3):
            assert do(runtime, "answer") == 0
        with pytest.raises(ModelError, match="KeyError: 'nothing of that name'"):
            do(runtime, "nothing of that name")
        assert runtime.instances("unruly")[0]["pid"] == pid

    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.usefixtures("unruly")
def test_a_model_that_closes_all_its_descriptors_is_ended_and_comes_back(runtime: moonpool.Runtime) -> None:
    restarts = runtime.instances("unruly")[0]["restarts"]
    # In memory its answer is whole before it finds that it cannot ring any more.
    with contextlib.suppress(StubDied):
        do(runtime, "close_all")

    wait_until(lambda: runtime.instances("unruly")[0]["restarts"] > restarts)
    assert do(runtime, "answer") == 0


@pytest.mark.usefixtures("unruly")
def test_deep_recursion_and_warnings_as_errors_are_the_model_s_own(runtime: moonpool.Runtime) -> None:
    assert do(runtime, "deep") == 10_000
    with pytest.raises(ModelError, match="UserWarning: on purpose"):
        do(runtime, "warn")
    assert do(runtime, "answer") == 0


@pytest.mark.promise("Containment", "The child processes of a model end with it, unless they leave its session.")
@pytest.mark.needs("processes")
@pytest.mark.parametrize("how", ["child", "child_with_our_descriptors"])
@pytest.mark.parametrize("end", ["unload", "death"])
def test_children_of_a_model_end_with_it(runtime: moonpool.Runtime, how: str, end: str) -> None:
    with hosted(runtime, "unruly", MODELS / "unruly.py", NUMBER):
        child = do(runtime, how)
        assert is_running(child)
        if end == "death":
            do(runtime, "die_in_a_while")
            wait_until(lambda: runtime.instances("unruly")[0]["restarts"] == 1, 60.0)
            assert do(runtime, "answer") == 0

    wait_until(lambda: not is_running(child))
