"""The native codec as programs, which read many packets at once."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.compiled import compiled

from moonpool.ipc.messages import LAYOUT
from moonpool.runtime.triton import wire_header

NATIVE = wire_header.HEADER.parent
# Messages of four channels, and what comes in some of them.
CHANNELS = ("work", "control", "calls", "launcher", "layout", "answer", "place", "strings")


class Asked(NamedTuple):
    """`sender` is a number up to 255 where the packet is no message.

    Of a layout, it is the number of the values that it may have, 0 for as many as any; of an answer, that of the
    requests in the batch, 0 for a response apart from it; and of strings, their number.
    """

    channel: str
    sender: int
    packet: bytes


class Told(NamedTuple):
    """Why it was refused, "" where it was not; then the packet as it was read and written again."""

    refused: str
    again: bytes


class CodecProgram:
    """Compiled once, run for each list of packets."""

    def __init__(self, folder: Path) -> None:
        """Compile it into the folder."""
        self._program = _compiled("codec_program", folder, "-O0")

    def tell(self, asked: list[Asked]) -> list[Told]:
        """Return the native codec's result for each packet. A crash fails the test."""
        ended = subprocess.run([str(self._program)], input=_packets(asked), capture_output=True, check=False)
        if ended.returncode:
            raise AssertionError(ended.stderr.decode(errors="replace"))
        texts = _texts(ended.stdout)
        told = [Told(refused.decode(), again) for refused, again in zip(texts[::2], texts[1::2], strict=True)]
        assert len(told) == len(asked)
        return told


class CodecFuzzer:
    """Compiled so that it sees which code a packet reaches."""

    def __init__(self, folder: Path) -> None:
        """Compile it into the folder."""
        self._program = _compiled("codec_fuzzer", folder, "-fsanitize-coverage=trace-pc")

    def find(self, known: list[Asked], seconds: int, seed: int, crash: Path) -> list[tuple[Asked, Told]]:
        """Packets that reach code that those before them do not. Raises CalledProcessError after one that was not
        borne.

        That one is in `crash` then: the number of its channel, its sender, its bytes.
        """
        command = [str(self._program), str(seconds), str(seed), str(crash)]
        ended = subprocess.run(command, input=_packets(known), stdout=subprocess.PIPE, check=True)
        texts = _texts(ended.stdout)
        return [
            (asked_of(head + packet), Told(refused.decode(), again))
            for head, packet, refused, again in zip(*[iter(texts)] * 4, strict=True)
        ]


def asked_of(data: bytes) -> Asked:
    """Return the question that a file of the corpus holds."""
    return Asked(CHANNELS[data[0]], data[1], data[2:])


def file_of(asked: Asked) -> bytes:
    """Return the contents of a file of the corpus for this question."""
    return bytes([CHANNELS.index(asked.channel), asked.sender]) + asked.packet


def _compiled(name: str, folder: Path, *options: str) -> Path:
    (folder / "structs.inc").write_text(_structs(), encoding="utf-8")
    (folder / "writers.inc").write_text(_writers(), encoding="utf-8")
    here = Path(__file__).parent
    core = [NATIVE / f"{each}.cpp" for each in ("answer", "codec", "msgpack", "place")]
    sources = [here / f"{name}.cpp", *core]
    return compiled(folder / name, sources, f"-I{NATIVE}", f"-I{folder}", *options)


def _packets(asked: list[Asked]) -> bytes:
    packets = []
    for each in asked:
        channel, size = CHANNELS.index(each.channel), struct.pack("<I", len(each.packet))
        packets.append(bytes([channel, each.sender]) + size + each.packet)
    return b"".join(packets)


def _texts(data: bytes) -> list[bytes]:
    texts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return texts


def _writers() -> str:
    """A function for each struct that writes what it has; rows are arrays of it."""
    rows = wire_header.Rows()
    messages = [rows.message(kind, message) for kind, message in wire_header.received().items()]
    assert messages
    rows.type(LAYOUT.item, "")
    names = {wire_header.camel(kind.name) for kind in wire_header.received()}
    parts = []
    for name, fields in rows.fields.items():
        begin, function = f"writer.array({len(fields)});", "write"
        if name in names:
            begin, function = "", "write_fields"
        values = "".join(f", each.{field}" for field in fields)
        parts.append(
            f"inline void {function}(Writer& writer, const wire::{name}& each) {{ {begin} write_all(writer{values}); }}"
        )
    return "\n".join(parts)


def _structs() -> str:
    """A function for each enumeration that reads a message by its struct, "" where there is none."""
    received = wire_header.received()
    parts = []
    for name in ("Kind", "Word"):
        cases = [
            f"case wire::{name}::{kind.name}: return by_struct<wire::{name}::{kind.name}, "
            f"wire::{wire_header.camel(kind.name)}>(fields);"
            for kind in received
            if type(kind).__name__ == name
        ]
        parts += [
            f"template <> std::string by_struct(wire::{name} kind, Reader fields) {{",
            "switch (kind) {",
            *cases,
            'default: return "";',
            "}}",
        ]
    return "\n".join(parts)
