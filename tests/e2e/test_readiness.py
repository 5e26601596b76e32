"""Tests of models that say themselves whether they are ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import registry_of
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.stubs import readiness

HOW: Config = {"input": [tensor("HOW", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}

Tell = Callable[[str], str]


@pytest.fixture(autouse=True)
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets for how long a check is waited for: on a busy machine it takes longer than usual."""

    def change(seconds: float) -> None:
        monkeypatch.setattr(readiness, "TIMEOUT_S", seconds)

    change(60.0)
    return change


@pytest.fixture
def tell(runtime: moonpool.Runtime) -> Iterator[Tell]:
    """Return a function that sets the model's answer, and returns the number of questions so far and the instance."""

    def run(how: str) -> str:
        answer = runtime.infer("moody", {"HOW": np.array([how.encode()], np.object_)})
        return bytes(answer["SAID"][0]).decode()

    with hosted(runtime, "moody", MODELS / "moody.py", HOW):
        yield run


@pytest.mark.promise(
    "Readiness",
    "A model can say itself whether it is ready. An exception, or a value that is no boolean, "
    "is a reason why not, with Triton's texts.",
)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("True", None),
        ("coroutine", None),
        ("False", "Model 'moody_0' is not ready (user-defined check failed)."),
        ("1", "is_ready() must return a boolean value"),
        ("None", "is_ready() must return a boolean value"),
        ("np.bool_(True)", "is_ready() must return a boolean value"),
        ("1 / 0", "Model 'moody_0' is not ready: ZeroDivisionError: division by zero"),
        ("exit('no')", "Model 'moody_0' is not ready: SystemExit: no"),
        ("exec('raise ValueError(chr(0xd800) * 10**6)')", "Model 'moody_0' is not ready: ValueError"),
    ],
)
def test_a_model_says_itself_whether_it_is_ready(
    runtime: moonpool.Runtime, tell: Tell, how: str, reason: str | None
) -> None:
    tell(how)
    said = runtime.why_not_ready("moody")

    assert said is None if reason is None else (said or "").startswith(reason)
    assert runtime.is_ready("moody") == (reason is None)
    assert tell("True") == "2 moody_0"
    assert runtime.is_ready("moody")


@pytest.mark.promise("Readiness", "A check that hangs delays neither requests nor an unload, and all who ask share it.")
def test_a_check_that_hangs_holds_up_nothing_and_is_shared(
    runtime: moonpool.Runtime, tell: Tell, wait: Callable[[float], None]
) -> None:
    wait(0.2)
    tell("hang")

    assert runtime.why_not_ready("moody") == ("Timed out waiting for user-defined is_ready() response")
    assert runtime.why_not_ready("moody") == "Timed out waiting for in-flight is_ready() response"
    # Requests go by another way than questions.
    wait_until(lambda: tell("") == "1 moody_0")
    wait(60.0)
    answers: list[str | None] = []
    askers = [threading.Thread(target=lambda: answers.append(runtime.why_not_ready("moody"))) for _ in range(3)]
    for asker in askers:
        asker.start()
    tell("False")
    tell("open")
    for asker in askers:
        asker.join()

    assert answers == ["Model 'moody_0' is not ready (user-defined check failed)."] * 3


def test_a_reactor_that_is_late_is_not_taken_for_one_that_has_ended(
    runtime: moonpool.Runtime, tell: Tell, wait: Callable[[float], None]
) -> None:
    wait(0.01)
    tell("hang")
    held, answers = threading.Event(), []
    registry_of(runtime).stubs.reactor.call_soon(lambda: held.wait(60.0))
    asker = threading.Thread(target=lambda: answers.append(runtime.why_not_ready("moody")))
    asker.start()
    asker.join(0.2)
    held.set()
    asker.join()

    assert answers == ["Timed out waiting for user-defined is_ready() response"]
    wait(60.0)
    tell("open")


@pytest.mark.promise("Readiness", "A check that hangs delays …")
def test_a_model_whose_check_hangs_can_be_unloaded(runtime: moonpool.Runtime, wait: Callable[[float], None]) -> None:
    wait(0.1)
    with hosted(runtime, "moody", MODELS / "moody.py", HOW):
        runtime.infer("moody", {"HOW": np.array([b"hang"], np.object_)})
        assert not runtime.is_ready("moody")

    assert "has no available versions" in (runtime.why_not_ready("moody") or "")


@pytest.mark.promise("Readiness", "A process that ends in its check is not ready until it was started anew.")
def test_a_process_that_ends_in_its_check_is_not_ready(runtime: moonpool.Runtime, tell: Tell) -> None:
    tell("die")

    assert runtime.why_not_ready("moody") == "Stub process 'moody_0' is not healthy."
    wait_until(lambda: runtime.is_ready("moody"))
    assert tell("") == "1 moody_0"


@pytest.mark.promise("Readiness", "All instances of the model are asked.")
def test_all_instances_are_asked_and_one_that_is_not_ready_is_enough(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "moody", MODELS / "moody.py", HOW, instances=2):
        said = runtime.infer("moody", {"HOW": np.array([b"False"], np.object_)})["SAID"][0]
        name = bytes(said).decode().split()[1]

        assert runtime.why_not_ready("moody") == (f"Model '{name}' is not ready (user-defined check failed).")


def test_a_model_without_a_check_is_not_asked(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "echo", MODELS / "echo.py", ECHO):
        assert runtime.why_not_ready("echo") is None


def test_moonpools_own_kind_may_have_a_check_too(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    file = tmp_path / "shy.py"
    file.write_text(
        "class Shy:\n    def __call__(self, X):\n        return X\n    def is_ready(self):\n        return False\n"
    )
    config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}
    with hosted(runtime, "shy", file, config):
        assert not runtime.is_ready("shy")
        assert runtime.infer("shy", {"X": np.ones(2, np.float32)})["Y"].tolist() == [1, 1]


def test_models_ask_each_other_and_themselves(runtime: moonpool.Runtime, tell: Tell) -> None:
    def said(code: str) -> str:
        answer = runtime.infer("talks", {"CODE": np.array([code.encode()], np.object_)})
        return bytes(answer["SAID"][0]).decode()

    code: Config = {"input": [tensor("CODE", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
    with hosted(runtime, "talks", MODELS / "talks.py", code):
        ask = "said = [pb_utils.is_model_ready(name) for name in ('moody', 'talks', 'nobody')]"

        assert said(ask) == "[True, True, False]"
        tell("False")
        assert said(ask) == "[False, True, False]"
        tell("coroutine")
        assert said(ask) == "[True, True, False]"
