"""What a contained instance is started with: it is there, or the load says so, and is given back in any case."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.hosting import ECHO, MODELS, options

import moonpool
from moonpool.runtime.config import minimal
from moonpool.runtime.environment import resolve
from moonpool.runtime.loading import model_of
from moonpool.runtime.sandbox import users
from moonpool.runtime.sandbox.plan import plan_for
from moonpool.runtime.source import ModelSource

FILE = MODELS / "echo.py"


@pytest.fixture
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        yield runtime


def kept() -> list[object]:
    """Users and folders that this process has taken."""
    folders = Path(tempfile.gettempdir()).glob(f"moonpool-scratch-{os.getpid()}-*")
    return [*users._taken, *folders]


@pytest.mark.parametrize("how", ["", "rw:"])
def test_a_granted_path_that_is_not_there_fails_the_load(
    runtime: moonpool.Runtime, how: str
) -> None:
    config = ECHO | options(SANDBOX="strict", SANDBOX_PATHS=f"{how}/nowhere/weights")

    with pytest.raises(moonpool.LoadFailed, match="_PATHS names /nowhere/weights, which is not"):
        runtime.load("echo", FILE, config=config)

    assert kept() == []


@pytest.mark.parametrize(
    "missing", ["tempfile.mkdtemp", "socket.socketpair", "os.pipe2", "os.pidfd_open"]
)
def test_what_was_taken_is_given_back_where_no_process_can_be_started(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(missing, refuse)
        with pytest.raises(moonpool.LoadFailed, match="Too many open files"):
            runtime.load("echo", FILE, config=ECHO | options(SANDBOX="strict"))

    assert kept() == []
    assert len(os.listdir("/proc/self/fd")) == before
    runtime.load("echo", FILE, config=ECHO | options(SANDBOX="strict"))


def test_what_is_given_back_once_is_not_given_back_again(tmp_path: Path) -> None:
    """It may be another instance's by then."""
    raw = minimal("m") | {"parameters": {"MOONPOOL_SANDBOX": {"string_value": "strict"}}}
    source = ModelSource("triton", FILE, None, FILE.parent, FILE.parent)
    model = model_of("m", source, raw, None, 1, {})
    environment = resolve(None, tmp_path)

    first = plan_for(model, environment, "")
    first.release()
    second = plan_for(model, environment, "")
    first.release()

    assert len(kept()) == (2 if os.geteuid() == 0 else 1)
    second.release()
    assert kept() == []
