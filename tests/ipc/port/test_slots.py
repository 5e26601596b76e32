"""Tests of a work channel in memory: both ends, a peer that lies, what a peer can do to the memory, and the end."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.compiled import compiled
from tests.ipc.port.slot_model import stuck_states
from tests.waiting import wait_until

from moonpool.ipc.errors import Closed, LocalProtocolError, PeerGone, RemoteProtocolError
from moonpool.ipc.slots import SlotChannel, counts, offer, take

NATIVE = Path(__file__).parents[3] / "ipc" / "native"
MOST = 32 * 1024
PATIENCE_S = 30.0
SLOT = 4096 + MOST
# Where the words of a side lie.
SEQ, ANNOUNCED, ASLEEP, SIZE, CORE = 0, 8, 128, 256, 260

pytestmark = pytest.mark.skipif(SlotChannel is None, reason="it is not compiled")


class Liar:
    """The stub's end, of which a test writes every byte."""

    def __init__(self, fds: list[int]) -> None:
        self.readable, writable, self.bell, self.ring_fd = fds
        self.seen = mmap.mmap(self.readable, SLOT, prot=mmap.PROT_READ)
        self.memory = mmap.mmap(writable, SLOT)
        self._writable = writable
        self.write("<I", ASLEEP, 1)

    @property
    def asleep(self) -> int:
        """The word of the runtime's end."""
        return int(struct.unpack_from("<I", self.seen, ASLEEP)[0])

    def write(self, form: str, at: int, value: int) -> None:
        struct.pack_into(form, self.memory, at, value)

    def send(self, number: int, packet: bytes, size: int | None = None) -> None:
        self.memory[4096 : 4096 + len(packet)] = packet
        self.write("<I", SIZE, len(packet) if size is None else size)
        self.write("<Q", SEQ, number)

    def ring(self, times: int = 1) -> None:
        for _ in range(times):
            os.write(self.ring_fd, b"x")

    def close(self) -> None:
        self.seen.close()
        self.memory.close()
        for fd in (self.readable, self._writable, self.bell, self.ring_fd):
            os.close(fd)


def soon() -> int:
    """A deadline that passes in a moment."""
    return time.monotonic_ns() + 20_000_000


@pytest.fixture
def lied_to() -> Iterator[tuple[SlotChannel, Liar]]:
    offered = offer()
    assert offered is not None
    liar = Liar(offered[1])
    yield offered[0], liar
    offered[0].close()
    liar.close()


@pytest.fixture
def ends() -> Iterator[tuple[SlotChannel, SlotChannel]]:
    offered = offer()
    assert offered is not None
    ours, fds = offered
    theirs = take(fds, 0)
    assert theirs is not None
    yield ours, theirs
    ours.close()
    theirs.close()


