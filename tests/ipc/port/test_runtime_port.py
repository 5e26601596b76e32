"""The compiled port sends and reads what Python's way of a link does, and leaves the same behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.runtime import scripted
from tests.runtime.scripted import Pair, y
from tests.waiting import wait_until

from moonpool import ResponseAllocator
from moonpool.ipc import port
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import ORDINARY_MEMORY
from moonpool.runtime.process.threads import trusted_handlers
from moonpool.runtime.schedule.callers import response_of
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.stubs.regions import ClientRegion

PATIENCE_S = 60.0


class Allocator(ResponseAllocator):
    def alloc(self, *facts: Any) -> Any:
        return bytearray(facts[3])


@pytest.fixture(params=["compiled", "in Python"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair()
    made.link.port.is_plain = made.link.port.is_plain and request.param == "compiled"
    yield made
    made.close()


def test_a_response_apart_gives_back_its_block_once_whoever_has_its_memory(pair: Pair) -> None:
    (request,) = pair.execute([1.0])
    request.allocator = Allocator()
    places = []
    for value in (7.0, 8.0):
        block = pair.peer.place([value])
        places.append(tuple(block[:2]))
        row = [pair.peer.batch, 0, 0, [block], encode([y(1)]), None]
        _, response, _ = pair.link.response(row)
        assert response_of(response)["Y"].tolist() == [value]
        del response
        gc.collect()
    assert list(pair.link.released) == places


@pytest.mark.parametrize("elements", [1 << 18, (1 << 20) + 77])
def test_a_large_tensor_is_copied_whole(pair: Pair, elements: int) -> None:
    values = np.arange(elements, dtype=np.float32)
    pair.execute(values[::-1], values)
    assert np.array_equal(pair.peer.input(0, 0), values[::-1])
    assert np.array_equal(pair.peer.input(1, 0), values)


def _by_the_compiled_port() -> tuple[int, ...]:
    counts = port.compiled.counts() if port.compiled is not None else {}
    return tuple(counts.get(each, 0) for each in ("put", "take"))


def test_what_lies_in_memory_of_others_is_named_and_not_copied(pair: Pair) -> None:
    mine = pair.memory.empty((4,), np.dtype(np.float32), 16)
    mine[:] = [1, 2, 3, 4]
    clients = ClientRegion(256, os.memfd_create("of a client"))
    wanted = clients.lease(128, 64, lambda _: None, None)
    before = _by_the_compiled_port()
    requests = [pair.request(mine[1:]), pair.request([5, 6]), pair.request(mine)]
    requests[2].targets = {0: wanted}
    with trusted_handlers():  # else the reactor would do it
        pair.link.execute(requests)
    pair.peer.receive()
    inputs = [pair.peer.input(index, 0).tolist() for index in range(3)]
    assert inputs == [[2, 3, 4], [5, 6], [1, 2, 3, 4]]
    copied, *lent = pair.peer.blocks
    assert copied[2] == 8
    assert lent[0] == lent[1]
    assert pair.peer.targets == [[2, 0, clients.id, 128, 64]]
    target = [clients.id, 128, 16]
    pair.peer.answer([lent[0], copied, target], [[y(3, 0, 4)], [y(2, 1)], [y(4, 2)]])
    with trusted_handlers():
        first, second, third = (outputs["Y"] for outputs in pair.finish(requests))
    assert np.shares_memory(first, mine[1:])
    assert second.tolist() == [5, 6]
    assert np.shares_memory(third, wanted)
    # What stands for memory of a client can only be read, and another write than an error would end this process.
    assert not third.flags.writeable
    did = tuple(now - then for now, then in zip(_by_the_compiled_port(), before, strict=True))
    assert did == ((1, 1) if pair.link.port.is_plain else (0, 0))
    # Nothing is held any more but what its callers look at.
    assert pair.link.borrowed_blocks.count == 0
    del second
    assert pair.lent_bytes == 0
    clients.close()


def test_a_batch_all_of_which_lies_in_memory_of_others_is_sent_without_a_copy(pair: Pair) -> None:
    mine = pair.memory.empty((4,), np.dtype(np.float32), 16)
    mine[:] = [1, 2, 3, 4]
    pair.execute(mine)
    empty, _ = pair.peer.blocks
    assert empty[2] == 0
    assert pair.peer.input(0, 0).tolist() == [1, 2, 3, 4]
    assert pair.lent_bytes == 0


def test_an_answer_from_memory_that_was_not_lent_is_refused(pair: Pair) -> None:
    requests = pair.execute(pair.memory.empty((4,), np.dtype(np.float32), 16))
    region, offset, size = pair.peer.blocks[1]
    pair.peer.answer([[region, offset, size + 1]], [[y(4)]])
    with pytest.raises(RemoteProtocolError, match="not the stub's to answer from"):
        pair.link.finish(requests)


def test_an_answer_is_read_though_its_region_is_closed_meanwhile(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [pair.request(pair.memory.empty((4,), np.dtype(np.float32), 16)), pair.request([5])]
    requests[0].arrays[0][:] = 1
    with trusted_handlers():
        pair.link.execute(requests)
    pair.peer.receive()
    own = pair.peer.place([9])
    blocks = pair.link.borrowed_blocks
    open_one = blocks.open

    def opened(*place: int) -> Any:
        """Open a block as the reactor retires the region of another one."""
        pair.link.response_regions[own[0]].close()
        return open_one(*place)

    monkeypatch.setattr(blocks, "open", opened)
    pair.peer.answer([own, pair.peer.blocks[1]], [[y(1)], [y(4, 1)]])
    with trusted_handlers():
        first, second = (outputs["Y"].tolist() for outputs in pair.finish(requests))
    assert (first, second) == ([9], [1, 1, 1, 1])


def test_a_model_on_a_card_is_told_where_outputs_are_wanted(pair: Pair) -> None:
    pair.link.is_on_gpu = True
    request = pair.request([1, 2])
    request.wants_wire = True
    pair.link.execute([request])
    pair.peer.receive()
    sent = pair.peer.details
    assert sent is not None
    assert sent[0][-2] == ORDINARY_MEMORY


def test_a_block_that_a_call_is_about_to_hold_is_not_used_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = pair.link.borrowed_blocks
    requests = pair.execute([1, 2, 3, 4])
    place = pair.peer.blocks[0]
    is_inside, may_go_on, is_asked = threading.Event(), threading.Event(), threading.Event()
    find, end_batch = blocks._find, blocks.end_batch

    def find_slowly(where: tuple[int, int]) -> Any:
        found = find(where)
        is_inside.set()
        may_go_on.wait(PATIENCE_S)
        return found

    def end(held: Any) -> None:
        is_asked.set()
        end_batch(held)

    monkeypatch.setattr(blocks, "_find", find_slowly)
    monkeypatch.setattr(blocks, "end_batch", end)
    leases: list[Any] = []
    opens = threading.Thread(target=lambda: leases.append(pair.link.open(*place)))
    opens.start()
    is_inside.wait(PATIENCE_S)
    pair.peer.answer([pair.peer.place([9])], [[y(1)]])
    ends = threading.Thread(target=pair.finish, args=(requests,))
    ends.start()
    wait_until(lambda: is_asked.is_set() or not ends.is_alive(), PATIENCE_S)
    may_go_on.set()
    opens.join()
    ends.join()
    (lease,) = leases
    pair.execute([50, 60, 70, 80])
    assert np.frombuffer(lease[:16].tobytes(), np.float32).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [TimeoutError, ValueError])
def test_what_a_handler_raises_in_a_call_of_python_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    blocks = pair.link.borrowed_blocks
    allocate, alarms = blocks.allocate, [kind("the alarm of the program")]

    def interrupted(*given: Any, **named: Any) -> Any:
        if alarms:
            raise alarms.pop()
        return allocate(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "allocate", interrupted)
        with pytest.raises(kind):
            pair.link.execute([pair.request([1, 2])])
    assert blocks.count == 0
    assert pair.link.conversation.turn[0]
    pair.execute([1, 2])


def test_contained_models_are_spared_the_compiled_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_PURE", "contained")
    monkeypatch.setattr(scripted, "Link", lambda *given, **named: Link(*given, **{**named, "is_private": True}))
    pair = Pair()
    assert type(pair.link.port) is port.PythonPort
    assert not pair.link.port.is_plain
    pair.close()
