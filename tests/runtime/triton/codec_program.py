"""The native codec as a program, which reads many packets at once."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.compiled import compiled

from moonpool.runtime.triton import wire_header

NATIVE = wire_header.HEADER.parent
CHANNELS = ("work", "control", "calls", "launcher", "layout")


class Asked(NamedTuple):
    """`sender`: of a layout, how many values it may have, up to 255; 0 for as many as any."""

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
        (folder / "structs.inc").write_text(_structs(), encoding="utf-8")
        sources = [Path(__file__).with_suffix(".cpp"), NATIVE / "codec.cpp", NATIVE / "msgpack.cpp"]
        self._program = compiled(folder / "codec", sources, f"-I{NATIVE}", f"-I{folder}")

    def tell(self, asked: list[Asked]) -> list[Told]:
        """What the codec says of each; what it cannot bear ends the test."""
        packets = [
            bytes([CHANNELS.index(channel), sender]) + struct.pack("<I", len(packet)) + packet
            for channel, sender, packet in asked
        ]
        ended = subprocess.run(
            [str(self._program)], input=b"".join(packets), capture_output=True, check=False
        )
        if ended.returncode:
            raise AssertionError(ended.stderr.decode(errors="replace"))
        texts = _texts(ended.stdout)
        told = [
            Told(refused.decode(), again)
            for refused, again in zip(texts[::2], texts[1::2], strict=True)
        ]
        assert len(told) == len(asked)
        return told


def _texts(data: bytes) -> list[bytes]:
    texts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return texts


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
