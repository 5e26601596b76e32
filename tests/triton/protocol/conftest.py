"""Both servers over one repository, once for a run."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from tests.server.running import RunningServer
from tests.server.running import running as serving
from tests.triton.recording import RECORDING
from tests.triton.server import TritonServer, interpreter, running

from moonpool.runtime.cli.conformance import LOADED
from moonpool.runtime.conformance import comparing
from moonpool.runtime.conformance.asking import AskedServer
from moonpool.runtime.conformance.asking import region as made_region
from moonpool.runtime.conformance.cases import Case

MODELS = comparing.EXPECTED.with_name("models")
_HEAD = "# What a tritonserver 2.51.0, its models running under Python 3.11, answered to each case.\n"


class Servers(NamedTuple):
    """Both servers, or moonpool's alone if the answers of the other one are those that it once gave."""

    triton: AskedServer | None
    moonpool: AskedServer
    answers: dict[str, Any]

    def expected(self, case: Case) -> Any:
        """Return what the real server answers, or answered."""
        if self.triton is not None:
            self.answers[case.name] = case.ask(self.triton)
        elif sys.version_info[:2] != (3, 11):
            pytest.skip("tritonserver's models ran under Python 3.11, whose errors may differ")
        return self.answers[case.name]


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test waits until both servers have loaded all models."""
    if item.path.parent == Path(__file__).parent:
        item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def _answers() -> Iterator[dict[str, Any]]:
    """Reads what a tritonserver answered. `--record` writes what it answers now."""
    answers = comparing.read_expected()
    yield answers
    if RECORDING.folder is not None:
        RECORDING.folder.mkdir(parents=True, exist_ok=True)
        blocks = [f"{name!r}\n{answers[name]!r}\n" for name in sorted(answers)]
        (RECORDING.folder / comparing.EXPECTED.name).write_text("\n".join([_HEAD, *blocks]), encoding="utf-8")


@pytest.fixture(scope="session")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer | None, RunningServer]]:
    """A tritonserver of its own: what these tests do to it, no other test has to bear."""
    repository = Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("protocol") / "repository"))
    flags = [f"--load-model={name}" for name in LOADED]
    flags += ["--model-control-mode=explicit", "--strict-readiness=false"]
    folder = tmp_path_factory.mktemp("server")
    with contextlib.ExitStack() as stack:
        theirs = None
        if RECORDING.is_live:
            theirs = stack.enter_context(running(interpreter(), repository, folder, LOADED))
        yield theirs, stack.enter_context(serving(repository, *flags))


@pytest.fixture(scope="session")
def _channels(_running: tuple[TritonServer | None, RunningServer]) -> Iterator[dict[int, grpc.Channel]]:
    """The channels to the ports that were asked. What the first ones open, no test is charged for."""
    theirs, ours = _running
    with contextlib.ExitStack() as stack:
        channels = _Channels(stack)
        assert channels[ours.ports["grpc"]]
        if theirs is not None:
            assert channels[theirs.grpc_port]
        yield channels


class _Channels(dict[int, grpc.Channel]):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, port: int) -> grpc.Channel:
        channel = self[port] = self._stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        # A channel opens its sockets when it is first used.
        grpc.channel_ready_future(channel).result(60)
        return channel


@pytest.fixture
def servers(
    _running: tuple[TritonServer | None, RunningServer], _channels: dict[int, grpc.Channel], _answers: dict[str, Any]
) -> Servers:
    """Both servers.

    A tritonserver that a case has ended, as one in many loads does, is started again for the next case.
    """
    theirs, ours = _running
    moonpool = AskedServer("localhost", ours.ports["http"], _channels[ours.ports["grpc"]])
    if theirs is None:
        return Servers(None, moonpool, _answers)
    if theirs.has_died:
        theirs.stop()
        theirs.start()
    return Servers(AskedServer("localhost", theirs.http_port, _channels[theirs.grpc_port]), moonpool, _answers)


@pytest.fixture
def region() -> Iterator[None]:
    """The shared memory that the cases speak of, with nothing in it."""
    with made_region():
        yield
