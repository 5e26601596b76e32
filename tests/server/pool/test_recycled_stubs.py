"""Instances that are recycled while several processes send them batches."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.e2e.hosting import hosted, options
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.pool.visitors import SHARED, SHARED_CONFIG, Hall, visiting
from tests.server.repositories import CONFIG, write
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.server.pool import directory as directories
from moonpool.runtime.server.pool.directory import Directory
from moonpool.runtime.server.pool.messages import Word

RECYCLED = """
parameters [{ key: "MOONPOOL_RECYCLE_REQUESTS" value { string_value: "40" } }]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("repository")
    write(folder, "echo", config=CONFIG + RECYCLED)
    with running(folder, "--frontends=2") as server:
        yield server


def recycles(server: RunningServer) -> int:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        text = response.read().decode()
    pattern = r'moonpool_instance_recycles_total\{.*reason="requests".*\} (\d+)'
    return sum(int(count) for count in re.findall(pattern, text))


@pytest.mark.promise(
    "Limits",
    "With several front ends no request is lost when an instance is recycled, and the "
    "requests of all of them count.",
)
def test_no_request_is_lost_when_a_stub_of_several_front_ends_is_recycled(
    server: RunningServer,
) -> None:
    wrong: list[object] = []

    def client(first: int) -> None:
        connection = http.client.HTTPConnection(server.http, timeout=60)
        for number in range(first, first + 60):
            x = [float(number + i) for i in range(4)]
            tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": x}
            body = json.dumps({"inputs": [tensor]})
            connection.request("POST", "/v2/models/echo/infer", body)
            answer = json.loads(connection.getresponse().read())
            if answer.get("outputs", [{}])[0].get("data") != x:
                wrong.append(answer)
        connection.close()

    threads = [threading.Thread(target=client, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    # The clients send 240 requests. A front end reports every second one, and goes on while others finish.
    wait_until(lambda: recycles(server) >= 3, 60.0)
    assert recycles(server) <= 6


@pytest.mark.promise("Limits", "With several front ends no request …")
def test_a_front_end_finishes_what_a_stub_has_before_it_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall, gate = Hall(), tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("GATE", str(gate))
    with (
        moonpool.Runtime(_sharing=hall) as runtime,
        hosted(runtime, "shared", SHARED, {**SHARED_CONFIG, **options(ENVIRONMENT="GATE")}),
        visiting(hall, "shared") as visitor,
    ):
        assert visitor.infer("twice", 1, 2).tolist() == [2, 4]
        asked = threading.Thread(target=visitor.infer, args=("until told", 1))
        asked.start()
        wait_until(visitor.has_sent)
        left = threading.Event()
        visitor.on_reactor(lambda: visitor.model.leave(0, left.set))
        assert visitor.model.has(0)
        assert not left.is_set()
        gate.unlink()
        asked.join(60.0)
        assert left.wait(60.0)
        assert not visitor.model.has(0)
        assert visitor.lost == []
        visitor.on_reactor(lambda: visitor.model.leave(0, left.set))


def test_a_front_end_tells_how_many_requests_a_stub_has_executed() -> None:
    hall = Hall()
    with (
        moonpool.Runtime(_sharing=hall) as runtime,
        hosted(runtime, "shared", SHARED, {**SHARED_CONFIG, **options(RECYCLE_REQUESTS=32)}),
        visiting(hall, "shared") as visitor,
    ):
        for _ in range(5):
            visitor.infer("twice", 1)
        wait_until(lambda: visitor.served == [(0, 2), (0, 2)])


class Friend:
    """A front end as the directory sees it, which keeps its messages for the test."""

    name = "friend"

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.is_killed = False
        self.process = self

    def kill(self) -> None:
        self.is_killed = True

    def send(self, *message: object, fds: tuple[int, ...] = ()) -> None:
        self.told.append(message)
        for fd in fds:
            os.close(fd)

    def send_with_file(self, *message: object, contents: object) -> None:  # noqa: ARG002
        self.told.append(message)

    def count(self, word: Word) -> int:
        return sum(message[0] == word for message in self.told)


def test_a_front_end_that_released_a_recycled_stub_is_let_in_again() -> None:
    directory = Directory()
    quick, slow = Friend(), Friend()
    for friend in (quick, slow):
        directory.add(friend)  # type: ignore[arg-type]
    with (
        moonpool.Runtime(_sharing=directory) as runtime,
        hosted(runtime, "shared", SHARED, SHARED_CONFIG),
    ):
        stub = runtime._models.find("shared").supervisor.records[0].instance.state
        (number,) = [message[2] for message in quick.told if message[0] == Word.STUB]

        def withdraw(timeout_s: float, *friends: Friend) -> bool:
            told = [friend.count(Word.LEAVE) for friend in (quick, slow)]
            with ThreadPoolExecutor() as pool:
                asked = pool.submit(directory.withdraw, stub, timeout_s)
                wait_until(lambda: quick.count(Word.LEAVE) > told[0])
                wait_until(lambda: slow.count(Word.LEAVE) > told[1])
                for friend in friends:
                    directory.receive(friend, [Word.LEFT, number])  # type: ignore[arg-type]
                return asked.result(60.0)

        assert not withdraw(0.2, quick)
        assert (quick.count(Word.STUB), slow.count(Word.STUB)) == (2, 1)
        directory.receive(slow, [Word.LEFT, number])  # type: ignore[arg-type]
        assert slow.count(Word.STUB) == 2
        assert withdraw(30.0, quick, slow)
        late = Friend()
        directory.add(late)  # type: ignore[arg-type]
        assert late.count(Word.STUB) == 0, "it is about to end"
        for friend in (quick, slow, late):
            directory.remove(friend)  # type: ignore[arg-type]


@pytest.mark.promise(
    "At the limits",
    "A stub that cannot be shared with a front end, because descriptors are used up, does not start, "
    "and may later.",
)
def test_a_stub_for_which_there_are_no_descriptors_does_not_start_and_may_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, friend = Directory(), Friend()
    directory.add(friend)  # type: ignore[arg-type]
    with moonpool.Runtime(_sharing=directory) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(directories, "socket", sockets(1))
            with pytest.raises(
                moonpool.LoadFailed, match="cannot be shared with friend: Too many open"
            ):
                runtime.load("shared", SHARED, config=SHARED_CONFIG)
        assert friend.count(Word.STUB) == 0
        runtime.load("shared", SHARED, config=SHARED_CONFIG)
        assert friend.count(Word.STUB) == 1
        directory.remove(friend)  # type: ignore[arg-type]


def test_a_front_end_for_which_there_are_no_descriptors_is_told_nothing_and_may_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, friend = Directory(), Friend()
    with moonpool.Runtime(_sharing=directory) as runtime:
        runtime.load("shared", SHARED, config=SHARED_CONFIG)
        with monkeypatch.context() as patch:
            patch.setattr(directories, "socket", sockets(0))
            with pytest.raises(moonpool.LoadFailed, match=r"raise the limit of open files"):
                directory.add(friend)  # type: ignore[arg-type]
        directory.add(friend)  # type: ignore[arg-type]
        assert friend.count(Word.STUB) == 1
        directory.remove(friend)  # type: ignore[arg-type]


def test_a_front_end_that_cannot_have_its_stub_again_is_ended_and_others_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, first, second = Directory(), Friend(), Friend()
    with moonpool.Runtime(_sharing=directory) as runtime:
        for friend in (first, second):
            directory.add(friend)  # type: ignore[arg-type]
        runtime.load("shared", SHARED, config=SHARED_CONFIG)
        (number,) = [message[2] for message in first.told if message[0] == Word.STUB]
        monkeypatch.setattr(directories, "socket", sockets(2))
        for friend in (first, second):
            # Nobody waits for it any more.
            directory.receive(friend, [Word.LEFT, number])  # type: ignore[arg-type]
        assert [friend.count(Word.STUB) for friend in (first, second)] == [2, 1]
        assert [friend.is_killed for friend in (first, second)] == [False, True]
        for friend in (first, second):
            directory.remove(friend)  # type: ignore[arg-type]


def sockets(pairs: int) -> Any:
    """Return a module that makes so many pairs of sockets, and no more."""
    left = iter(range(pairs))

    def socketpair(*arguments: int) -> tuple[socket.socket, socket.socket]:
        if next(left, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return socket.socketpair(*arguments)

    return SimpleNamespace(
        socketpair=socketpair, AF_UNIX=socket.AF_UNIX, SOCK_SEQPACKET=socket.SOCK_SEQPACKET
    )
