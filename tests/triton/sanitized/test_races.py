"""Threads of the server and of the library do not race: the library is built with the sanitizer for threads.

The sanitizer reports races in the server's log. A report fails the test during which it was written.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from tests.triton.answers import Answer
from tests.triton.backend import zoo
from tests.triton.backend.hosting import TIMEOUT_S, Client, children, tensor
from tests.triton.sanitized.server import OUTPUTS, THREADS, SanitizedServer, write_models
from tests.triton.triton_side import TritonSide
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

# The first test waits for the compiler.
pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(600),
    pytest.mark.promise(
        "The wire",
        "There is no race between the threads of tritonserver and of the library, while clients "
        "send, leave and cancel, models call others, load and unload, and stubs die or break "
        "the protocol.",
    ),
]
# The model asks other models several things at once, and answers with the amount that it received.
ASKS = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

def question(model, array):
    x = pb_utils.Tensor("X", array)
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["Y"], inputs=[x])

async def stream():
    responses = await question("counts", np.array([20])).async_exec(decoupled=True)
    return sum(len(response.output_tensors()) for response in responses)

async def whole(size):
    response = await question("identity", np.ones(size, np.uint8)).async_exec()
    return pb_utils.get_output_tensor_by_name(response, "Y").as_numpy().size

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for _ in requests:
            got = await asyncio.gather(stream(), whole(1), stream(), whole(300_000))
            y = pb_utils.Tensor("Y", np.array([sum(got)]))
            responses.append(pb_utils.InferenceResponse([y]))
        return responses
"""
GOT = 20 + 1 + 20 + 300_000
MODELS = ["identity", "orders", "counts", "asks", *OUTPUTS]
# There is one fault of each kind, and those that keep several threads at work.
FAULTS = [
    "garbage",
    "too few fields",
    "beyond the region",
    "an answer that bursts",
    "control garbage",
    "retires the only region",
    "responds twice",
    "responds from the request",
    "answers in advance",
    "floods growth",
    "floods releases",
    "floods the log",
    "floods with metrics",
    "grows beyond all",
    "calls garbage",
    "a call that is open",
    "lets go twice",
    "floods calls",
    "closes the work channel",
    "closes the control channel",
    "leaves a child",
    "dies",
]
OFTEN = 'parameters { key: "MOONPOOL_RESTART_WINDOW_S" value { string_value: "0.001" } }'
ROUNDS = 8
# Three streams have fewer responses than messages may wait in the stub. With more, it leaves out log lines, and a test
# waits for one.
COUNT = 300
X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SanitizedServer]:
    repository = tmp_path_factory.mktemp("races")
    zoo.write(repository, ["identity", "orders", "counts"])
    config = repository / "identity" / "config.pbtxt"
    config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_CPU count: 3") + OFTEN)
    # Some of the faults are ended by nothing else.
    write_models(repository, timeout_s=2)
    (repository / "asks" / "1").mkdir(parents=True)
    (repository / "asks" / "1" / "model.py").write_text(ASKS)
    (repository / "asks" / "config.pbtxt").write_text(zoo.MODELS["orders"][0])
    server = SanitizedServer(THREADS, repository, tmp_path_factory.mktemp("server"), MODELS)
    server.start()
    yield server
    heard = len(server.log())
    server.stop()
    fail_if_reported(server, heard)


@pytest.fixture(autouse=True)
def _no_race(server: SanitizedServer) -> Iterator[None]:
    heard = len(server.log())
    yield
    fail_if_reported(server, heard)


def fail_if_reported(server: SanitizedServer, heard: int) -> None:
    """Fail the test if the sanitizer has reported a race since then."""
    _, found, text = server.log()[heard:].partition("WARNING: ThreadSanitizer")
    if found:
        pytest.fail(found + text[:6000], pytrace=False)


@pytest.fixture
def client(server: SanitizedServer) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.close()


