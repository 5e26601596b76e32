"""Runs chaos through a real server: clients of both protocols ask while stubs are killed, stopped and starved."""

from __future__ import annotations

import contextlib
import faulthandler
import http.client
import json
import random
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.chaos.figures import Figures, figures_of, rss_bytes
from tests.chaos.monkey import Monkey
from tests.chaos.tally import DEATH, MEMORY, PATIENCE_S, Tally, Wrong
from tests.server import repositories
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

pytestmark = pytest.mark.promise("Chaos", "This holds through a server, too, over HTTP and gRPC.")

WARM_UP_S = 5.0
SETTLED_S = 120.0
# The figures must stay the same for some tenths of a second.
READINGS = 20
# This is the growth of `test_chaos`, and the memory that clients of both protocols leave in the allocator.
GROWTH_BYTES = 32 << 20
CALLERS = 4
MODELS = ("standard", "strict")
OPTIONS = {"MAX_RESTARTS": "1000000", "RESTART_BACKOFF_S": "0", "RESTART_BACKOFF_MAX_S": "0", "EXECUTE_TIMEOUT_S": "1"}

Ask = Callable[[str, list[float]], list[float]]


class Refused(Exception):
    """The server answered with an error; `text` is its text."""


def configuration(level: str) -> str:
    lines = [
        f'parameters {{ key: "MOONPOOL_{key}" value: {{ string_value: "{value}" }} }}'
        for key, value in {**OPTIONS, "SANDBOX": level}.items()
    ]
    return "\n".join([repositories.CONFIG, "dynamic_batching { }", *lines])


@contextlib.contextmanager
def over_http(server: RunningServer) -> Iterator[Ask]:
    """Make one connection, which must live as long as its caller."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=PATIENCE_S)

    def ask(model: str, values: list[float]) -> list[float]:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": values}
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        response = connection.getresponse()
        said = json.loads(response.read())
        if response.status != 200:
            raise Refused(said["error"])
        data: list[float] = said["outputs"][0]["data"]
        return data

    with contextlib.closing(connection):
        yield ask


@contextlib.contextmanager
def over_grpc(server: RunningServer) -> Iterator[Ask]:
    from tritonclient.grpc import InferenceServerClient, InferInput
    from tritonclient.utils import InferenceServerException

    client = InferenceServerClient(server.grpc)

    def ask(model: str, values: list[float]) -> list[float]:
        tensor = InferInput("IN", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.array([values], np.float32))
        try:
            result = client.infer(model, [tensor], client_timeout=PATIENCE_S)
        except InferenceServerException as error:
            raise Refused(error.message()) from None
        data: list[float] = result.as_numpy("OUT")[0].tolist()
        return data

    with contextlib.closing(client):
        yield ask


def call_on(ask: Ask, tally: Tally, dice: random.Random, stop: threading.Event) -> None:
    while not stop.is_set():
        first = float(dice.randrange(1 << 22))
        model, values = dice.choice(MODELS), [first, first + 1, first + 2, first + 3]
        with tally.request(model, "over the network"):
            found = ask(model, values)
            if found != values:
                raise Wrong(f"{found} and not {values}")


def lap(server: RunningServer, seed: int, seconds: float) -> tuple[Tally, Monkey]:
    tally = Tally({"Refused": f"{DEATH}|{MEMORY}"})
    monkey = Monkey(server.process.pid, random.Random(seed))
    stop = threading.Event()
    with contextlib.ExitStack() as clients:
        threads = []
        for number in range(2 * CALLERS):
            ask = clients.enter_context((over_http, over_grpc)[number % 2](server))
            dice = random.Random(f"{seed} {number}")
            threads.append(threading.Thread(target=call_on, args=(ask, tally, dice, stop)))
            threads[-1].start()
        try:
            monkey.harm_for(seconds)
        finally:
            stop.set()
            for thread in threads:
                thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads), f"a request hangs: {tally}"
    tally.check()
    return tally, monkey


def answers(server: RunningServer) -> bool:
    """Return True if a stub of each model runs, and none is starting."""
    values = [1.0, 2.0, 3.0, 4.0]
    with over_http(server) as ask, contextlib.suppress(Refused):
        return all(ask(model, values) == values for model in MODELS)
    return False


def open_files(server: RunningServer) -> int:
    """Return the number of descriptors that the server reports."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=PATIENCE_S) as page:
        (found,) = re.findall(r"^process_open_fds (\d+)", page.read().decode(), re.MULTILINE)
    return int(found)


def settled(server: RunningServer) -> Figures:
    """Return the figures of the server once they do not change any more."""
    wait_until(lambda: answers(server), SETTLED_S)
    readings: list[Figures] = []

    def is_at_rest() -> bool:
        readings.append(figures_of(server.process.pid, lambda: open_files(server)))
        return readings[-READINGS:] == [readings[-1]] * READINGS

    wait_until(is_at_rest, SETTLED_S)
    return readings[-1]


def differs(now: Figures, before: Figures) -> bool:
    """Return True if the figures are larger or smaller than before.

    A protocol goes on watching the socket of a stub that it waited on, under a duplicated descriptor.
    """
    sockets = now.descriptors["socket"] - before.descriptors["socket"]
    same = now._replace(descriptors=now.descriptors | {"socket": before.descriptors["socket"]})
    return same != before or abs(sockets) > 2 * len(MODELS)


def check_returned(server: RunningServer, wanted: Figures) -> None:
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not differs(settled(server), wanted), SETTLED_S)
    now = settled(server)
    assert not differs(now, wanted), f"{now} and not {wanted}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_server_answers_every_request_whatever_becomes_of_its_stubs(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    faulthandler.cancel_dump_traceback_later()
    seed, seconds = pytestconfig.option.chaos_seed, pytestconfig.option.chaos_seconds
    for level in MODELS:
        repositories.write(tmp_path, level, config=configuration(level))
    with running(f"--model-repository={tmp_path}") as server:
        lap(server, seed + 1, min(WARM_UP_S, seconds))
        before, before_bytes = settled(server), rss_bytes(server.process.pid)

        tally, monkey = lap(server, seed, seconds)

        check_returned(server, before)
        grown = rss_bytes(server.process.pid) - before_bytes
        with capsys.disabled():
            sys.stdout.write(
                f"\nseed {seed}, {seconds:g} s: {tally}\nharm: {dict(monkey.harms)}; "
                f"RSS {before_bytes >> 10} KiB, {grown >> 10} KiB more\n"
            )
        assert grown < GROWTH_BYTES
