"""Ends one side in the middle of each exchange: the other side's callers get an error, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, Config, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool
from moonpool import LoadFailed, MoonpoolError
from moonpool.ipc.channel import Channel

pytestmark = pytest.mark.promise(
    "Abuse",
    "A stub may die, and a runtime may be closed or killed, at any message. The callers get an "
    "error, and nothing is left behind.",
)

FILE = MODELS / "dies_at.py"
# All messages would take minutes. These strides have no common factor with the number of messages of an exchange.
STUB_STRIDE, CLOSE_STRIDE, KILL_STRIDE = 11, 13, 23
PATIENCE_S = 60.0
HOWS = (
    "plain", "log", "large", "large remark", "error", "late", "until cancelled", "ask", "ask late", "ask lost"
)  # fmt: skip


def config(marker: Path, at: int = 0) -> Config:
    parameters = {
        "DIE_AT": at,
        "MARKER": marker,
        "MOONPOOL_ENVIRONMENT": "MOONPOOL_TEST_MARK",
        "MOONPOOL_FINALIZE_TIMEOUT_S": 10,
    }
    return {
        "input": [tensor("HOW", "STRING", -1)],
        "output": [tensor("SAID", "STRING", -1)],
        "model_transaction_policy": {"decoupled": True},
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
    }


def ask(runtime: moonpool.Runtime, how: str) -> list[object]:
    """Return the shortened texts of the responses, and the error that ended them."""
    taken: list[object] = []
    try:
        stream = runtime.stream("m", {"HOW": [how]}, timeout_s=PATIENCE_S)
        if how == "until cancelled":
            stream.close()
            return taken
        taken.extend(response.outputs["SAID"][0][:5] for response in stream)
    except moonpool.RequestTimedOut:
        raise
    except MoonpoolError as error:
        taken.append(error)
    return taken


def everything(runtime: moonpool.Runtime) -> None:
    for how in HOWS:
        ask(runtime, how)


@pytest.mark.promise("The sandbox: `standard`", "A crash, an …")
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_stub_may_die_at_any_message(tmp_path: Path) -> None:
    at = 1
    with moonpool.Runtime() as runtime:
        load_other(runtime)
        while True:
            marker = tmp_path / str(at)
            try:
                runtime.load("m", FILE, config=config(marker, at))
            except LoadFailed:
                runtime.load("m", FILE, config=config(marker))
            everything(runtime)
            # The stub may die now, but not a second time.
            answers = [ask(runtime, "plain") for _ in range(3)]
            assert answers.count([b"last"]) >= 2, answers
            runtime.unload("m")
            if not marker.exists():
                break
            at += STUB_STRIDE
    # Each of these reads a message and sends one, with a point before and a point after each.
    assert at > 4 * len(HOWS)


def load_other(runtime: moonpool.Runtime) -> None:
    """Load the model that the other one asks. Nothing happens to it."""
    runtime.load("other", FILE, config=config(Path(__file__)))


class Countdown:
    """Do something at the n-th message of this process, sent or read."""

    def __init__(self, count: int, action: Callable[[], object]) -> None:
        self._left = count
        self._action = action
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._action()

    @property
    def has_acted(self) -> bool:
        with self._lock:
            return self._left <= 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            self.step()
            return method(*arguments)

        return act


METHODS = ("send", "send_fds", "receive", "receive_ready")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_runtime_may_be_closed_at_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = {name: getattr(Channel, name) for name in METHODS}
    for count in range(1, 1000, CLOSE_STRIDE):
        runtime = moonpool.Runtime(drain_timeout_s=0.1)
        closing = threading.Thread(target=runtime.close)
        countdown = Countdown(count, closing.start)
        for name, method in originals.items():
            monkeypatch.setattr(Channel, name, countdown.around(method))
        caller = threading.Thread(target=load_and_use, args=(runtime,))
        caller.start()
        caller.join(PATIENCE_S)
        assert not caller.is_alive(), f"a caller waits after message {count}"
        has_acted = countdown.has_acted
        monkeypatch.undo()
        if has_acted:
            closing.join(PATIENCE_S)
            assert not closing.is_alive(), f"closing at message {count} does not end"
        runtime.close()
        if not has_acted:
            break
    assert count > 2 * len(HOWS)


def load_and_use(runtime: moonpool.Runtime) -> None:
    try:
        load_other(runtime)
        runtime.load("m", FILE, config=config(Path(__file__)))
    except MoonpoolError:
        return
    everything(runtime)


# A runtime that is killed at the n-th message.
PROGRAM = """
import os, signal, sys
import moonpool
from moonpool.ipc.channel import Channel
from tests.e2e.test_abuse_deaths import METHODS, Countdown, load_and_use
countdown = Countdown(int(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
for name in METHODS:
    setattr(Channel, name, countdown.around(getattr(Channel, name)))
with moonpool.Runtime() as runtime:
    load_and_use(runtime)
"""


def marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_runtime_may_be_killed_at_any_message() -> None:
    mark = str(uuid.uuid4())  # all its stubs have this in their environment
    paths = [str(Path(__file__).parents[2]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MOONPOOL_TEST_MARK": mark}
    code = -9
    count = 0
    while code == -9:
        count += KILL_STRIDE
        arguments = [sys.executable, "-c", PROGRAM, str(count)]
        done = subprocess.run(arguments, env=environment, capture_output=True, timeout=60, check=False)
        code = done.returncode
        assert code in (0, -9), done.stderr.decode()
        wait_until(lambda: not marked(mark), PATIENCE_S, "the stubs' end")
    assert count > 2 * len(HOWS)
