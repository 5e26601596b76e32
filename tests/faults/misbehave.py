"""A stub that knows the protocol and breaks it, by name. Started in place of `stub/boot.py`.

`FAULT_BOOT` is the path of the real one, for its first steps; `FAULT_AT_START` names a fault of `STARTS`. Once loaded,
a request whose id is a name of `FAULTS` is answered with that fault. One whose id is `says CHANNEL TIMES HEX` has it
send that packet. Any other one is answered honestly: with a response that has no outputs.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

BOOT = runpy.run_path(os.environ["FAULT_BOOT"])
BOOT["make_importable"]("moonpool", os.path.dirname(os.path.dirname(BOOT["__file__"])))
BOOT["load_msgpack"](sys.argv[-1])

from moonpool.ipc.channel import MAX_PACKET_BYTES  # noqa: E402
from moonpool.ipc.codec import calls_codec, control_codec, encode, unpack_layout, work_codec  # noqa: E402
from moonpool.ipc.messages import (  # noqa: E402
    EXEC_FAILED,
    FINAL,
    MAX_OBSERVATIONS,
    NO_CORE,
    NO_DEVICE,
    OBSERVE,
    OPEN,
    PROTOCOL_VERSION,
    Kind,
    Side,
)
from moonpool.ipc.policy import Policy  # noqa: E402
from moonpool.stub.sandbox import layers  # noqa: E402
from moonpool.stub.sandbox.identity import die_with  # noqa: E402

HUGE = 2**62
FP32, BYTES = 11, 13
# A layout of one response without outputs.
EMPTY = b"\x91\x90"


class Peer:
    """The raw ends of the two channels, and what the runtime sent on them."""

    def __init__(self, work_fd: int, control_fd: int, calls_fd: int) -> None:
        self.work = socket.socket(fileno=work_fd)
        self.control = socket.socket(fileno=control_fd)
        self.calls = socket.socket(fileno=calls_fd)
        self.work_codec = work_codec(Side.STUB)
        self.control_codec = control_codec(Side.STUB)
        self.requests_region = self.answers_region = 0
        self.answers_fd = -1
        self.batch = 0
        self.count = 0
        self.blocks: list[list[int]] = []
        self.left_open: list[int] = []
        self.details = ""

    def say(self, *message: object) -> None:
        self.work.send(encode(*message))

    def tell(self, *message: object) -> None:
        self.control.send(encode(*message))

    def hear(self) -> list[Any]:
        packet = self.work.recv(MAX_PACKET_BYTES + 1)
        if not packet:
            os._exit(0)
        return self.work_codec.decode(packet)

    def call(self, model: str = "sibling", **changes: object) -> None:
        """Make an INFER with one input at the start of the region for answers, with these changes."""
        block = [changes.get("region", self.answers_region), changes.get("at", 0), 16]
        shape, size = changes.get("shape", (4,)), changes.get("size", 16)
        row = ["X", FP32, shape, changes.get("block", 0), changes.get("offset", 0), size]
        released = changes.get("released", ())
        outputs = changes.get("outputs", ["OUT_X"])
        head = [Kind.INFER, changes.get("number", 1), model, -1, False, 0]
        self.calls.send(encode(*head, released, [block], [row], outputs, None))

    def hear_regions(self) -> None:
        # It does not take the memory that SLOTS may offer, so its work channel stays a socket.
        regions = 0
        while regions < 2:
            packet, fds, _, _ = socket.recv_fds(self.control, MAX_PACKET_BYTES, 4)
            fields = self.control_codec.decode(packet)
            if fields[0] == Kind.SANDBOX:
                self.confine(Policy.from_json(fields[1]))
            regions += fields[0] == Kind.REGION
            if fields[0] == Kind.REGION and fields[3] == Side.STUB:
                self.answers_region, self.answers_fd = fields[1], fds[0]
            elif fields[0] == Kind.REGION:
                self.requests_region = fields[1]

    def confine(self, policy: Policy) -> None:
        """Answer as an honest stub does."""
        applied = layers.apply(policy)
        self.say(Kind.CONFINED, PROTOCOL_VERSION, applied.on, applied.left_out)

    def answer(
        self,
        blocks: object = (),
        rows: object = (),
        *,
        batch: int | None = None,
        held: object = (),
        released: object = (),
        responses: list[list[Any]] | None = None,
    ) -> None:
        """Make an answer in which every response has these rows as outputs, unless `responses` is given."""
        if responses is None:
            responses = [[rows, None, None]] * self.count
        number = self.batch if batch is None else batch
        layout = encode(*[each for each, _, _ in responses])
        remarks = [remark for _, *remark in responses]
        self.say(Kind.ANSWER, number, NO_CORE, held, released, blocks, layout, remarks, None)

    def output(self, shape: object = (4,), size: int = 16, **changes: object) -> None:
        """Make an answer with one output at the start of the region for answers, with these changes."""
        fields: dict[str, object] = {
            "region": self.answers_region,
            "at": 0,
            "block_size": 16,
            "index": 0,
            "datatype": FP32,
            "block": 0,
            "offset": 0,
        }
        fields |= changes
        block = [fields["region"], fields["at"], fields["block_size"]]
        row = [fields["index"], fields["datatype"], shape, fields["block"], fields["offset"], size]
        self.answer([block], [row])


Fault = Callable[[Peer], object]


def hang() -> None:
    """Wait until the kernel or the runtime ends this process."""
    while True:
        time.sleep(3600)


def twice(row: list[object]) -> Fault:
    return lambda peer: peer.answer([[peer.answers_region, 0, 16]], [row, row])


def raw_answer(peer: Peer, layout: bytes, remarks: object = None) -> None:
    peer.say(Kind.ANSWER, peer.batch, NO_CORE, [], [], [], layout, remarks, None)


def send_fds(end: socket.socket, packet: bytes) -> None:
    fds = array.array("i", [0, 1, 2] * 3)
    end.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def with_descriptors(peer: Peer) -> None:
    send_fds(peer.control, encode(Kind.LOG, 0, "with descriptors", "", 0))
    send_fds(peer.work, encode(Kind.ANSWER, peer.batch, NO_CORE, [], [], [], encode(*[[]] * peer.count), None, None))


def responses(*rows: tuple[object, ...]) -> Fault:
    """Send responses apart from the answer. None in a row stands for the batch that executes."""

    def send(peer: Peer) -> None:
        filled = [[peer.batch if row[0] is None else row[0], *row[1:]] for row in rows]
        peer.tell(Kind.RESPONSES, filled)

    return send


def from_the_request(peer: Peer) -> None:
    block = [peer.requests_region, 0, 16]
    peer.tell(Kind.RESPONSES, [[peer.batch, 0, FINAL, [block], encode([[0, FP32, [4], 0, 0, 16]]), None]])


def control_indirect_twice(peer: Peer) -> None:
    packet = encode(Kind.INDIRECT, peer.answers_region, 0, 16)
    os.pwrite(peer.answers_fd, packet, 0)
    peer.tell(Kind.INDIRECT, peer.answers_region, 0, len(packet))


def stored(say: Callable[[Peer], socket.socket]) -> Fault:
    """Point to a message in memory that unpacks to seventy times its size."""

    def send(peer: Peer) -> None:
        # It begins as a request to another model does, so it is not refused for its beginning.
        bomb = b"\xdd\x00\x30\x00\x02" + bytes([Kind.INFER, 1]) + b"\x90" * 0x300000
        region, fd = grown(peer, len(bomb))
        os.pwrite(fd, bomb, 0)
        say(peer).send(encode(Kind.INDIRECT, region, 0, len(bomb)))

    return send


def an_error_in_a_block(peer: Peer) -> None:
    remark = [None, [1, "no"]]
    peer.tell(Kind.RESPONSES, [[peer.batch, 0, FINAL, [[peer.answers_region, 0, 16]], None, remark]])


def states(*values: object) -> Fault:
    return lambda peer: peer.say(
        Kind.ANSWER, peer.batch, NO_CORE, [], [], [], encode(*[[]] * peer.count), None, list(values)
    )


def bad_strings(peer: Peer) -> None:
    os.pwrite(peer.answers_fd, b"\xff\xff\xff\x7fabcd", 0)
    peer.output((1,), 8, datatype=BYTES, index=1)


def indirect_twice(peer: Peer) -> None:
    packet = encode(Kind.INDIRECT, peer.answers_region, 0, 16)
    os.pwrite(peer.answers_fd, packet, 0)
    peer.say(Kind.INDIRECT, peer.answers_region, 0, len(packet))


def closing(*names: str) -> Fault:
    """Close these ends and live on."""

    def close(peer: Peer) -> None:
        for name in names:
            end: socket.socket = getattr(peer, name)
            end.close()
        hang()

    return close


def flood(packet: bytes) -> Fault:
    """Send as fast as the runtime reads, until it ends this process."""

    def send(peer: Peer) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer.control.send(packet)
        hang()

    return send


def leave_a_child(peer: Peer) -> None:
    """Start a child that holds our ends of the channels after our death, until the runtime closes its own."""
    if os.fork() == 0:
        os.setsid()
        while peer.work.recv(1, socket.MSG_PEEK):
            time.sleep(0.01)
        os._exit(0)
    os._exit(7)


def leave_a_child_that_tells_on(peer: Peer) -> None:
    """Send as fast as the runtime reads."""
    if os.fork() == 0:
        os.setsid()
        with contextlib.suppress(OSError):
            while True:
                peer.tell(Kind.LOG, 3, "x", "", 0)
        os._exit(0)
    os._exit(7)


def grow_beyond_all(peer: Peer) -> None:
    peer.tell(Kind.GROW, HUGE, NO_DEVICE)
    kind, reason = peer.control_codec.decode(peer.control.recv(MAX_PACKET_BYTES))
    peer.answer(responses=[[[], None, [int(kind == Kind.REFUSED), reason]]])


def grow_on_a_device(peer: Peer) -> None:
    peer.tell(Kind.GROW, 4096, 4000)
    kind, reason = peer.control_codec.decode(peer.control.recv(MAX_PACKET_BYTES))
    peer.answer(responses=[[[], None, [int(kind == Kind.REFUSED), reason]]])


def answers_twice(peer: Peer) -> None:
    peer.answer()
    peer.answer()


def answers_in_advance(peer: Peer) -> None:
    peer.answer()
    for batch in range(peer.batch + 1, peer.batch + 100_000):
        peer.answer(batch=batch)


def deep(peer: Peer) -> None:
    """Send an array in an array in an array, as deep as a packet allows."""
    peer.work.send(b"\x91" * (MAX_PACKET_BYTES - 1) + b"\xc0")


def calls_twice(peer: Peer) -> None:
    """Make two calls with one number. The first stays open, since it waits for this very process."""
    for _ in range(2):
        peer.call("rogue", outputs=["Y"])


def lets_go_twice(peer: Peer) -> None:
    peer.call()
    fields = calls_codec(Side.STUB).decode(peer.calls.recv(MAX_PACKET_BYTES))
    places = [block[:2] for block in fields[4]]
    peer.calls.send(encode(Kind.LET_GO, places))
    peer.calls.send(encode(Kind.LET_GO, places))


def indirect_call(peer: Peer) -> None:
    packet = encode(Kind.INDIRECT, peer.answers_region, 0, 16)
    os.pwrite(peer.answers_fd, packet, 0)
    peer.calls.send(encode(Kind.INDIRECT, peer.answers_region, 0, len(packet)))


def flood_calls(peer: Peer) -> None:
    """Ask for models that do not exist, and never read the answers."""
    with contextlib.suppress(OSError):
        for number in range(HUGE):
            peer.call("x" * 10_000, number=number)
    hang()


def grown(peer: Peer, size: int) -> tuple[int, int]:
    """Get another region of so many bytes, and its descriptor."""
    peer.tell(Kind.GROW, size, NO_DEVICE)
    fds: list[int] = []
    while not fds:  # other messages may come before it
        packet, fds, _, _ = socket.recv_fds(peer.control, MAX_PACKET_BYTES, 1)
    return peer.control_codec.decode(packet)[1], fds[0]


def a_large(kind: Kind, say: Callable[[Peer], socket.socket], size: int) -> Fault:
    """Point to a message of that kind, about call 1, that has so many bytes. After its beginning come zeros."""

    def send(peer: Peer) -> None:
        region, fd = grown(peer, size)
        os.pwrite(fd, b"\x98" + bytes([kind, 1]), 0)
        say(peer).send(encode(Kind.INDIRECT, region, 0, size))
        hang()

    return send


def stores_much(peer: Peer) -> None:
    """Send thirty questions of a mebibyte each, in memory, one after another."""
    codec = calls_codec(Side.STUB)
    asked = [Kind.NEW_METRIC, 1, "x" * (1 << 20), "", 0, None, None]
    packet = encode(*asked)
    region, fd = grown(peer, len(packet))
    os.pwrite(fd, packet, 0)
    for _ in range(30):
        peer.calls.send(encode(Kind.INDIRECT, region, 0, len(packet)))
        codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer()


def stores_small(peer: Peer) -> None:
    """Send 800 questions that are just too large for a packet. Each is read twice, its beginning and all of it."""
    codec = calls_codec(Side.STUB)
    packet = encode(Kind.NEW_METRIC, 1, "x" * MAX_PACKET_BYTES, "", 0, None, None)
    os.pwrite(peer.answers_fd, packet, 0)
    for _ in range(800):
        peer.calls.send(encode(Kind.INDIRECT, peer.answers_region, 0, len(packet)))
        codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer()


def tells_and_asks(peer: Peer) -> None:
    """Send as much on the control channel as on the calls channel, in messages that each count as sixty."""
    codec = calls_codec(Side.STUB)
    text = "x" * 30_000
    for number in range(800):
        peer.tell(Kind.LOG, 3, text, "", 0)
        peer.calls.send(encode(Kind.NEW_METRIC, number, text, "", 0, None, None))
        codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer()


def observes_much(peer: Peer) -> None:
    """Send five million observations in five messages, and then a few questions."""
    codec = calls_codec(Side.STUB)
    for number in range(5):
        peer.calls.send(encode(Kind.NEW_METRIC, number, "rogue_seconds", "", 2, [], [1.0]))
        metric = codec.decode(peer.calls.recv(MAX_PACKET_BYTES))[3]["metric"]
        peer.tell(Kind.METRICS, [[metric, OBSERVE, 0.5, MAX_OBSERVATIONS]], [])
    for number in range(3):
        peer.calls.send(encode(Kind.NEW_METRIC, number, "", "", 2, [], [1.0]))
        codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer()


def observes_beyond(peer: Peer) -> None:
    """Send more observations in one message than it may have, in two rows."""
    peer.calls.send(encode(Kind.NEW_METRIC, 1, "rogue_seconds", "", 2, [], [1.0]))
    metric = calls_codec(Side.STUB).decode(peer.calls.recv(MAX_PACKET_BYTES))[3]["metric"]
    peer.tell(Kind.METRICS, [[metric, OBSERVE, 0.5, 1], [metric, OBSERVE, 0.5, MAX_OBSERVATIONS]], [])


def logs_many_lines(peer: Peer) -> None:
    """Send a thousand lines in one message. Once the question after it is answered, they are in the log."""
    peer.tell(Kind.LOG, 1, "one of many\n" * 1000, "", 0)
    peer.calls.send(encode(Kind.IS_MODEL_READY, 1, "nobody", ""))
    calls_codec(Side.STUB).decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer()


def asks_much(peer: Peer) -> None:
    """Send questions that each cost the runtime more than their size, one after another."""
    codec = calls_codec(Side.STUB)
    for number in range(2500):
        peer.calls.send(encode(Kind.IS_MODEL_READY, number, "confined", ""))
        codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer()


def loads_much(peer: Peer) -> None:
    """Load a model with a file of 64 MiB forty times at once. The output is the answer to the last load."""
    size, apart = 64 << 20, 256
    region, fd = grown(peer, size)
    for number in range(1, 41):
        at = number * apart
        # The message lacks the two bytes of the empty file. In their place stand another length, and the zeros behind
        # it.
        beginning = encode(Kind.LOAD_MODEL, number, "another", "{}", [["file:1/x", b""]])[:-2]
        contents = size - at - len(beginning) - 5
        os.pwrite(fd, beginning + b"\xc6" + contents.to_bytes(4, "big"), at)
        peer.calls.send(encode(Kind.INDIRECT, region, at, size - at))
    codec = calls_codec(Side.STUB)
    said = [codec.decode(peer.calls.recv(MAX_PACKET_BYTES)) for _ in range(40)]
    numbers = sorted(each[1] for each in said)
    words = sorted({each[2][1] for each in said})
    peer.answer(responses=[[[], None, [1, f"{numbers[0]} to {numbers[-1]}: {words}"]]])


def asks_too_often(peer: Peer) -> None:
    """Ask more often than allowed if this very model is ready, which it does not answer. The output counts the
    refusals.
    """
    most = 4096
    for number in range(most + 10):
        peer.calls.send(encode(Kind.IS_MODEL_READY, number, "asker", ""))
    codec = calls_codec(Side.STUB)
    refused = [codec.decode(peer.calls.recv(MAX_PACKET_BYTES)) for _ in range(10)]
    numbers = sorted(number for _, number, error, _ in refused if error)
    peer.answer(responses=[[[], None, [1, f"{numbers[0]} to {numbers[-1]} were refused"]]])


def call_of_strings(peer: Peer) -> None:
    """Send a request with nine inputs that are the same 130 MiB of strings. The output is the answer to it."""
    size = 130 << 20
    peer.tell(Kind.GROW, size, NO_DEVICE)
    fds: list[int] = []
    while not fds:  # other messages may come before it
        packet, fds, _, _ = socket.recv_fds(peer.control, MAX_PACKET_BYTES, 1)
    os.pwrite(fds[0], (size - 4).to_bytes(4, "little"), 0)
    blocks = [[peer.control_codec.decode(packet)[1], 0, size]]
    rows = [[f"X{number}", BYTES, [1], 0, 0, size] for number in range(9)]
    peer.calls.send(encode(Kind.INFER, 1, "sibling", -1, False, 0, (), blocks, rows, (), None))
    reply = calls_codec(Side.STUB).decode(peer.calls.recv(MAX_PACKET_BYTES))
    peer.answer(responses=[[[], None, reply[-1]]])


def tells_of_denials(peer: Peer) -> None:
    """Send DENIALS, which only contained models have."""
    peer.tell(Kind.DENIALS, [[0, 1, "/etc/passwd"]])


def tells_of_a_long_denial(peer: Peer) -> None:
    peer.tell(Kind.DENIALS, [[0, 1, "/" * 1025]])


def tells_of_many_denials(peer: Peer) -> None:
    peer.tell(Kind.DENIALS, [[0, 1, str(number)] for number in range(18)])


STRANGE_NAMES = ["", "a b", "0x", "x" * 10_000, "\u00e9", "a\0b", "__a", "nv_inference_count", "le", "strange"]
STRANGE_LABELS: list[object] = [
    None,
    [],
    [["", ""]],
    [["a b", "x"]],
    [["__x", "y"]],
    [["le", "1"]],
    [["a", "1"], ["a", "2"]],
    [["a", 'x\n"\\']],
    [["\u00e9", "\u00e9"]],
    [["a\0", "b\0"]],
]
NO_NUMBER, NO_END = float("nan"), float("inf")
STRANGE_BUCKETS: list[object] = [None, [], [NO_NUMBER], [NO_END, -NO_END], [2.0, 1.0], [1.0, 1.0], [-1.0] * 1000]


def asks_for_strange_metrics(peer: Peer) -> None:
    """Send all that a packet may carry, and changes of it. One of them may be the end of this process."""
    codec = calls_codec(Side.STUB)
    held = []
    asked = itertools.product(STRANGE_NAMES, STRANGE_LABELS, STRANGE_BUCKETS, range(3))
    for number, (name, labels, buckets, kind) in enumerate(asked):
        peer.calls.send(encode(Kind.NEW_METRIC, number, name, "told\n", kind, labels, buckets))
        _, _, error, values = codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
        if error is None and labels is not None:
            held.append((values["metric"], kind))
    for metric, _ in held:
        peer.calls.send(encode(Kind.METRIC_VALUE, 1, metric))
        codec.decode(peer.calls.recv(MAX_PACKET_BYTES))
    number = int(peer.details[len("strange metrics ") :])
    operation, value = divmod(number, len(STRANGE_VALUES))
    # Each kind has an operation of its own. Metrics that allow this operation come first, so the wrong ones come at the
    # end.
    for metric, _ in sorted(held, key=lambda each: each[1] != operation):
        peer.tell(Kind.METRICS, [[metric, operation, STRANGE_VALUES[value], 3]], [])
    peer.answer()


STRANGE_VALUES = [NO_NUMBER, NO_END, -NO_END, -1.0, 1e308]


def tells_much(peer: Peer) -> None:
    """Send three times as much as the runtime reads in a second."""
    for _ in range(60_000):
        peer.tell(Kind.METRICS, [], [])
    peer.answer()


def leave_open(peer: Peer) -> None:
    """Leave a request open, and never read the control channel again."""
    peer.left_open.append(peer.batch)
    peer.say(Kind.ANSWER, peer.batch, NO_CORE, [], [], [], encode([]), None, [OPEN])


def end_the_cancelled(peer: Peer) -> None:
    """Wait until all open requests are cancelled, and end them. The output is their number."""
    cancelled: list[int] = []
    while len(cancelled) < len(peer.left_open):
        fields = peer.control_codec.decode(peer.control.recv(MAX_PACKET_BYTES))
        if fields[0] == Kind.CANCEL:
            cancelled.append(fields[1])
    for batch in cancelled:
        peer.tell(Kind.RESPONSES, [[batch, 0, FINAL, [], None, [None, [1, "ended"]]]])
    told = f"{len(set(cancelled) & set(peer.left_open))} were cancelled"
    peer.left_open.clear()
    peer.answer(responses=[[[], None, [1, told]]])


def say_what_is_asked_for(peer: Peer) -> None:
    """Send a packet so many times, and answer when the runtime has read all of them."""
    _, channel, times, sent = peer.details.split(" ")
    end: socket.socket = getattr(peer, channel)
    for _ in range(int(times)):
        end.send(bytes.fromhex(sent))
    peer.calls.send(encode(Kind.IS_MODEL_READY, HUGE, "nobody", ""))
    codec = calls_codec(Side.STUB)
    fields: list[Any] = []
    while fields[:2] != [Kind.DONE, HUGE]:
        packet = peer.calls.recv(MAX_PACKET_BYTES)
        if not packet:  # the runtime has ended this stub
            os._exit(0)
        fields = codec.decode(packet)
    peer.answer()


def prints_newlines(_: Peer) -> None:
    with contextlib.suppress(OSError):
        while True:
            os.write(1, b"\n" * 65536)


FAULTS: dict[str, Fault] = {
    # Packets that are not messages
    "garbage": lambda peer: peer.work.send(b"\xc1\xff garbage"),
    "an empty packet": lambda peer: peer.work.send(b""),
    "a packet too long": lambda peer: peer.work.send(bytes(MAX_PACKET_BYTES + 1)),
    "a number alone": lambda peer: peer.work.send(encode(6)[1:]),
    "a map": lambda peer: peer.work.send(b"\x81\xa1a\x01"),
    "no end of arrays": deep,
    "an unknown kind": lambda peer: peer.say(99),
    "too few fields": lambda peer: peer.say(Kind.ANSWER, peer.batch),
    "a float for a number": lambda peer: peer.answer(batch=float(peer.batch)),  # type: ignore[arg-type]
    "a negative number": lambda peer: peer.output(at=-64),
    "true for a number": lambda peer: peer.output(offset=True),
    # Messages out of their order
    "loaded again": lambda peer: peer.say(Kind.LOADED, {}),
    "finalized unasked": lambda peer: peer.say(Kind.FINALIZED, "", ""),
    "the runtime's part": lambda peer: peer.say(Kind.FINALIZE),
    "a log line for work": lambda peer: peer.say(Kind.LOG, 0, "hello", "", 0),
    "another batch": lambda peer: peer.answer(batch=peer.batch + 1),
    "a response too many": lambda peer: peer.answer(responses=[[[], None, None]] * (peer.count + 1)),
    "no responses": lambda peer: peer.answer(responses=[]),
    "a remark too many": lambda peer: raw_answer(peer, b"\x91\x90", [None] * 2),
    "a malformed remark": lambda peer: raw_answer(peer, b"\x91\x90", [[None, [9, "none"]]]),
    "a layout of garbage": lambda peer: raw_answer(peer, b"\xc1"),
    "a layout of a number": lambda peer: raw_answer(peer, b"\x07"),
    "a layout without end": lambda peer: raw_answer(peer, b"\x91" * 10_000 + b"\xc0"),
    # Memory that is not the stub's
    "an unknown region": lambda peer: peer.output(region=HUGE),
    "another's region": lambda peer: peer.output(region=peer.requests_region, at=1 << 16),
    "beyond the region": lambda peer: peer.output((1 << 20,), 1 << 22, block_size=1 << 22),
    "a block at the end of the world": lambda peer: peer.output(at=HUGE),
    "beyond the block": lambda peer: peer.output((8,), 32),
    "beyond the block by its offset": lambda peer: peer.output(offset=8),
    "an unknown block": lambda peer: peer.output(block=1),
    "more than was lent": lambda peer: peer.answer(
        [[peer.blocks[0][0], peer.blocks[0][1], 1 << 20]], [[0, FP32, [1 << 18], 0, 0, 1 << 20]]
    ),
    "an indirect message beyond": lambda peer: peer.say(Kind.INDIRECT, peer.answers_region, 0, 1 << 40),
    "an indirect message in an indirect one": indirect_twice,
    "an answer that bursts": stored(lambda peer: peer.work),
    "a notice that bursts": stored(lambda peer: peer.control),
    "a call that bursts": stored(lambda peer: peer.calls),
    "an answer that is too large": a_large(Kind.ANSWER, lambda peer: peer.work, (1 << 26) + 1),
    "a notice that is too large": a_large(Kind.LOG, lambda peer: peer.control, (1 << 26) + 1),
    "a call that is too large": a_large(Kind.INFER, lambda peer: peer.calls, (1 << 24) + 1),
    "a word of what is let go of that lies in memory": a_large(Kind.LET_GO, lambda peer: peer.calls, 16),
    "a load without a name that lies in memory": a_large(Kind.LOAD_MODEL, lambda peer: peer.calls, 16),
    "a layout that bursts": lambda peer: raw_answer(peer, b"\x91\xdc\x40\x00" + b"\x90" * 0x4000),
    "blocks that hold nothing": lambda peer: peer.answer([[peer.answers_region, 0, 16]]),
    "keeps its input a thousand times": lambda peer: peer.answer(held=[peer.blocks[0][:2]] * 1000),
    "keeps what it was not given": lambda peer: peer.answer(held=[[peer.answers_region, 0]]),
    "releases what it does not hold": lambda peer: peer.answer(released=[peer.blocks[0][:2]]),
    # Malformed tensors
    "an unknown output": lambda peer: peer.output(index=7),
    "an output twice": twice([0, FP32, [4], 0, 0, 16]),
    "a shape that does not fit": lambda peer: peer.output((5,)),
    "a huge shape": lambda peer: peer.output((HUGE, HUGE, HUGE)),
    "a huge shape of nothing": lambda peer: peer.output((0, HUGE, HUGE), 0),
    "no such datatype": lambda peer: peer.output(datatype=15),
    "33 dimensions": lambda peer: peer.output((1,) * 33, 4),
    "strings that are none": bad_strings,
    "strings without a byte": lambda peer: peer.output((5,), 0, datatype=BYTES, index=1),
    # The control channel
    "control garbage": lambda peer: peer.control.send(b"\xc1"),
    "control of the runtime": lambda peer: peer.tell(Kind.REGION, 1, 1, 1, NO_DEVICE, b""),
    "a work message for control": lambda peer: peer.tell(Kind.FINALIZED, "", ""),
    "retires the only region": lambda peer: peer.tell(Kind.RETIRE, peer.answers_region),
    "an event unasked": lambda peer: peer.tell(Kind.EVENT, 0, b""),
    "an event of the wrong size": lambda peer: peer.tell(Kind.EVENT, 0, bytes(65)),
    "retires what is none": lambda peer: peer.tell(Kind.RETIRE, HUGE),
    "an indirect notice beyond": lambda peer: peer.tell(Kind.INDIRECT, peer.answers_region, 0, 1 << 40),
    "an indirect notice in an indirect one": control_indirect_twice,
    "changes a metric that there never was": lambda peer: peer.tell(Kind.METRICS, [[1, 0, 1.0, 1]], []),
    "drops a metric that there never was": lambda peer: peer.tell(Kind.METRICS, [], [HUGE]),
    "a whole number for a metric": lambda peer: peer.tell(Kind.METRICS, [[1, 0, 1, 1]], []),
    "observes more than it may": observes_beyond,
    "denials of one that is not contained": tells_of_denials,
    "a denial that is too long": tells_of_a_long_denial,
    "too many denials": tells_of_many_denials,
    "is ready unasked": lambda peer: peer.tell(Kind.READINESS, 1, None),
    # Responses apart from the answer
    "responds to no batch": responses((HUGE, 0, FINAL, [], EMPTY, None)),
    "responds to no request": responses((None, 1, FINAL, [], EMPTY, None)),
    "responds with nothing": responses((None, 0, 0, [], None, None)),
    "ends what had no response": responses((None, 0, FINAL, [], None, None)),
    "responds twice": responses((None, 0, 0, [], EMPTY, None), (None, 0, 0, [], EMPTY, None)),
    "responds with two in one": responses((None, 0, FINAL, [], b"\x92\x90\x90", None)),
    "responds with an unknown block": responses((None, 0, FINAL, [], encode([[0, FP32, [4], 0, 0, 16]]), None)),
    "responds from the request": from_the_request,
    "responds with an error in a block": an_error_in_a_block,
    "a state too many": states(0, 0),
    "a state that is none": states(3),
    "floods growth": flood(encode(Kind.GROW, 1, NO_DEVICE)),
    "floods releases": flood(encode(Kind.RELEASE, [[1, 64]] * 1024)),
    # The calls channel
    "calls garbage": lambda peer: peer.calls.send(b"\xc1"),
    "a call of the runtime": lambda peer: peer.calls.send(encode(Kind.DONE, 1, None, {})),
    "a call that is open": calls_twice,
    "a call from no region": lambda peer: peer.call(region=HUGE),
    "a call from another's region": lambda peer: peer.call(region=peer.requests_region, at=1 << 16),
    "a call from beyond the region": lambda peer: peer.call(at=HUGE),
    "a call beyond its block": lambda peer: peer.call(offset=8),
    "a call from an unknown block": lambda peer: peer.call(block=1),
    "a call with blocks of nothing": lambda peer: peer.calls.send(
        encode(Kind.INFER, 1, "sibling", -1, False, 0, (), [[peer.answers_region, 0, 16]], (), (), None)
    ),
    "a call of no shape": lambda peer: peer.call(shape=(5,)),
    "a huge call of nothing": lambda peer: peer.call(shape=(0, HUGE, HUGE), size=0),
    "a call that lets go of what it has not": lambda peer: peer.call(released=[[HUGE, 0]]),
    "lets go of what it has not": lambda peer: peer.calls.send(encode(Kind.LET_GO, [[peer.requests_region, 1 << 16]])),
    "lets go twice": lets_go_twice,
    "an indirect call in an indirect one": indirect_call,
    "floods calls": flood_calls,
    # Ends
    "closes the work channel": closing("work"),
    "leaves a child": leave_a_child,
    "leaves a child that tells on": leave_a_child_that_tells_on,
    "dies": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}

# These break nothing by themselves. The tests say what follows from them.
LATER: dict[str, Fault] = {
    "answers twice": answers_twice,
    "answers in advance": answers_in_advance,
    "sends descriptors": with_descriptors,
    "closes the control channel": closing("control"),
    "floods the log": flood(encode(Kind.LOG, 3, "x" * 8000, "f" * 1000, 1)),
    "floods with metrics": flood(encode(Kind.METRICS, [], [])),
    "floods its output": prints_newlines,
    "asks too often": asks_too_often,
    "loads much": loads_much,
    "stores much": stores_much,
    "stores small": stores_small,
    "tells and asks": tells_and_asks,
    "observes much": observes_much,
    "logs many lines": logs_many_lines,
    "asks much": asks_much,
    "a call of strings": call_of_strings,
    "tells much": tells_much,
    **{f"strange metrics {number}": asks_for_strange_metrics for number in range(15)},
    "leaves it open": leave_open,
    "ends the cancelled": end_the_cancelled,
    "grows beyond all": grow_beyond_all,
    "grows on a device": grow_on_a_device,
    "keeps its input": lambda peer: peer.answer(held=[block[:2] for block in peer.blocks]),
}


def completing(then: Fault) -> Fault:
    """Complete the configuration as a process that becomes an instance, and misbehave when it shall be one."""

    def complete(peer: Peer) -> None:
        peer.say(Kind.COMPLETED, "{}", True)
        peer.hear()
        then(peer)

    return complete


STARTS: dict[str, Fault] = {
    "never says anything": lambda _: hang(),
    "closes both channels": closing("work", "control"),
    "says garbage": lambda peer: peer.work.send(b"\xc1"),
    "answers what was not asked": lambda peer: peer.say(Kind.ANSWER, 1, NO_CORE, [], [], [], b"\x90", None, None),
    "completes instead of loading": lambda peer: peer.say(Kind.COMPLETED, "{}", False),
    "loads instead of completing": lambda peer: peer.say(Kind.LOADED, {}),
    "completes with no JSON": lambda peer: peer.say(Kind.COMPLETED, "{", False),
    "completes with a number": lambda peer: peer.say(Kind.COMPLETED, "7", False),
    "completes with no end": lambda peer: peer.say(Kind.COMPLETED, "[" * 30_000, False),
    "completes and dies": completing(lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "completes and completes again": completing(lambda peer: peer.say(Kind.COMPLETED, "{}", True)),
    "completes and answers": completing(
        lambda peer: peer.say(Kind.ANSWER, 1, NO_CORE, [], [], [], b"\x90", None, None)
    ),
    "fails with an error number that exec does not have": lambda peer: peer.say(
        Kind.FAILED, EXEC_FAILED, "0013" + "9" * 30, ""
    ),
    "dies": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}


def answer_hook(peer: Peer, kind: int) -> None:
    """Answer SLEEP or WAKE, with nonsense if `FAULT_HOOK` names the one that was asked."""
    right, wrong = Kind.SLEPT, Kind.WOKEN
    if kind == Kind.WAKE:
        right, wrong = wrong, right
    hook, _, nonsense = os.environ["FAULT_HOOK"].partition(":")
    if hook != Kind(kind).name.lower():
        peer.say(right, "", "")
    elif nonsense == "garbage":
        peer.work.send(os.urandom(200))
    elif nonsense == "another kind":
        peer.say(wrong, "", "")
    elif nonsense == "an answer":
        peer.say(Kind.ANSWER, 1, NO_CORE, [], [], [], b"\x90", None, None)
    elif nonsense == "twice":
        peer.say(right, "", "")
        peer.say(right, "", "")
    elif nonsense == "a place in memory that it has not":
        peer.say(Kind.INDIRECT, peer.answers_region, 0, 1 << 40)


def serve(peer: Peer, start: dict[str, Any]) -> None:
    if start["mode"] == "complete":
        config = start["config"]
        config["instance_group"] = [{"kind": "KIND_CPU", "count": 64}]
        peer.say(Kind.COMPLETED, json.dumps(config), False)
    else:
        has_check, hook = "FAULT_HAS_CHECK" in os.environ, os.environ.get("FAULT_HOOK", "")
        peer.say(Kind.LOADED, {"has_is_ready": has_check, "can_sleep": bool(hook)})
    while True:
        message = peer.hear()
        if message[0] in (Kind.SLEEP, Kind.WAKE):
            answer_hook(peer, message[0])
            continue
        if message[0] == Kind.FINALIZE:
            peer.say(Kind.FINALIZED, "", "")
            os._exit(0)
        _, peer.batch, _, _, peer.blocks, layout, requests, _ = message
        peer.count = len(unpack_layout(layout))
        details = requests and requests[0]
        peer.details = details[0] if details else ""
        fault = (FAULTS | LATER).get(peer.details)
        if peer.details.startswith("says "):
            say_what_is_asked_for(peer)
        elif fault is None:
            peer.answer()
        else:
            fault(peer)


def main() -> None:
    _, _, _, work_fd, control_fd, calls_fd, parent_pid, _ = sys.argv
    die_with(int(parent_pid))
    place, _, name = os.environ.get("FAULT_AT_START", "").partition(":")
    if place == "boot":
        STARTS[name](Peer(int(work_fd), int(control_fd), int(calls_fd)))
    peer = Peer(int(work_fd), int(control_fd), int(calls_fd))
    peer.hear_regions()
    _, text = peer.hear()
    start = json.loads(text)
    if place == start["mode"]:
        STARTS[name](peer)
    serve(peer, start)


if __name__ == "__main__":
    main()
