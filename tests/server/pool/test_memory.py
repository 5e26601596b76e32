"""All memory that the main process and the front ends give to a stub has one limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, cast

import pytest
from tests.e2e.hosting import ECHO, MODELS, options
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401

import moonpool
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.server.pool import borrowed_memory
from moonpool.runtime.server.pool.borrowed_memory import BorrowedMemory, MemoryClient
from moonpool.runtime.server.pool.directory import Directory
from moonpool.runtime.server.pool.messages import Word

pytestmark = pytest.mark.promise(
    "Front ends",
    "All memory that a stub is given, by the main process and by front ends, has one limit, "
    "also while some of them end.",
)

MiB = 1 << 20


class FrontEnd:
    """A front end in this process: the directory's end of it, and its own client of memory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.model = self.stub = 0
        self.client = MemoryClient(lambda *message: directory.receive(cast(Any, self), [*message]))
        self.told: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        directory.add(cast(Any, self))

    def send(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        if message[0] == Word.SET_ASIDE:
            self.client.answered(list(fds), *message[1:])
            return
        for fd in fds:
            os.close(fd)
        if message[0] == Word.STUB:
            self.model, self.stub = message[1:3]

    def send_with_file(self, *_: object, contents: object) -> None:
        del contents

    def memory(self, writer: Side, *, of_callers: bool = False) -> BorrowedMemory:
        return BorrowedMemory(self.client, self.model, 0 if of_callers else self.stub, writer, None)

    def leave(self) -> None:
        self._directory.remove(cast(Any, self))


@pytest.fixture
def directory() -> Iterator[Directory]:
    directory = Directory()
    with moonpool.Runtime() as runtime:
        runtime._models.stubs.sharing = directory
        limits = {"SANDBOX": "strict", "REGION_LIMIT_BYTES": 8 * MiB}
        runtime.load("echo", MODELS / "echo.py", config=ECHO | options(**limits))
        yield directory


@pytest.mark.parametrize("writer", Side)
def test_one_limit_is_over_all_who_give_a_stub_memory(directory: Directory, writer: Side) -> None:
    first, second = FrontEnd(directory), FrontEnd(directory)
    region = first.memory(writer).region(0, 4 * MiB)
    assert region.size_bytes == 4 * MiB
    with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
        second.memory(writer).region(0, 4 * MiB)

    file = os.fstat(region.fd).st_ino
    first.memory(writer).retire(region)
    again = second.memory(writer).region(0, 4 * MiB)
    assert os.fstat(again.fd).st_ino == file
    again.close()

    # The model may have kept the region of the front end that has gone. So no other one gets it, and it still counts.
    second.leave()
    with pytest.raises(OutOfMemory, match="kept by the process"):
        first.memory(writer).region(0, 4 * MiB)
    first.leave()


def test_those_who_write_in_place_have_one_limit_as_well(directory: Directory) -> None:
    first, second = FrontEnd(directory), FrontEnd(directory)
    region = first.memory(Side.RUNTIME, of_callers=True).region(0, 5 * MiB)
    with pytest.raises(OutOfMemory):
        second.memory(Side.RUNTIME, of_callers=True).region(0, 5 * MiB)
    first.memory(Side.RUNTIME, of_callers=True).retire(region)
    first.leave()
    second.memory(Side.RUNTIME, of_callers=True).region(0, 5 * MiB).close()
    second.leave()


def test_a_stub_that_is_gone_gets_no_memory(directory: Directory) -> None:
    member = FrontEnd(directory)
    member.stub = 1000
    with pytest.raises(OutOfMemory, match="the stub is gone"):
        member.memory(Side.STUB).region(0, MiB)
    member.leave()


def test_an_answer_that_comes_too_late_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowed_memory, "_ANSWER_S", 0.0)
    told: list[tuple[Any, ...]] = []
    client = MemoryClient(lambda *message: told.append(message))
    memory = BorrowedMemory(client, 1, 2, Side.STUB, None)
    with pytest.raises(OutOfMemory, match="no memory aside in time"):
        memory.region(0, 4096)
    word, question, *place, _, _ = told.pop()
    assert word == Word.MEMORY

    region = SharedRegion.create(1, 4096)
    client.answered([os.dup(region.fd)], question, 4096, "")
    client.answered([os.dup(region.fd)], question, 4096, "")

    region.close()
    assert told == [(Word.RETURNED, *place)]