@contextmanager
def asked(client: Client, threads: int = 4) -> Iterator[set[str]]:
    """Meanwhile `identity` is asked again and again; what was said instead of an answer, in the end."""
    is_over, refusals, answered = Event(), set[str](), Counter[int]()

    def ask(number: int) -> None:
        while not is_over.is_set():
            array = np.full(1 + 100_000 * (answered[number] % 4), number, np.uint8)
            try:
                assert np.array_equal(client.infer("identity", array), array)
                answered[number] += 1
            except InferenceServerException as error:
                refusals.add(error.message())
                is_over.wait(0.01)

    with ThreadPoolExecutor(threads) as pool:
        asking = [pool.submit(ask, number) for number in range(threads)]
        try:
            wait_until(lambda: len(answered) == threads, TIMEOUT_S, "each to be answered once")
            yield refusals
        finally:
            is_over.set()
        for each in asking:
            each.result()


def at_once(count: int, do: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(do, range(count)))


def test_instances_that_execute(client: Client) -> None:
    def ask(number: int) -> bool:
        sizes = [0, 7, 100_000, 3 << 20] * 10
        arrays = [np.full(size, number, np.uint8) for size in sizes]
        return all(np.array_equal(client.infer("identity", array), array) for array in arrays)

    assert all(at_once(6, ask))


def test_responses_after_their_batch_and_clients_that_leave(server: SanitizedServer) -> None:
    def count(number: int) -> list[int]:
        client = Client(server)
        answers = client.stream()
        client.count(-1 if number == 0 else COUNT)
        got = [answers.get(timeout=TIMEOUT_S) for _ in range(1 if number == 0 else COUNT)]
        client.grpc.stop_stream(cancel_requests=number == 0)
        client.close()
        return got

    said = server.log().count("was cancelled")
    assert at_once(4, count) == [[0], *[[*range(COUNT)]] * 3]
    wait_until(lambda: server.log().count("was cancelled") > said, TIMEOUT_S, "the model to hear")


def test_a_request_that_executes_and_is_cancelled(client: Client, server: SanitizedServer) -> None:
    said, waited = server.log().count("was cancelled"), server.log().count("waits")
    with asked(client, 1):
        order = [tensor(np.array(["wait"], object))]
        left = client.grpc.async_infer("orders", order, lambda *_: None)
        wait_until(lambda: server.log().count("waits") > waited, TIMEOUT_S, "the model to get it")
        left.cancel()
        wait_until(lambda: server.log().count("was cancelled") > said, TIMEOUT_S, "it to hear")
    assert client.order("nothing") > 0


def test_models_that_ask_for_others(client: Client) -> None:
    assert at_once(3, lambda _: [client.order("", "asks") for _ in range(20)]) == [[GOT] * 20] * 3


def stubs_of(server: SanitizedServer, model: str) -> set[int]:
    found = set()
    for stub in (stub for launcher in children(server.pid) for stub in children(launcher)):
        # Some processes end while they are being inspected.
        with suppress(OSError):
            if f"{model}_0_" in Path(f"/proc/{stub}/cmdline").read_text():
                found.add(stub)
    return found


def test_processes_that_are_killed(client: Client, server: SanitizedServer) -> None:
    with asked(client) as refusals:
        for _ in range(ROUNDS):
            before = wait_until(lambda: stubs_of(server, "identity"), TIMEOUT_S, "a process")
            os.kill(min(before), signal.SIGKILL)
            wait_until(lambda: stubs_of(server, "identity") - before, TIMEOUT_S, "another one")  # noqa: B023
    assert all("killed by SIGKILL" in text for text in refusals), refusals


def test_a_model_that_comes_and_goes_while_it_is_asked(client: Client) -> None:
    with asked(client) as refusals:
        for _ in range(ROUNDS):
            client.unload("identity")
            client.load("identity")
    assert all(text.startswith("Request for unknown model") for text in refusals), refusals


def test_stubs_that_break_the_protocol(client: Client, server: SanitizedServer) -> None:
    side = TritonSide(server)
    with asked(client, 1):
        for fault in FAULTS:
            side.infer("rogue", {"X": X}, request_id=fault)
            wait_until(lambda: isinstance(side.infer("rogue", {"X": X}), Answer), TIMEOUT_S, "another process")
    side.close()


def test_launchers_that_are_killed(client: Client, server: SanitizedServer) -> None:
    with asked(client):
        for _ in range(2):
            before = set(children(server.pid))
            for launcher in before:
                os.kill(launcher, signal.SIGKILL)
            wait_until(lambda: set(children(server.pid)) - before, TIMEOUT_S, "another launcher")  # noqa: B023
            wait_until(lambda: stubs_of(server, "identity"), TIMEOUT_S, "its stubs")
