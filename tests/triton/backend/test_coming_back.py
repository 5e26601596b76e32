"""An instance in a tritonserver that was given up or could not start comes back by itself, after a pause."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.triton.backend import zoo
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer, children
from tests.triton.server import interpreter
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

# This is appended to the model that obeys orders.
TRIES = """
    def initialize(self, args):
        folder = args["model_repository"]
        with open(os.path.join(folder, "tries"), "a") as file:
            file.write(".")
        if os.path.exists(os.path.join(folder, "blocked")):
            raise ValueError("it is blocked")
"""


class UncontrolledServer(HostingServer):
    """Nobody can load or unload a model there."""

    def command(self) -> list[str]:
        return [word for word in super().command() if "control-mode" not in word]


def _options(**options: object) -> str:
    return "".join(
        f'parameters {{ key: "MOONPOOL_{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in options.items()
    )


@contextmanager
def _served(kind: type[HostingServer], folder: Path, options: str) -> Iterator[HostingServer]:
    repository = folder / "repository"
    zoo.write(repository, ["orders"])
    with open(repository / "orders" / "1" / "model.py", "a") as model:
        model.write(TRIES)
    with open(repository / "orders" / "config.pbtxt", "a") as config:
        config.write(options)
    server = kind(interpreter(), repository, folder, ["orders"] if kind is HostingServer else [])
    server.start()
    try:
        yield server
    finally:
        server.stop()
    assert server.exit_code == 0


@pytest.fixture
def ask() -> Iterator[Callable[[HostingServer], str]]:
    """Return a function that sends the model `orders` a request for nothing, and returns what it says."""
    clients: dict[HostingServer, Client] = {}

    def ask(server: HostingServer) -> str:
        if server not in clients:
            clients[server] = Client(server)
        client = clients[server]
        try:
            return str(client.order("nothing"))
        except InferenceServerException as error:
            return str(error)

    yield ask
    for client in clients.values():
        client.close()


Ask = Callable[[HostingServer], str]


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "An instance that was given up in a tritonserver is started again after a rest, in every "
    "model control mode. An instance that rests can be ended. If no request comes meanwhile, "
    "messages about it do not pile up in the server.",
)
def test_an_instance_that_was_given_up_comes_back_where_nobody_can_load_it(tmp_path: Path, ask: Ask) -> None:
    options = _options(MAX_RESTARTS=0, RESTART_WINDOW_S=3, RESTART_BACKOFF_MAX_S=3)
    with _served(UncontrolledServer, tmp_path, options) as server:
        for _ in range(2):
            stub = int(wait_until(lambda: _number(ask(server)), TIMEOUT_S))
            os.kill(stub, signal.SIGKILL)
            wait_until(lambda: "it is started again after 3 s" in ask(server), TIMEOUT_S)
        wait_until(lambda: _number(ask(server)), TIMEOUT_S)
        assert "is not restarted now: it died" in server.log()


@pytest.mark.promise("The launcher of a tritonserver", "An instance that was given up …")
def test_instances_that_come_back_again_and_again_leave_nothing_in_the_server(tmp_path: Path, ask: Ask) -> None:
    """The server drops letters of processes that have ended, although no request comes to read them."""
    options = _options(MAX_RESTARTS=0, RESTART_WINDOW_S=0.2, RESTART_BACKOFF_MAX_S=0.2)
    with _served(UncontrolledServer, tmp_path, options) as server:
        folder = tmp_path / "repository" / "orders"
        (folder / "blocked").touch()
        os.kill(int(ask(server)), signal.SIGKILL)
        tries = folder / "tries"
        wait_until(lambda: len(tries.read_text()) > 3, TIMEOUT_S)
        before = len(os.listdir(f"/proc/{server.pid}/fd"))
        wait_until(lambda: len(tries.read_text()) > 9, TIMEOUT_S)
        # A start that is under way has some descriptors.
        wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= before + 6, TIMEOUT_S)
        (folder / "blocked").unlink()
        wait_until(lambda: _number(ask(server)), TIMEOUT_S)


@pytest.mark.promise(
    "The launcher of a tritonserver", "A lack of descriptors in a tritonserver does not count as a death of the model."
)
def test_want_of_files_in_the_server_is_no_death_of_a_model(tmp_path: Path, ask: Ask) -> None:
    """A second death would be the end for a long time. A forked stub would end again before anybody saw it."""
    options = _options(MAX_RESTARTS=1, RESTART_WINDOW_S=600, RESTART_BACKOFF_S=0, PREFORK="no")
    with _served(HostingServer, tmp_path, options) as server:
        stub = int(ask(server))
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (4, limits[1]))
        try:
            os.kill(stub, signal.SIGKILL)
            launcher = server.launcher
            seen: set[int] = set()

            def were_many() -> bool:
                seen.update(children(launcher))
                return len(seen) > 4

            wait_until(were_many, TIMEOUT_S, "starts for which there is no room")
        finally:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: _number(ask(server)), TIMEOUT_S)
        assert "is not restarted now" not in server.log()


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "Starts that fail after the end of a launcher are tried again after ever longer pauses, and not for every request.",
)
def test_starts_that_fail_after_a_launcher_s_end_have_ever_longer_pauses(tmp_path: Path, ask: Ask) -> None:
    with _served(HostingServer, tmp_path, "") as server:
        folder = tmp_path / "repository" / "orders"
        ask(server)
        (folder / "blocked").touch()
        (folder / "tries").unlink()
        os.kill(server.launcher, signal.SIGKILL)
        wait_until(lambda: "it is blocked" in ask(server), TIMEOUT_S)
        for _ in range(300):
            assert "it is blocked" in ask(server)
        # From a tenth of a second on each pause is twice as long as the one before.
        assert len((folder / "tries").read_text()) <= 12
        (folder / "blocked").unlink()
        wait_until(lambda: _number(ask(server)), TIMEOUT_S)


def _number(said: str) -> str:
    return said if said.isdigit() else ""
