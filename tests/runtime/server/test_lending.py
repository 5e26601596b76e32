"""Memory of clients that stubs get as it is: real objects, real stubs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from tests.inside import hosted_in
from tests.runtime.server.outcomes import outcome_of
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.tensors import CODES
from moonpool.runtime.errors import ModelError
from moonpool.runtime.model.request import Response, WireTensor
from moonpool.runtime.server import service
from moonpool.runtime.server.inference.request import make_request
from moonpool.runtime.server.service import Service
from moonpool.runtime.stubs.regions import is_clients

_MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.last = np.zeros(1, np.float32)

    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(r, "X").as_numpy()) for r in requests]

    def one(self, x):
        {body}
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
_BODIES = {
    "gives_back": "y = x",
    "shifts": "y = np.roll(x, 1)",
    "writes": "x += 1; y = x",
    "keeps": "y, self.last = self.last, x",
    "doubles": "y = np.concatenate([x, x])",
}
_COUNT = 1 << 16
_BYTES = 4 * _COUNT
FP32 = CODES["FP32"]


class Client:
    """An object with room for two tensors, registered, and a server's view of it."""

    def __init__(self, folder: Path) -> None:
        for name, body in _BODIES.items():
            file = folder / name / "1" / "model.py"
            file.parent.mkdir(parents=True)
            file.write_text(_MODEL.format(body=body))
            (file.parents[1] / "config.pbtxt").write_text(
                'backend: "python"\n'
                'input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]\n'
                'output [{ name: "Y" data_type: TYPE_FP32 dims: [-1] }]\n'
                "instance_group [{ kind: KIND_CPU }]\n"
            )
        self.key = f"/moonpool-lending-{os.getpid()}"
        self.path = Path("/dev/shm") / self.key[1:]
        memory = posix_ipc.SharedMemory(self.key, posix_ipc.O_CREX, 0o600, 2 * _BYTES)
        memory.close_fd()
        self.seen = np.memmap(self.path, np.float32)
        self.runtime = moonpool.Runtime(folder)
        self.service = Service(self.runtime)
        self.service.shared_memory.register("all", self.key, 0, 2 * _BYTES)

    def load(self, model: str) -> Any:
        self.runtime.load(model)
        return hosted_in(self.runtime, model)

    def infer(self, hosted: Any, output: int = _BYTES, room: int = _BYTES) -> tuple[Any, dict[str, Any]]:
        """The outcome for the tensor at the beginning, and its outputs in the end."""
        place = ("all", output, room)
        x = self.service.read_shared(hosted.model, "X", FP32, [_COUNT], ("all", 0, _BYTES))
        request = make_request(hosted, {"X": x})
        self.service.lend_targets(hosted.model, request, {"Y": place})
        outcome = outcome_of(hosted, request)
        outputs: dict[str, Any] = outcome.outputs if isinstance(outcome, Response) else {}
        if "Y" in outputs:
            self.service.write_shared("Y", outputs["Y"], place)
        return outcome, outputs

    def close(self) -> None:
        del self.seen
        self.service.shared_memory.unregister()
        self.runtime.close()
        posix_ipc.unlink_shared_memory(self.key)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(tmp_path)
    yield made
    made.close()


def ramp(start: float) -> np.ndarray[Any, Any]:
    return np.arange(start, start + _COUNT, dtype=np.float32)


def is_copied(client: Client, hosted: Any) -> bool:
    """Return true if the server copies the client's input."""
    x = client.service.read_shared(hosted.model, "X", FP32, [_COUNT], ("all", 0, _BYTES))
    assert not isinstance(x, WireTensor)
    return not is_clients(x)


@pytest.mark.promise(
    "Memory of clients that is lent",
    "Large tensors in a client's shared memory are read and written there by the model's "
    "process; the server copies nothing.",
)
def test_a_model_reads_and_writes_the_client_s_memory_and_nothing_is_copied_here(client: Client) -> None:
    hosted = client.load("gives_back")
    for start in (1, 5):
        client.seen[:_COUNT] = ramp(start)
        _, outputs = client.infer(hosted)
        assert is_clients(outputs["Y"].raw)
        assert np.array_equal(client.seen[_COUNT:], ramp(start))


