"""Resources with which a contained instance starts: they exist, or the load fails, and they are released in any
case.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.hosting import ECHO, MODELS, options

import moonpool
from moonpool.runtime.isolation import users
from moonpool.runtime.isolation.plan import plan_for
from moonpool.runtime.isolation.scratch import prefix_of
from moonpool.runtime.model.config.model import minimal
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.repository.environment import resolve
from moonpool.runtime.repository.grants import Grants
from moonpool.runtime.repository.loading import HostingRules, model_of

FILE = MODELS / "echo.py"


@pytest.fixture
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        yield runtime


def kept() -> list[object]:
    """Users and folders that this process has taken."""
    folders = Path(tempfile.gettempdir()).glob(f"{prefix_of(os.getpid())}*")
    return [*users._taken, *folders]


@pytest.mark.promise("Layers of the sandbox", "If a granted path does not exist, the load fails.")
@pytest.mark.parametrize("how", ["", "rw:"])
def test_a_granted_path_that_is_not_there_fails_the_load(runtime: moonpool.Runtime, how: str) -> None:
    config = ECHO | options(SANDBOX="strict", SANDBOX_PATHS=f"{how}/nowhere/weights")

    with pytest.raises(moonpool.LoadFailed, match="_PATHS names /nowhere/weights, which is not"):
        runtime.load("echo", FILE, config=config)

    assert kept() == []


@pytest.mark.promise(
    "Layers of the sandbox", "If a process cannot be started, its user, its folder and its descriptors are released."
)
@pytest.mark.parametrize("missing", ["tempfile.mkdtemp", "socket.socketpair", "os.pipe2", "os.pidfd_open"])
def test_resources_are_released_when_no_process_can_be_started(
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


def test_resources_are_released_only_once(tmp_path: Path) -> None:
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


@pytest.mark.promise("The sandbox: grants", "An environment or …")
@pytest.mark.parametrize(("grant", "is_refused"), [("m:EXECUTION_ENV_PATH={}", True), ("m", False)])
def test_a_link_that_came_after_the_load_leads_no_process_out(tmp_path: Path, grant: str, is_refused: bool) -> None:
    """Instances are started again while the next version of the model is being put there."""
    folder = tmp_path / "m"
    for path in (folder / "1", folder / "env" / "bin", tmp_path / "other"):
        path.mkdir(parents=True)
    (folder / "1" / "model.py").touch()
    (folder / "env" / "bin" / "python").symlink_to(sys.executable)
    file = folder / "1" / "model.py"
    source = ModelSource("triton", file, None, folder, folder / "1", is_directory=True)
    raw = minimal("m")
    raw["parameters"] = {"EXECUTION_ENV_PATH": {"string_value": str(folder / "env")}}
    model = model_of("m", source, raw, None, 1, {})
    rules = HostingRules("strict", grants=Grants([grant.format(folder / "env")]))
    rules.apply_to(model)
    environment = resolve(str(folder / "env"), folder)
    plan_for(model, environment, "").release()

    (folder / "env").rename(tmp_path / "env")
    (folder / "env").symlink_to(tmp_path / "env")
    refused = pytest.raises(moonpool.LoadFailed, match="the files at the end of the link")
    with refused if is_refused else contextlib.nullcontext():
        plan_for(model, environment, "").release()
    assert kept() == []
