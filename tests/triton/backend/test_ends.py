"""Stubs, their launcher, models and the tritonserver itself end, or die, without harm to the others."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.triton.backend import zoo
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer, children
from tests.triton.server import interpreter
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.promise(
    "Executing in a tritonserver",
    "If a stub dies or takes too long, its clients get the reason at once, and the next request finds another stub.",
)
@pytest.mark.parametrize(
    ("order", "why"), [("kill", "killed by SIGKILL"), ("exit", "exited with 3"), ("crash", "killed by SIGSEGV")]
)
def test_a_stub_that_dies_is_told_of_and_replaced(client: Client, order: str, why: str) -> None:
    before = client.order("nothing")
    with pytest.raises(InferenceServerException, match=why):
        client.order(order)
    assert client.order("nothing") != before


@pytest.mark.promise("Executing in a tritonserver", "A stub that dies while it is idle costs no request.")
def test_a_stub_that_dies_while_it_is_idle_costs_no_request(client: Client) -> None:
    before = client.order("nothing")
    os.kill(before, signal.SIGKILL)
    # Until then, a thread of the launcher may still have its channels open.
    wait_until(lambda: not Path(f"/proc/{before}").exists(), TIMEOUT_S, "the launcher to reap it")
    assert client.order("nothing") != before


@pytest.mark.promise(
    "Executing in a tritonserver",
    "If the server has no descriptors or no memory for another stub, that stub is ended, and a later one serves.",
)
def test_a_server_that_has_no_files_left_for_another_stub_gets_it_later(client: Client, server: HostingServer) -> None:
    heard = len(server.log())
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    # All below are in use. With fewer, `poll` would refuse the four descriptors that the library waits for.
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (4, limits[1]))
    try:
        os.kill(server.stub_of("identity"), signal.SIGKILL)
        # Another stub is ended, because the server could not take the other ends of its channels.
        wait_until(lambda: "no descriptor left" in server.log()[heard:], TIMEOUT_S, "its end")
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    array = np.ones(5, np.uint8)
    assert np.array_equal(client.infer("identity", array), array)


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "A process that has served long enough is replaced between two requests, none of which fails.",
)
def test_a_process_that_has_served_long_enough_is_replaced_between_requests(client: Client) -> None:
    processes = [client.order("nothing", "renewed") for _ in range(9)]
    assert [processes.count(each) for each in dict.fromkeys(processes)] == [3, 3, 3]


@pytest.mark.promise("Executing in a tritonserver", "If a stub dies or …")
def test_a_batch_that_takes_too_long_is_ended(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="took longer than 1 s"):
        client.order("sleep", "limited")
    assert client.order("nothing", "limited") > 0


@pytest.mark.promise("Executing in a tritonserver", "If a stub dies or …")
def test_streams_of_a_stub_that_dies_end_with_an_error(client: Client, server: HostingServer) -> None:
    answers = client.stream()
    client.count(-1)
    assert answers.get(timeout=TIMEOUT_S) == 0
    os.kill(server.stub_of("counts"), signal.SIGKILL)
    while isinstance(answer := answers.get(timeout=TIMEOUT_S), int):
        pass
    assert "killed by SIGKILL" in str(answer)
    client.grpc.stop_stream()


@pytest.mark.promise(
    "Executing in a tritonserver",
    "The server survives the death of the launcher, and the next request brings another one; "
    "neither the launcher nor a stub survives the server.",
)
def test_a_launcher_that_dies_is_replaced(client: Client, server: HostingServer) -> None:
    before, stub = server.launcher, client.order("nothing")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: _is_gone(stub), TIMEOUT_S, "its stubs to end")
    wait_until(lambda: _answers(lambda: client.order("nothing")), TIMEOUT_S)
    assert server.launcher != before
    array = np.ones(5, np.uint8)
    wait_until(lambda: _answers(lambda: client.infer("identity", array)), TIMEOUT_S)


# This is appended to the model that obeys orders.
FAILS = """
    def initialize(self, args):
        if os.path.exists(os.path.join(args["model_repository"], "blocked")):
            raise ValueError("it is blocked")
"""


@pytest.mark.promise(
    "Executing in a tritonserver",
    "If the next launcher cannot start an instance or a model, each request tries again, and "
    "none waits for ever. The server ends with 0. If a newer tritonserver asks, such an "
    "instance is not ready.",
)
@pytest.mark.parametrize(
    ("there", "elsewhere", "why"),
    [("allowed", "blocked", "it is blocked"), ("1/model.py", "1/moved.py", "model.py")],
    ids=["the instance", "the model"],
)
def test_an_instance_that_a_new_launcher_cannot_start_is_started_later(
    tmp_path: Path, there: str, elsewhere: str, why: str
) -> None:
    repository = tmp_path / "repository"
    zoo.write(repository, ["orders"])
    folder = repository / "orders"
    (folder / "allowed").touch()
    with open(folder / "1" / "model.py", "a") as model:
        model.write(FAILS)
    server = HostingServer(interpreter(), repository, tmp_path, ["orders"])
    server.start()
    client = Client(server)
    try:
        stub = client.order("nothing")
        (folder / there).rename(folder / elsewhere)
        os.kill(server.launcher, signal.SIGKILL)
        wait_until(lambda: _is_gone(stub), TIMEOUT_S, "its stubs to end")
        wait_until(lambda: _refused(client, why), TIMEOUT_S, "a first start")
        launcher = server.launcher
        # Only requests start the stub again. The pause before the next try is short at first.
        assert _refused(client, why)
        (folder / elsewhere).rename(folder / there)
        wait_until(lambda: _answers(lambda: client.order("nothing")), TIMEOUT_S)
        assert server.launcher == launcher
    finally:
        client.close()
        server.stop()
    assert server.exit_code == 0


def _refused(client: Client, why: str) -> bool:
    """Tell if a request gets an error that says this."""
    try:
        client.order("nothing")
    except InferenceServerException as error:
        return why in str(error)
    return False


@pytest.mark.promise(
    "Executing in a tritonserver",
    "Models that are loaded and unloaded leave no thread, file, mapping or process in the server.",
)
def test_models_leave_nothing_behind(client: Client, server: HostingServer) -> None:
    # Wait for the models whose stubs other tests have ended.
    for model in ("orders", "limited", "renewed"):
        wait_until(partial(_answers, partial(client.order, "nothing", model)), TIMEOUT_S)
    for model, shape in (("identity", [5]), ("batched", [1, 5])):
        wait_until(partial(_answers, partial(client.infer, model, np.ones(shape, np.uint8))))
    answers = client.stream()
    client.count(1)
    assert answers.get(timeout=TIMEOUT_S) == 0
    client.grpc.stop_stream()

    found = []
    for _ in range(3):
        client.unload("identity")
        found.append(server.facts())
        client.load("identity")
        client.infer("identity", np.ones(3 << 20, np.uint8))
    client.unload("identity")
    try:
        wait_until(lambda: server.has_no_more_than(found[1]), TIMEOUT_S, f"no more than {found}")
    finally:
        client.load("identity")


@pytest.mark.promise("Executing in a tritonserver", "The server survives the death of …")
def test_nothing_outlives_the_server(repository: Path, tmp_path: Path) -> None:
    server = HostingServer(interpreter(), repository, tmp_path, ["orders", "identity"])
    server.start()
    try:
        launcher = server.launcher
        left = [launcher, *children(launcher)]
        assert len(left) == 4  # two stubs, and the template from which they were forked
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: all(map(_is_gone, left)), TIMEOUT_S, "the stubs to end")
    finally:
        server.stop()


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except InferenceServerException:
        return False
    return True