@pytest.mark.promise(
    "Memory of clients that is lent",
    "If a model writes into such an input, the client's memory does not change, and the "
    "next request gets the client's bytes.",
)
def test_a_model_s_writes_to_its_input_do_not_reach_the_client(client: Client) -> None:
    hosted = client.load("writes")
    for start in (1, 5, 9):
        client.seen[:_COUNT] = ramp(start)
        client.infer(hosted)
        assert np.array_equal(client.seen[_COUNT:], ramp(start + 1))
        assert np.array_equal(client.seen[:_COUNT], ramp(start))


@pytest.mark.promise(
    "Memory of clients that is lent",
    "If a model keeps such an input, it stays as it was, whatever the client writes to its memory later.",
)
def test_a_kept_input_does_not_change_when_the_client_goes_on(client: Client) -> None:
    hosted = client.load("keeps")
    client.seen[:_COUNT] = ramp(0)
    client.infer(hosted)
    for start in (1, 2, 3):
        client.seen[:_COUNT] = ramp(start)
        client.infer(hosted)
        assert np.array_equal(client.seen[_COUNT:], ramp(start - 1))


@pytest.mark.promise(
    "Memory of clients that is lent",
    "An output may go into the same memory as an input. An output that is larger than its place is an error.",
)
@pytest.mark.parametrize("output", [0, _BYTES // 2])
def test_an_output_may_go_where_the_input_is(client: Client, output: int) -> None:
    hosted = client.load("shifts")
    client.seen[:_COUNT] = ramp(0)

    client.infer(hosted, output)

    begin = output // 4
    assert np.array_equal(client.seen[begin : begin + _COUNT], np.roll(ramp(0), 1))


@pytest.mark.promise("Memory of clients that is lent", "An output may go into the …")
def test_an_output_that_is_larger_than_its_place_is_told(client: Client) -> None:
    hosted = client.load("doubles")
    client.seen[_COUNT:] = 7

    with pytest.raises(ModelError, match="should be at least"):
        client.infer(hosted)
    assert (client.seen[_COUNT:] == 7).all()


@pytest.mark.promise(
    "Memory of clients that is lent",
    "Memory is lent only if it belongs to the server's user and nobody else may write to "
    "it, and never to models at `strict`.",
)
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_object_that_others_may_truncate_is_copied(client: Client, mode: int) -> None:
    hosted = client.load("gives_back")
    assert not is_copied(client, hosted)
    client.path.chmod(mode)
    client.service.shared_memory.unregister("all")
    client.service.shared_memory.register("all", client.key, 0, 2 * _BYTES)
    assert is_copied(client, hosted)


@pytest.mark.promise("Memory of clients that is lent", "Memory is lent only if it …")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give an object away")
def test_an_object_of_another_user_is_copied(client: Client) -> None:
    hosted = client.load("gives_back")
    os.chown(client.path, 65534, 65534)
    shared = client.service.shared_memory = type(client.service.shared_memory)([65534])
    shared.register("all", client.key, 0, 2 * _BYTES)
    assert is_copied(client, hosted)


@pytest.mark.promise("Memory of clients that is lent", "Memory is lent only if it …")
@pytest.mark.parametrize(
    "changes",
    [{"sandbox": "best-effort"}, {"sandbox": "strict"}, {"memory_limit_bytes": 1 << 40}],
    ids=["best-effort", "strict", "limited"],
)
def test_a_model_that_is_kept_apart_gets_a_copy(client: Client, changes: dict[str, Any]) -> None:
    hosted = client.load("gives_back")
    hosted.model.options = dataclasses.replace(hosted.model.options, **changes)
    assert is_copied(client, hosted)


def cut_short(client: Client, hosted: Any) -> Any:
    """Cuts the object short under a request, and makes it as long as it was; the request's outcome."""
    x = client.service.read_shared(hosted.model, "X", FP32, [_COUNT], ("all", 0, _BYTES))
    request = make_request(hosted, {"X": x})
    os.truncate(client.path, 4096)
    try:
        return outcome_of(hosted, request)
    finally:
        os.truncate(client.path, 2 * _BYTES)


@pytest.mark.promise(
    "Memory of clients that is lent",
    "If a client truncates lent memory, the requests of one instance fail and the "
    "instance is started again. The server is not harmed.",
)
def test_a_client_that_cuts_its_memory_short_costs_the_stub_and_not_the_server(client: Client) -> None:
    hosted = client.load("gives_back")
    client.seen[:_COUNT] = ramp(0)
    client.infer(hosted)
    x = client.service.read_shared(hosted.model, "X", FP32, [_COUNT], ("all", 0, _BYTES))
    request = make_request(hosted, {"X": x})
    os.truncate(client.path, 4096)

    outcome = outcome_of(hosted, request)

    assert "SIGBUS" in str(outcome)
    with pytest.raises(moonpool.InvalidRequest, match="shorter now"):
        client.infer(hosted)
    fine = make_request(hosted, {"X": ramp(0)})
    assert isinstance(outcome_of(hosted, fine), Response)


@pytest.mark.promise(
    "Memory of clients that is lent",
    "Clients cannot make the runtime give up a model by truncating their memory: such a "
    "death of an instance does not count. From then on tensors in memory of clients are "
    "copied for that model, until it is loaded again.",
)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_clients_that_go_on_cutting_their_memory_short_do_not_get_the_model_given_up(
    tmp_path: Path, client: Client, caplog: pytest.LogCaptureFixture, is_mapped: bool
) -> None:
    config = tmp_path / "gives_back" / "config.pbtxt"
    # A single death of the model's own would make the server give it up.
    parameter = 'parameters { key: "MOONPOOL_MAX_RESTARTS" value { string_value: "0" } }'
    config.write_text(config.read_text() + parameter)
    hosted = client.load("gives_back")
    if is_mapped:
        client.infer(hosted)
    outcome = cut_short(client, hosted)
    assert "a client cut short the memory that its tensors lie in" in str(outcome)
    assert "until model 'gives_back' is loaded again" in caplog.text
    wait_until(lambda: client.runtime.instances("gives_back")[0]["state"] == "READY")

    # From now on clients truncate memory that the server copies.
    for _ in range(8):
        client.seen[:_COUNT] = ramp(1)
        assert isinstance(cut_short(client, hosted), Response)

    (shown,) = client.runtime.instances("gives_back")
    assert (shown["state"], shown["restarts"]) == ("READY", 1)
    # A death of the model's own still counts.
    os.kill(shown["pid"], signal.SIGBUS)
    wait_until(lambda: client.runtime.instances("gives_back")[0]["state"] == "FAILED")


@pytest.mark.promise("Memory of clients that is lent", "A stub forgets regions that were unregistered.")
def test_regions_that_come_and_go_leave_nothing_in_the_stub(client: Client) -> None:
    hosted = client.load("gives_back")
    client.infer(hosted)
    (pid,) = [each["pid"] for each in client.runtime.instances("gives_back")]
    before = sorted(descriptors(pid))
    for _ in range(5):
        client.service.shared_memory.unregister("all")
        client.service.shared_memory.register("all", client.key, 0, 2 * _BYTES)
        client.infer(hosted)
    wait_until(lambda: sorted(descriptors(pid)) == before)


def descriptors(pid: int) -> Sequence[str]:
    """Return the targets of the process's descriptors."""
    found = []
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{each}"))
    return found


@pytest.mark.promise(
    "Memory of clients that is lent",
    "Inputs in memory of clients that have to be copied take at most a quarter of the machine's memory, those of all "
    "requests together.",
)
def test_copies_for_all_requests_have_one_limit(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = client.load("gives_back")
    hosted.model.lends_clients_memory = False
    monkeypatch.setattr(service, "_MOST_COPIED_BYTES", _BYTES * 3 // 2)

    def read() -> Any:
        return client.service.read_shared(hosted.model, "X", FP32, [_COUNT], ("all", 0, _BYTES))

    client.seen[:_COUNT] = ramp(0)
    part = read()[5:7]
    with pytest.raises(OutOfMemory, match="bytes are copied at a time for models"):
        read()
    assert part.tolist() == [5, 6]
    del part
    request = make_request(hosted, {"X": read()})
    assert isinstance(outcome_of(hosted, request), Response)
