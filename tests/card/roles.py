"""Roles that a process of a cell can take. Functions with a `talk` are what a helper does for the process that started
it.

Each question is one of those that a GPU's page and the decision about device memory leave open. What is expected comes
from there.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int, c_uint64, c_void_p
from functools import partial
from typing import Any

from tests.card import cuda, guises
from tests.card.cell import REFUSED, WORKS, Cell, Ended, Talk, nodes_of
from tests.card.cuda import Cuda, Handle, Refused
from tests.card.sharing import KINDS, Memory, Times, spent

SMALL_BYTES = 2 << 20
OLD, NEW, MARK = 0x11, 0x22, 0x5A
_ROUNDS = 10
# F_SEAL_SEAL, SHRINK and GROW, which the runtime's shared memory has.
_SEALS = 0x1 | 0x2 | 0x4
_ADD_SEALS = 1033
_SYS_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_long)


def _outcome(attempt: Callable[[], object]) -> tuple[str, str]:
    """Return that an attempt works, or the name of the driver's error and what it says."""
    try:
        attempt()
    except Refused as refused:
        return refused.name, str(refused)
    return WORKS, ""


def _rounded(size_bytes: int) -> int:
    return max(SMALL_BYTES, size_bytes // SMALL_BYTES * SMALL_BYTES)


def _named(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes < 1 << 30 else f"{size_bytes / (1 << 30):g} GiB"


def _shared(found: Cuda) -> tuple[Memory, dict[str, str], list[int]]:
    """Make memory for a question about order, by descriptor, or by the older way if the driver exports none.

    Returns it with the message and the descriptors that open it in another process.
    """
    for kind in ("descriptor", "legacy handle"):
        memory = KINDS[kind](found, SMALL_BYTES)
        try:
            memory.make()
            data, fds = memory.export()
        except Refused:
            if kind == "legacy handle":
                raise
            continue
        return memory, {"kind": kind, "data": data.hex()}, fds
    raise AssertionError("there are two kinds")


def _opened_as(found: Cuda, request: Mapping[str, str], fds: Sequence[int]) -> Memory:
    """Open what `_shared` has made in another process."""
    memory = KINDS[request["kind"]](found, SMALL_BYTES)
    memory.open(bytes.fromhex(request["data"]), fds, cuda.READ_WRITE)
    return memory


# What the driver is


def hang(cell: Cell) -> None:
    """Stay in a call of the driver, which waits for what does not come. For a test of the cells themselves."""
    found = cell.cuda()
    memory, stream = KINDS["descriptor"](found, SMALL_BYTES), found.stream()
    memory.make()
    found.fill(memory.address, 0, SMALL_BYTES, stream)
    found("cuStreamWaitValue32_v2", stream, memory.address, 1, 0)
    cell.helper("idle")
    found("cuStreamSynchronize", stream)


def crash(cell: Cell) -> None:
    """Have the driver write where nothing is. For a test of the cells themselves."""
    found = cell.cuda()
    memory = KINDS["descriptor"](found, SMALL_BYTES)
    memory.make()
    found("cuMemcpyDtoHAsync_v2", 64, memory.address, 64, found.stream())


def idle(_: Cell, talk: Talk) -> None:
    """Wait for the end of the process that started this one."""
    talk.receive()


def keep(cell: Cell) -> None:
    """Have a context while all others ask: without one, the driver puts the card to sleep and wakes it each time."""
    found = cell.driver()
    for call, us in found.start().items():
        cell.say(f"{call} of the first process", True, round(us / 1000, 1), "ms")
    select.select([], [], [])


def describe(cell: Cell, attributes: Sequence[tuple[int, str, int | None]], functions: Sequence[str]) -> None:
    """Say what the driver and the card are, as far as the driver tells it."""
    found = cell.driver()
    for call, us in found.start().items():
        cell.say(call, True, round(us / 1000, 1), "ms")
    version, name, total = c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    found("cuDriverGetVersion", byref(version))
    found("cuDeviceGetName", name, 128, 0)
    found("cuDeviceTotalMem_v2", byref(total), 0)
    cell.say("version of CUDA", True, version.value)
    cell.say("card", True, name.value.decode("utf-8", "replace"))
    cell.say("memory", True, round(total.value / (1 << 30), 2), "GiB")
    cell.say("free memory", True, round(found.free_bytes() / (1 << 30), 2), "GiB")
    cell.say("nodes of device 0", True, " ".join(nodes_of(found)))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        files = {line.split()[-1] for line in maps if "libcuda" in line or "nvidia" in line}
    cell.say("mapped files", True, len(files), "files", text=" ".join(sorted(files)))
    missing = [name for name in functions if not found.has(name)]
    cell.say(
        "functions that moonpool calls",
        not missing,
        len(functions) - len(missing),
        "functions",
        str(len(functions)),
        ", ".join(missing),
    )
    for number, words, expected in attributes:
        label = f"attribute {number}, {words}"
        try:
            value = found.attribute(number)
        except Refused as refused:
            cell.say(label, expected is None, refused.name, text=str(refused))
            continue
        wanted = "" if expected is None else str(expected)
        cell.say(label, expected is None or value == expected, value, expected=wanted)
    for kind, types in (
        ("descriptor", cuda.DESCRIPTOR),
        ("fabric", cuda.FABRIC),
        ("both", cuda.DESCRIPTOR | cuda.FABRIC),
        ("none", 0),
    ):
        _say_what_sizes(cell, found, kind, types)


def _say_what_sizes(cell: Cell, found: Cuda, kind: str, types: int) -> None:
    sizes = []
    for recommended in (False, True):
        try:
            sizes.append(found.granularity(types, recommended=recommended))
        except Refused as refused:
            is_needed = kind == "descriptor"
            cell.say(f"granularity, {kind}", False if is_needed else None, refused.name, text=str(refused))
            return
    text = f"least {sizes[0]}, recommended {sizes[1]}"
    expected = str(SMALL_BYTES) if kind == "descriptor" else ""
    cell.say(f"granularity, {kind}", not expected or sizes[0] == SMALL_BYTES, sizes[0], "bytes", expected, text)


def create(cell: Cell, types: int) -> None:
    """Try to make memory that can be exported as all of these types."""
    found = cell.cuda()
    wanted, allocation = cuda.properties(types), c_uint64()
    made = _outcome(lambda: found("cuMemCreate", byref(allocation), SMALL_BYTES, byref(wanted), 0))
    cell.judge("", made[0], "", made[1])


# Who can open memory


def opens(cell: Cell, kind: str, guise: str, expected: str, *, needed: bool) -> None:
    """Make memory, and have another process open it, ten times, for reading and writing, and once for reading only."""
    found = cell.cuda()
    memory = KINDS[kind](found, SMALL_BYTES)
    stream = found.stream()
    try:
        memory.make()
        found.fill(memory.address, MARK, SMALL_BYTES, stream)
        found("cuStreamSynchronize", stream)
        data, fds = memory.export()
    except Refused as refused:
        cell.say("made and exported", False if needed else None, refused.name, text=str(refused))
        return
    if guise == guises.SAME:
        answer = _opened(found, kind, data, fds)
    else:
        helper = cell.helper("opener", guise, nodes_of(found), kind=kind)
        helper.send({"data": data.hex()}, fds)
        try:
            answer = helper.answer()
        except Ended as ended:
            answer = {"read and write": [ended.name, str(ended)]}
    for way, (outcome, text) in answer.items():
        wanted = expected if way == "read and write" else ""
        if way == "read and write" and outcome == WORKS:
            arrived = found.first_byte(memory.address, stream)
            if arrived != NEW:
                outcome, text = "its write is not seen", f"{arrived:#x}; {text}"
        cell.judge(way, outcome, wanted, text, needed=needed)


def opener(cell: Cell, talk: Talk, kind: str) -> None:
    """Open memory that comes, and answer how that went."""
    request, fds = talk.receive()
    talk.send(_opened(cell.cuda(), kind, bytes.fromhex(request["data"]), fds))


def _opened(found: Cuda, kind: str, data: bytes, fds: Sequence[int]) -> dict[str, Any]:
    memory = KINDS[kind](found, SMALL_BYTES)
    stream = found.stream()

    def open_often() -> None:
        for place in range(_ROUNDS):
            memory.open(data, fds, cuda.READ_WRITE)
            seen = found.first_byte(memory.address, stream)
            if place == 0 and seen != MARK:
                raise Refused("the first byte", seen, "other bytes are there")
            found.fill(memory.address, NEW, SMALL_BYTES, stream)
            found("cuStreamSynchronize", stream)
            memory.close()

    outcome, text = _outcome(open_often)
    if outcome == WORKS:
        steps = ", ".join(f"{step} {us[0]:.0f} and {us[-1]:.0f}" for step, us in memory.times.items())
        first, last = spent(memory.times, 0), spent(memory.times, _ROUNDS - 1)
        text = f"µs of the first and the tenth time: {first:.0f} and {last:.0f}; {steps}"
    answer = {"read and write": [outcome, text]}
    if memory.has_access and outcome == WORKS:
        answer["read only"] = _opened_to_read(found, memory, data, fds)
    return answer


def _opened_to_read(found: Cuda, memory: Memory, data: bytes, fds: Sequence[int]) -> list[str]:
    stream = found.stream()

    def read() -> None:
        memory.open(data, fds, cuda.READ)
        found.first_byte(memory.address, stream)

    def write() -> None:
        found.fill(memory.address, OLD, SMALL_BYTES, stream)
        found("cuStreamSynchronize", stream)

    outcome, text = _outcome(read)
    if outcome == WORKS:
        # It may break the context, so it comes last.
        written, said = _outcome(write)
        text = f"and a write: {written} {said}"
    return [outcome, text]


# What opening costs


def costs(cell: Cell, kind: str, sizes: Sequence[int]) -> None:
    """Time each step of sharing memory of these sizes, ten times, with nothing else on the card."""
    found = cell.cuda()
    stream = found.stream()
    helper = cell.helper("timed_opener", kind=kind)
    for size_bytes in map(_rounded, sizes):
        times: Times = {}
        for _ in range(_ROUNDS):
            memory = KINDS[kind](found, size_bytes)
            memory.make()
            _touch(found, memory, stream)
            data, fds = memory.export()
            sent_ns = time.perf_counter_ns()
            helper.send({"data": data.hex(), "size": size_bytes, "sent_ns": sent_ns}, fds)
            answer = helper.answer()
            memory.close()
            for fd in fds:
                os.close(fd)
            for who, steps in (("maker", memory.times), ("opener", answer["times"])):
                for step, us in steps.items():
                    times.setdefault(f"{who}: {step}", []).extend(us)
        for step, us in times.items():
            text = f"first {us[0]:.1f}, median {statistics.median(us):.1f}, most {max(us):.1f}"
            cell.say(f"{_named(size_bytes)}, {step}", True, round(us[-1], 1), "µs", text=text)
        last = sum(us[-1] for step, us in times.items() if step in _OPENING)
        cell.say(f"{_named(size_bytes)}, opening in all", True, round(last, 1), "µs", "100 to 500")


_OPENING = {
    f"opener: {step}"
    for step in ("sent", "import pool", "import", "reserve", "map", "set access", "open", "first touch")
}


def _touch(found: Cuda, memory: Memory, stream: c_void_p) -> None:
    """Touch all of it twice, and note what the first time took more than the second."""
    took = []
    for _ in range(2):
        began = time.perf_counter_ns()
        found.fill(memory.address, MARK, memory.size_bytes, stream)
        found("cuStreamSynchronize", stream)
        took.append((time.perf_counter_ns() - began) / 1000)
    memory.times.setdefault("first touch", []).append(max(0.0, took[0] - took[1]))


def timed_opener(cell: Cell, talk: Talk, kind: str) -> None:
    """Open and close what comes, and answer what each step took."""
    found = cell.cuda()
    stream = found.stream()
    while True:
        request, fds = talk.receive()
        sent = (time.perf_counter_ns() - request["sent_ns"]) / 1000
        memory = KINDS[kind](found, request["size"])
        memory.open(bytes.fromhex(request["data"]), fds, cuda.READ_WRITE)
        _touch(found, memory, stream)
        memory.close()
        for fd in fds:
            os.close(fd)
        talk.send({"times": {"sent": [sent], **memory.times}})


# What a handle is worth to those to whom it was not sent


def stranger(cell: Cell, guise: str, expected: str) -> None:
    """Have another process look for a descriptor that this one has, and open what it finds."""
    found = cell.cuda()
    memory = KINDS["descriptor"](found, SMALL_BYTES)
    memory.make()
    _, fds = memory.export()
    helper = cell.helper("thief", guise, nodes_of(found), pid=os.getpid(), fd=fds[0])
    for way, (outcome, text) in helper.answer().items():
        cell.judge(way, outcome, expected, text)


def thief(cell: Cell, talk: Talk, pid: int, fd: int) -> None:
    """Try to get a descriptor that another process has, by its number."""

    def by_pidfd() -> int:
        number = _libc.syscall(ctypes.c_long(_SYS_PIDFD_GETFD), os.pidfd_open(pid), fd, 0)
        if number < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return int(number)

    ways: dict[str, Callable[[], int]] = {
        "by pidfd_getfd": by_pidfd,
        "by /proc": lambda: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR),
    }
    answer = {}
    for way, get in ways.items():
        try:
            got = get()
        except OSError as error:
            answer[way] = [REFUSED, str(error)]
            continue
        try:
            memory = KINDS["descriptor"](cell.cuda(), SMALL_BYTES)
            answer[way] = list(_outcome(partial(memory.open, b"", [got], cuda.READ_WRITE)))
        except (OSError, Refused) as error:
            answer[way] = ["no driver", str(error)]
    talk.send(answer)


def guess(cell: Cell) -> None:
    """Import descriptors that are no device memory."""
    found = cell.cuda()
    memfd = os.memfd_create("moonpool-card")
    os.truncate(memfd, SMALL_BYTES)
    for what, fd in (("an ordinary memfd", memfd), ("a number that is no descriptor", 4000)):
        memory = KINDS["descriptor"](found, SMALL_BYTES)
        outcome, text = _outcome(partial(memory.open, b"", [fd], cuda.READ_WRITE))
        cell.judge(what, outcome, REFUSED, text)


# How long memory lives


def lives(cell: Cell, kind: str, how: str, expected: str) -> None:
    """Open memory of another process, which then frees it or is killed, and use it still."""
    found = cell.cuda()
    stream = found.stream()
    helper = cell.helper("owner", kind=kind)
    try:
        helper.send({"do": "make"})
        message, fds = helper.receive()
        if "failed" in message:
            cell.judge("", message["failed"], expected, message["text"], needed=kind != "pool")
            return
        memory = KINDS[kind](found, SMALL_BYTES)
        memory.open(bytes.fromhex(message["data"]), fds, cuda.READ_WRITE)
        for fd in fds:
            os.close(fd)
        if how == "killed":
            helper.kill()
        else:
            helper.send({"do": "free"})
            helper.answer()
    except Ended as ended:
        cell.say("", False, "ended", expected=expected, text=str(ended))
        return

    def use() -> None:
        seen = found.first_byte(memory.address, stream)
        if seen != MARK:
            raise Refused("the first byte", seen, "other bytes are there")
        found.fill(memory.address, NEW, SMALL_BYTES, stream)
        found("cuStreamSynchronize", stream)

    outcome, text = _outcome(use)
    cell.judge("", outcome, expected, text)
    closed = _outcome(memory.close)
    cell.judge("closed afterwards", closed[0], expected and WORKS, closed[1])


def owner(cell: Cell, talk: Talk, kind: str) -> None:
    """Make memory and send it, and free it when told to."""
    found = cell.cuda()
    stream = found.stream()
    memory = KINDS[kind](found, SMALL_BYTES)
    talk.receive()
    memory.make()
    found.fill(memory.address, MARK, SMALL_BYTES, stream)
    found("cuStreamSynchronize", stream)
    data, fds = memory.export()
    talk.send({"data": data.hex()}, fds)
    for fd in fds:
        os.close(fd)
    talk.receive()
    memory.close()
    talk.send({})
    talk.receive()


# Order between processes


def orders(cell: Cell, guise: str, expected: str, busy_s: float) -> None:
    """Write to shared memory behind a kernel, record an event, and have another process read after the event."""
    found = cell.cuda()
    memory, request, fds = _shared(found)
    stream, event, handle = found.stream(), found.event(), Handle()
    found.fill(memory.address, OLD, SMALL_BYTES, stream)
    found("cuStreamSynchronize", stream)
    found.spin(0.001, stream)
    found("cuIpcGetEventHandle", byref(handle), event)
    if guise == guises.SAME:
        opened = c_void_p()
        outcome, text = _outcome(lambda: found("cuIpcOpenEventHandle", byref(opened), handle))
        cell.judge("opens", outcome, expected, text)
        return
    helper = cell.helper("reader", guise, nodes_of(found))
    helper.send({"event": bytes(handle).hex(), **request}, fds)
    try:
        answer = helper.answer()
    except Ended as ended:
        answer = {"outcome": ended.name, "text": str(ended)}
    cell.judge("opens", answer["outcome"], expected, answer["text"])
    if answer["outcome"] != WORKS:
        return
    found.spin(busy_s, stream)
    found.fill(memory.address, NEW, SMALL_BYTES, stream)
    found("cuEventRecord", event, stream)
    helper.send({})
    answer = helper.answer()
    was_busy = answer["waited_ms"] > busy_s * 500
    cell.say(
        "a reader that does not wait",
        True if answer["early"] == OLD else None,
        _word(answer["early"]),
        expected="old bytes",
    )
    cell.say(
        "a reader that waits for it",
        answer["late"] == NEW,
        _word(answer["late"]),
        expected="new bytes",
        text=f"{answer['waited_ms']:.1f} ms behind a kernel of {busy_s * 1000:.0f} ms",
    )
    if not was_busy:
        cell.say("the kernel was still running", None, text="it had ended before the reader came")
    cell.judge("recorded by the opener", answer["recorded"], "", answer["why"])
    if answer["recorded"] == WORKS:
        outcome, text = _outcome(lambda: found("cuEventSynchronize", event))
        cell.judge("waited for by its maker", outcome, WORKS, text)


def _word(value: int) -> str:
    return {OLD: "old bytes", NEW: "new bytes"}.get(value, f"{value:#x}")


def reader(cell: Cell, talk: Talk) -> None:
    """Open an event and memory; read with and without a wait; record the event."""
    request, fds = talk.receive()
    found = cell.cuda()
    event = c_void_p()
    handle = Handle.from_buffer_copy(bytes.fromhex(request["event"]))
    outcome, text = _outcome(lambda: found("cuIpcOpenEventHandle", byref(event), handle))
    took_us = found.us
    if outcome == WORKS:
        memory = _opened_as(found, request, fds)
        early, late = found.stream(), found.stream()
        found.first_byte(memory.address, early)
        text = f"cuIpcOpenEventHandle takes {took_us:.0f} µs"
    talk.send({"outcome": outcome, "text": text})
    if outcome != WORKS:
        return
    talk.receive()
    began = time.perf_counter()
    found("cuStreamWaitEvent", late, event, 0)
    answer: dict[str, Any] = {"early": found.first_byte(memory.address, early)}
    answer["late"] = found.first_byte(memory.address, late)
    answer["waited_ms"] = (time.perf_counter() - began) * 1000
    answer["recorded"], answer["why"] = _outcome(lambda: found("cuEventRecord", event, early))
    talk.send(answer)
    talk.receive()


# A process that is killed while another one waits for it


def killed(cell: Cell, busy_s: float, looks_s: Sequence[float], *, at_once: bool) -> None:
    """Kill a process with a kernel in flight, and look at a stream that waits for its event."""
    found = cell.cuda()
    event = c_void_p()
    memory, request, fds = _shared(found)
    waiting, other = found.stream(), found.stream()
    found.first_byte(memory.address, other)
    helper = cell.helper("victim", busy_s=busy_s)
    helper.send(request, fds)
    handle = Handle.from_buffer_copy(bytes.fromhex(helper.answer()["event"]))
    found("cuIpcOpenEventHandle", byref(event), handle)
    helper.send({})
    helper.answer()
    found("cuStreamWaitEvent", waiting, event, 0)
    found.fill(memory.address, NEW, SMALL_BYTES, waiting)
    gone_s = helper.kill()
    began = time.monotonic()
    text = f"with a kernel of {busy_s:.1f} s in flight"
    cell.say("the killed process is gone after", True, round(gone_s, 2), "s", text=text)
    if at_once:
        _record_anew(cell, found, event, other)
    for after_s in looks_s:
        select.select([], [], [], max(0.0, began + after_s - time.monotonic()))
        for call, thing in (("cuEventQuery", event), ("cuStreamQuery", waiting)):
            _look(cell, f"{call} after {after_s:g} s", found, call, thing)
    if not at_once:
        _record_anew(cell, found, event, other)
        select.select([], [], [], 0.5)
        _look(cell, "cuStreamQuery after the event was recorded anew", found, "cuStreamQuery", waiting)
    _still_works(cell, found)


def _look(cell: Cell, name: str, found: Cuda, call: str, thing: c_void_p) -> None:
    try:
        said = "done" if found.is_ready(call, thing) else "not ready"
    except Refused as refused:
        said = refused.name
    cell.say(name, True, said)


def _record_anew(cell: Cell, found: Cuda, event: c_void_p, stream: c_void_p) -> None:
    outcome, text = _outcome(lambda: found("cuEventRecord", event, stream))
    cell.judge("the survivor records the event anew", outcome, "", text)


def _still_works(cell: Cell, found: Cuda) -> None:
    """Check that a context can be used after another process has died."""

    def use() -> None:
        # It is not freed: to free memory can mean to wait for all streams.
        stream, memory = found.stream(), _shared(found)[0]
        found.fill(memory.address, MARK, SMALL_BYTES, stream)
        found("cuStreamSynchronize", stream)
        found.spin(0.001, stream)
        found("cuStreamSynchronize", stream)

    outcome, text = _outcome(use)
    cell.judge("the survivor's context", outcome, WORKS, text)


def victim(cell: Cell, talk: Talk, busy_s: float) -> None:
    """Run a kernel and record an event behind it, and wait to be killed."""
    request, fds = talk.receive()
    found = cell.cuda()
    _opened_as(found, request, fds)
    stream, event, handle = found.stream(), found.event(), Handle()
    found.spin(0.001, stream)
    found("cuStreamSynchronize", stream)
    found("cuIpcGetEventHandle", byref(handle), event)
    talk.send({"event": bytes(handle).hex()})
    talk.receive()
    found.spin(busy_s, stream)
    found("cuEventRecord", event, stream)
    talk.send({})
    talk.receive()


def killed_word(cell: Cell, busy_s: float) -> None:
    """Kill a process that was to write a word that a stream waits for, and write it in its place."""
    found = cell.cuda()
    memory, request, fds = _shared(found)
    waiting, other = found.stream(), found.stream()
    found.fill(memory.address, 0, SMALL_BYTES, other)
    found("cuStreamSynchronize", other)
    helper = cell.helper("victim", busy_s=busy_s)
    helper.send(request, fds)
    helper.answer()
    helper.send({})
    helper.answer()
    found("cuStreamWaitValue32_v2", waiting, memory.address, 1, 0)
    helper.kill()
    _look(cell, "cuStreamQuery after the kill", found, "cuStreamQuery", waiting)
    found("cuStreamWriteValue32_v2", other, memory.address, 1, 0)
    found("cuStreamSynchronize", other)
    began = time.monotonic()
    is_done = False
    while not is_done and time.monotonic() < began + 2:
        is_done = found.is_ready("cuStreamQuery", waiting)
    cell.say("the survivor writes the word itself", is_done, "done" if is_done else "not ready", expected="done")
    _still_works(cell, found)


# Words in shared device memory


def words(cell: Cell, guise: str, rounds: int) -> None:
    """Pass a word to and fro between the streams of two processes."""
    found = cell.cuda()
    memory, request, fds = _shared(found)
    stream = found.stream()
    found.fill(memory.address, 0, SMALL_BYTES, stream)
    found("cuStreamSynchronize", stream)
    helper = cell.helper("echo_words", guise, nodes_of(found), rounds=rounds)
    helper.send(request, fds)
    helper.answer()
    began = time.perf_counter()
    _pass_words(found, stream, memory.address, memory.address + 256, rounds, writes_first=True)
    took_us = (time.perf_counter() - began) * 1e6 / rounds
    cell.say("there and back", True, round(took_us, 1), "µs", text=f"{rounds} times, the processor waits once")
    helper.answer()


def echo_words(cell: Cell, talk: Talk, rounds: int) -> None:
    """Answer each word with another one."""
    request, fds = talk.receive()
    found = cell.cuda()
    memory = _opened_as(found, request, fds)
    stream = found.stream()
    talk.send({})
    _pass_words(found, stream, memory.address + 256, memory.address, rounds, writes_first=False)
    talk.send({})
    talk.receive()


def _pass_words(found: Cuda, stream: c_void_p, mine: int, other: int, rounds: int, *, writes_first: bool) -> None:
    for number in range(1, rounds + 1):
        calls = [("cuStreamWriteValue32_v2", mine), ("cuStreamWaitValue32_v2", other)]
        for call, address in calls if writes_first else reversed(calls):
            found(call, stream, address, number, 0)
    found("cuStreamSynchronize", stream)


# Ordinary memory


def pins(cell: Cell, size_bytes: int) -> None:
    """Register a sealed memfd, mapped in two ways, and time copies beside those of memory that is not registered."""
    found = cell.cuda()
    size_bytes = _rounded(size_bytes)
    memory = KINDS["descriptor"](found, size_bytes)
    memory.make()
    fd = os.memfd_create("moonpool-card", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    mapped = {"mapped to read": 0x1, "mapped to read and write": 0x1 | 0x2}
    for way, protection in mapped.items():
        address = _libc.mmap(None, size_bytes, protection, 1, fd, 0)
        if address in (None, c_void_p(-1).value):
            cell.say(way, False, text="mmap failed")
            continue
        _copies(cell, found, f"{way}, not registered", address, memory, writes=protection > 1)
        for flags, expected in ((1, WORKS if protection > 1 else ""), (1 | 8, WORKS if protection == 1 else "")):
            _pin(cell, found, f"{way}, flags {flags}", address, memory, flags, expected, writes=protection > 1)


def _pin(
    cell: Cell, found: Cuda, name: str, address: int, memory: Memory, flags: int, expected: str, *, writes: bool
) -> None:
    outcome, text = _outcome(lambda: found("cuMemHostRegister_v2", address, memory.size_bytes, flags))
    took = f"{found.us / 1000:.1f} ms"
    cell.judge(name, outcome, expected, f"{took}; {text}")
    if outcome != WORKS:
        return
    _copies(cell, found, name, address, memory, writes=writes and not flags & 8)
    found("cuMemHostUnregister", address)


def _copies(cell: Cell, found: Cuda, name: str, address: int, memory: Memory, *, writes: bool) -> None:
    stream = found.stream()
    ways: dict[str, Callable[[], None]] = {
        "to the card": lambda: found("cuMemcpyHtoDAsync_v2", memory.address, address, memory.size_bytes, stream)
    }
    if writes:
        ways["from the card"] = lambda: found(
            "cuMemcpyDtoHAsync_v2", address, memory.address, memory.size_bytes, stream
        )
    for way, copy in ways.items():
        took = []
        for _ in range(5):
            began = time.perf_counter()
            copy()
            found("cuStreamSynchronize", stream)
            took.append(time.perf_counter() - began)
        rate = memory.size_bytes / statistics.median(took[1:]) / 1e9
        cell.say(f"{name}, {way}", True, round(rate, 2), "GB/s", text=_named(memory.size_bytes))


# Contexts and processes


def contexts(cell: Cell, counts: Sequence[int]) -> None:
    """Say what device memory a context takes, from what is free before and after so many processes have one."""
    found = cell.cuda()
    for count in counts:
        before = found.free_bytes()
        began = time.monotonic()
        helpers = [cell.helper("has_context") for _ in range(count)]
        times = [helper.answer()["times"] for helper in helpers]
        took_s = time.monotonic() - began
        each = (before - found.free_bytes()) / count / (1 << 20)
        steps = "; ".join(
            f"{call} {statistics.median(each[call] for each in times) / 1000:.0f} ms" for call in times[0]
        )
        cell.say(
            f"{count} at once",
            True,
            round(each, 1),
            "MiB each",
            "300 to 600",
            f"all ready after {took_s:.2f} s; {steps}",
        )
        for helper in helpers:
            helper.finish()


def has_context(cell: Cell, talk: Talk) -> None:
    """Make a context, use it, and say what that took."""
    found = cell.driver()
    times = found.start()
    stream = found.stream()
    found("cuStreamSynchronize", stream)
    talk.send({"times": times})
    talk.receive()


def forks(cell: Cell) -> None:
    """Use the driver in a fork of a process that has used it."""
    found = cell.cuda()
    reader_fd, writer_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        said = [_outcome(lambda: found("cuInit", 0))[0], _outcome(found.free_bytes)[0]]
        os.write(writer_fd, " ".join(said).encode())
        os._exit(0)
    os.close(writer_fd)
    said = os.read(reader_fd, 1024).decode().split() or ["it died", "it died"]
    os.waitpid(pid, 0)
    for call, outcome in zip(("cuInit", "cuMemGetInfo"), said, strict=True):
        cell.judge(call, outcome, REFUSED)
    outcome, text = _outcome(found.free_bytes)
    cell.judge("afterwards in the process itself", outcome, WORKS, text)
