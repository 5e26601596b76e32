"""Tests of the hooks `sleep` and `wake` by `moonpool.testing`: in this process and in a stub, with the same results."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.dispositions import default_signals
from tests.waiting import wait_until

from moonpool import InvalidRequest, MoonpoolError, testing
from moonpool.testing import LoadedModel

MODEL = """
from moonpool import Batch, Float32

class Scale:
    def __init__(self):
        self.factor, self.calls = 2.0, 0

    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:
        if X[0, 0] < 0:
            self.calls = -1
        return X * self.factor + self.calls

    async def sleep(self):
        if self.calls < 0:
            raise ValueError("on purpose")
        self.factor = None

    def wake(self):
        self.factor, self.calls = 2.0, self.calls + 1
"""
PLAIN = MODEL.replace("async def sleep", "async def sleeps")
# One hook takes an hour, but only the first time that it is called, in any process.
HELD = """
import asyncio
import pathlib

from moonpool import Batch, Float32

FOLDER = pathlib.Path(__file__).parent

class Held:
    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:
        return X

    async def {hook}(self):
        if (FOLDER / "begun").exists():
            return
        (FOLDER / "begun").touch()
        try:
            await asyncio.sleep(3600)
        finally:
            (FOLDER / "ended").touch()

    def {other}(self):
        pass
"""
Load = Callable[[str], LoadedModel]


@pytest.fixture(params=["here", "stub"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    def loaded(text: str) -> LoadedModel:
        (tmp_path / "scale.py").write_text(text)
        here = request.param == "here"
        return (testing.load if here else testing.load_in_stub)(tmp_path / "scale.py")

    return loaded


def ask(model: LoadedModel, value: float = 1.0) -> float:
    return float(model.infer(X=np.full((1, 1), value, np.float32))["OUTPUT0"].flat[0])


@pytest.mark.promise(
    "Testing models",
    "A test puts a model to sleep and wakes it; a request to a model that sleeps wakes it first, as in a runtime.",
)
def test_a_test_calls_the_hooks(load: Load) -> None:
    with load(MODEL) as model:
        assert ask(model) == 2
        model.wake()  # it does not sleep
        model.sleep()
        model.sleep()
        model.wake()
        assert ask(model) == 3
        model.sleep()
        assert ask(model) == 4


def test_a_test_sees_what_a_hook_raises(load: Load) -> None:
    with load(MODEL) as model:
        ask(model, -1)
        with pytest.raises((ValueError, MoonpoolError), match="on purpose"):
            model.sleep()


def test_a_model_without_both_hooks_cannot_sleep(load: Load) -> None:
    with load(PLAIN) as model:
        with pytest.raises(InvalidRequest, match="has not both `sleep` and `wake`"):
            model.sleep()
        model.wake()
        assert ask(model) == 2


@pytest.mark.promise(
    "Testing models", "After a Ctrl-C while a hook of the model runs, the hook has ended, and the model answers again."
)
@pytest.mark.parametrize("hook", ["sleep", "wake"])
def test_an_interrupt_while_a_hook_runs_leaves_a_model_that_answers(load: Load, tmp_path: Path, hook: str) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with load(HELD.format(hook=hook, other={"sleep": "wake", "wake": "sleep"}[hook])) as model:
        assert ask(model) == 1
        if hook == "wake":
            model.sleep()
        with ThreadPoolExecutor(1) as thread:
            interrupting = thread.submit(interrupt_when, begun.exists)
            with default_signals(), pytest.raises(KeyboardInterrupt):
                getattr(model, hook)()
            interrupting.result()
        if isinstance(model, testing.InProcessModel):
            wait_until(ended.exists)
        assert ask(model) == 1


def interrupt_when(is_due: Callable[[], bool]) -> None:
    """Press Ctrl-C then, as soon as the main thread waits for the hook."""
    main = threading.main_thread().ident or 0
    wait_until(lambda: is_due() and sys._current_frames()[main].f_code.co_name == "wait")
    signal.pthread_kill(main, signal.SIGINT)