def test_packets_arrive_in_turns(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, theirs = ends
    for size in (1, 150, MOST):
        ours.send(bytes([size % 251]) * size)
        assert theirs.receive() == bytes([size % 251]) * size
        assert ours.receive_ready() is None
        theirs.send_waiting(b"answer")
        assert ours.wait_until(None)
        assert ours.receive_ready() == b"answer"
    with pytest.raises(LocalProtocolError):
        ours.send(bytes(MOST + 1))


def test_a_wait_ends_at_its_deadline_and_loses_nothing(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, theirs = ends
    assert not ours.wait(soon(), 0)
    theirs.send(b"late")
    assert ours.wait(soon(), 0)
    assert ours.has_received
    assert ours.receive() == b"late"


def test_a_ring_without_a_packet_is_only_looked_at(lied_to: tuple[SlotChannel, Liar]) -> None:
    ours, liar = lied_to
    liar.ring(3)
    assert not ours.is_ready()
    liar.send(1, b"first")
    # It was not rung for, as if the peer believed that somebody looks.
    assert ours.is_ready()
    assert ours.receive() == b"first"


@pytest.mark.promise("The wire", "A stub that rings without sending, or sends what is no packet, is found out.")
@pytest.mark.parametrize(
    ("number", "size", "words"),
    [
        (1, MOST + 1, "more than 32768 bytes"),
        (1, 2**32 - 1, "more than 32768 bytes"),
        (1, 0, "is empty"),
        (2, 5, "out of turn"),
        (2**64 - 1, 5, "out of turn"),
    ],
)
def test_lies_about_a_packet_end_the_conversation(
    lied_to: tuple[SlotChannel, Liar], number: int, size: int, words: str
) -> None:
    ours, liar = lied_to
    liar.send(number, b"lies", size)
    liar.ring()
    with pytest.raises(RemoteProtocolError, match=words):
        ours.receive()
    # Whoever asks later is told the same, without a bell.
    assert ours.has_received
    assert ours.is_ready()


def test_a_flood_of_rings_ends_the_conversation(lied_to: tuple[SlotChannel, Liar]) -> None:
    ours, liar = lied_to
    rung = 0
    while not ours.is_ready():
        liar.ring()
        rung += 1
        assert rung <= 65
    with pytest.raises(RemoteProtocolError, match="rings without"):
        ours.receive()


def test_a_full_bell_stops_nobody(lied_to: tuple[SlotChannel, Liar]) -> None:
    ours, liar = lied_to
    liar.ring(4096)
    ours.send(b"question")
    # The peer's own bell, too: it does not read.
    for _ in range(4096):
        ours.send(b"again")
    ours.wake()
    with pytest.raises(PeerGone):
        ours.receive()


def test_a_peer_cannot_change_what_the_runtime_writes(lied_to: tuple[SlotChannel, Liar]) -> None:
    ours, liar = lied_to
    ours.send(b"question")
    assert liar.seen[4096:4104] == b"question"
    with pytest.raises(PermissionError):
        mmap.mmap(liar.readable, SLOT)
    with pytest.raises(PermissionError):
        os.pwrite(liar.readable, b"x", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(liar.readable, 0)
    again = os.open(f"/proc/self/fd/{liar.readable}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, SLOT)
    finally:
        os.close(again)


def test_a_peer_cannot_take_memory_away(lied_to: tuple[SlotChannel, Liar]) -> None:
    ours, liar = lied_to
    for size in (0, SLOT * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(liar._writable, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(liar._writable, 1033, 8)  # F_ADD_SEALS, F_SEAL_WRITE
    assert not ours.wait(soon(), 0)


def test_memory_that_may_shrink_is_not_taken() -> None:
    offered = offer()
    assert offered is not None
    ours, fds = offered
    os.close(fds[1])
    fds[1] = os.memfd_create("unsealed")
    os.ftruncate(fds[1], SLOT)
    assert take(fds, 0) is None
    ours.close()


def test_the_end_wakes_who_waits_and_stays_rung(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, _theirs = ends
    waiting = threading.Thread(target=ours.wait)
    waiting.start()
    ours.wake()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    # For those who watch the descriptor only from now on.
    assert ours.wait_until(None)
    with pytest.raises(PeerGone):
        ours.receive()
    with pytest.raises(PeerGone):
        ours.send(b"more")


def test_a_packet_that_was_whole_at_the_end_is_received(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, theirs = ends
    theirs.send(b"last words")
    ours.wake()
    assert ours.receive() == b"last words"
    with pytest.raises(PeerGone):
        ours.receive()


def test_a_runtime_that_is_gone_is_the_end_for_a_stub(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, theirs = ends
    ours.send(b"last words")
    ours.close()
    assert theirs.receive() == b"last words"
    with pytest.raises(PeerGone):
        theirs.receive()


def test_descriptors_stay_while_somebody_waits(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, _theirs = ends
    fd = ours.fileno()
    is_inside, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_inside.set()
        ours.wait()
        # Still in this thread's hands, but not inside any more.
        goes_on.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    is_inside.wait(PATIENCE_S)
    ours.close()
    assert ours.fileno() == -1
    assert goes_on.wait(PATIENCE_S)
    waiting.join(PATIENCE_S)
    wait_until(lambda: not os.path.exists(f"/proc/self/fd/{fd}"))
    with pytest.raises(Closed):
        ours.receive()


@pytest.fixture
def counted(lied_to: tuple[SlotChannel, Liar]) -> Callable[[int], tuple[bool, int, int]]:
    """Look for so long: tells if a packet came, and the numbers of looks and of hits."""
    ours, _ = lied_to

    def look(look_ns: int) -> tuple[bool, int, int]:
        before = counts()
        came = ours.look(look_ns)
        after = counts()
        return came, after["looks"] - before["looks"], after["hits"] - before["hits"]

    return look


needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nobody looks")
Counted = Callable[[int], tuple[bool, int, int]]
MINUTE_NS = 60_000_000_000


@needs_two_cores
def test_a_look_finds_a_packet_that_nobody_rings_for(lied_to: tuple[SlotChannel, Liar], counted: Counted) -> None:
    _, liar = lied_to
    liar.write("<I", CORE, 126)
    look = ThreadPoolExecutor(1).submit(counted, MINUTE_NS)
    # The peer need not ring meanwhile, and has to from then on.
    wait_until(lambda: liar.seen[ASLEEP] == 0)
    liar.send(1, b"answer")
    assert look.result(PATIENCE_S) == (True, 1, 1)
    assert liar.seen[ASLEEP] == 1


@needs_two_cores
def test_looks_in_vain_become_rare(lied_to: tuple[SlotChannel, Liar], counted: Counted) -> None:
    _, liar = lied_to
    liar.write("<I", CORE, 126)
    looked = [counted(1)[1] for _ in range(1 + 63 + 1 + 126 + 1)]
    assert [at for at, each in enumerate(looked) if each] == [0, 64, 191]


def test_nobody_looks_for_a_peer_whose_core_is_not_known(lied_to: tuple[SlotChannel, Liar], counted: Counted) -> None:
    _, liar = lied_to
    liar.write("<I", CORE, 127)
    assert counted(MINUTE_NS) == (False, 0, 0)


def test_a_fork_has_no_part_in_it(ends: tuple[SlotChannel, SlotChannel]) -> None:
    ours, theirs = ends
    pid = os.fork()
    if pid == 0:
        try:
            ours.send(b"of the child")
        except Closed:
            ours.close()
            os._exit(0 if ours.fileno() == -1 else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    ours.send(b"of the parent")
    assert theirs.receive() == b"of the parent"


def test_no_interleaving_of_looks_and_sends_loses_a_packet() -> None:
    assert stuck_states(has_fences=True) == []


def test_without_fences_some_would() -> None:
    assert stuck_states(has_fences=False)


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    native = [NATIVE / f"{name}.cpp" for name in ("slot", "look", "channel")]
    return [Path(__file__).with_name("slot_program.cpp"), *native]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, sources: list[Path]) -> Path:
    place = tmp_path_factory.mktemp("slots") / "program"
    return compiled(place, sources, f"-I{NATIVE}", "-pthread")


@pytest.mark.slow
@needs_two_cores
def test_both_sides_begin_to_look_by_long_looks(program: Path) -> None:
    def looked_us(waits: str) -> list[int]:
        out = subprocess.run([str(program), "looks", waits], check=True, capture_output=True)
        return [int(each) for each in out.stdout.split()]

    # As long as messages come quickly, or late for the first time.
    assert looked_us("qq" + 64 * "l" + "q") == 66 * [155] + [30]
    # Those that always come late cost as much as a look in vain, now and then.
    assert looked_us(64 * "l" + "v" + 63 * "v" + "l") == 64 * [155] + [30] + 63 * [0] + [155]
    # A quick one tells that it pays.
    assert looked_us(64 * "l" + "ql") == 64 * [155] + [30, 155]
    # A peer that looks ends the pause, until it was looked for in vain as well.
    assert looked_us("vvvQv") == [155, 0, 0, 155, 155]
    assert looked_us("vvV" + "V" * 126 + "V") == [155, 0, 155] + 126 * [0] + [155]


@pytest.mark.slow
def test_a_message_is_announced_to_those_alone_who_sleep_until_it_comes(program: Path) -> None:
    # Neither one that looks nor an event loop, nor one that lies.
    out = subprocess.run([str(program), "rings", "012932"], check=True, capture_output=True)
    assert out.stdout == b"22"


@needs_two_cores
def test_a_thread_that_is_woken_by_an_announcement_looks_until_the_packet_comes(
    lied_to: tuple[SlotChannel, Liar],
) -> None:
    ours, liar = lied_to
    core = sum(os.sched_getaffinity(0)) + 1  # none of this process
    liar.write("<I", CORE, core)
    before = counts()["looks"]
    waiting = ThreadPoolExecutor(1).submit(ours.wait, 0, 1)
    wait_until(lambda: liar.asleep == 2, PATIENCE_S)
    looked = counts()["looks"]
    liar.write("<Q", ANNOUNCED, 1)
    liar.ring()
    wait_until(lambda: counts()["looks"] > looked, PATIENCE_S)
    # It was in vain, and the thread sleeps until it is rung for again.
    wait_until(lambda: liar.asleep == 1, PATIENCE_S)
    liar.send(1, b"late")
    liar.ring()
    assert waiting.result(PATIENCE_S)
    assert ours.receive() == b"late"
    assert counts()["looks"] - before <= 2


@pytest.mark.slow
def test_ends_on_two_threads_do_not_race(tmp_path: Path, sources: list[Path]) -> None:
    program = compiled(tmp_path / "turns", sources, f"-I{NATIVE}", "-pthread", sanitizers="thread")
    for look_ns in (0, 30_000):
        subprocess.run([str(program), "turns", "2000", str(look_ns)], check=True)


@pytest.mark.slow
def test_a_peer_that_changes_everything_does_no_harm(program: Path) -> None:
    subprocess.run([str(program), "liar", "60"], check=True)
