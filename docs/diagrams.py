"""Draws the tables of the code into pages of the site, between the markers that name them.

`python docs/diagrams.py wire` prints site/WIRE.md with its tables, as the site has it, and `states` site/STATES.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc import messages
from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.errors import CODES
from moonpool.ipc.messages import (
    CALLS,
    CONTROL,
    WORK,
    Flag,
    Int,
    Kind,
    ListOf,
    Maybe,
    Message,
    OneOf,
    Packed,
    Raw,
    Real,
    Row,
    Table,
    Text,
)
from moonpool.ipc.tensors import ITEMSIZE, NAMES
from moonpool.runtime.model.states import BACKEND, INSTANCE, MODEL, RESIDENCE, draw
from moonpool.runtime.triton import messages as launcher

if TYPE_CHECKING:
    from enum import IntEnum

    from moonpool.ipc.messages import Spec

PAGES = {name: Path(__file__).parent / "site" / f"{name.upper()}.md" for name in ("wire", "states")}


def _mermaid(text: str) -> str:
    return f"```mermaid\n{text.rstrip()}\n```"


class _Fields:
    """Describes what the fields of messages may be; the rows in them are listed apart."""

    def __init__(self) -> None:
        self._named = {
            spec: name.strip("_").lower()
            for module in (messages, launcher)
            for name, spec in vars(module).items()
            if isinstance(spec, Row)
        }
        self._rows: dict[str, str] = {}
        self.tables = {
            "work_fields": self._table(WORK),
            "control_fields": self._table(CONTROL),
            "calls_fields": self._table(CALLS),
            "launcher_fields": self._table(launcher.LAUNCHER),
        }
        layout = self._words(messages.LAYOUT.item, "")
        lines = ["| row | fields |", "| --- | --- |", f"| layout | {layout} |"]
        lines += [f"| {name} | {fields} |" for name, fields in self._rows.items()]
        self.tables["rows"] = "\n".join(lines)

    def _table(self, table: dict[Kind, Message] | dict[IntEnum, Message]) -> str:
        # On the work channel the two sides take turns.
        is_ordered = table is WORK
        lines = ["| message | from | fields |" + " may be followed by |" * is_ordered]
        lines.append("| --- | --- | --- |" + " --- |" * is_ordered)
        for kind, message in table.items():
            sender = "either" if message.sender is None else message.sender.name.lower()
            fields = self._fields(message.fields, kind.name.lower())
            row = f"| {int(kind)} {kind.name} | {sender} | {fields} |"
            if is_ordered:
                row += f" {', '.join(sorted(k.name for k in message.followers)) or 'the end'} |"
            lines.append(row)
        return "\n".join(lines)

    def _fields(self, fields: dict[str, Spec], where: str) -> str:
        words = [f"{name}: {self._words(spec, f'{where}_{name}')}" for name, spec in fields.items()]
        return "; ".join(words) or "none"

    def _words(self, spec: Spec, where: str) -> str:
        if isinstance(spec, Int):
            return "id" if (spec.low, spec.high) == (0, 2**63 - 1) else _bounds(spec)
        if isinstance(spec, Maybe):
            return f"{self._words(spec.item, where)} or nil"
        if isinstance(spec, OneOf):
            return " or ".join(self._words(item, where) for item in spec.items)
        if isinstance(spec, ListOf):
            return f"up to {_power(spec.length)} of ({self._words(spec.item, where)})"
        if isinstance(spec, Row):
            name = self._named.get(spec, where)
            if name not in self._rows:
                self._rows[name] = ""
                self._rows[name] = self._fields(spec.fields, name)
            return name
        if isinstance(spec, (Flag, Real)):
            return "flag" if isinstance(spec, Flag) else "real"
        names = {Text: "text", Raw: "bytes", Table: "table", Packed: "packed layout"}
        return f"{names[type(spec)]} up to {_power(spec.length)}"


def _power(number: int) -> str:
    exponent = number.bit_length() - 1
    return f"2^{exponent}" if number == 1 << exponent and exponent > 9 else str(number)


def _bounds(spec: Int) -> str:
    if spec.high == 2**63 - 1:
        return f"int from {spec.low}"
    high = spec.high + 1
    many = high & (high - 1) == 0 and high > 1 << 15
    return f"int {spec.low} to {f'2^{high.bit_length() - 1} - 1' if many else spec.high}"


def _numbers() -> str:
    """Numbers that both sides must have alike."""
    lines = ["| number | of |", "| --- | --- |"]
    lines.append(f"| {messages.PROTOCOL_VERSION} | PROTOCOL_VERSION, between runtime and stub |")
    lines.append(f"| {launcher.LAUNCHER_VERSION} | LAUNCHER_VERSION, between shim and launcher |")
    lines.append(f"| {MAX_PACKET_BYTES} | bytes of a packet, at most |")
    for code, name in NAMES.items():
        size = f"{ITEMSIZE[code]} bytes" if ITEMSIZE[code] else "of any size"
        lines.append(f"| {code} | datatype {name}, {size} |")
    lines += [f"| {number} | error {name} |" for number, name in enumerate(CODES)]
    return "\n".join(lines)


def drawings() -> dict[str, str]:
    """Return the text behind each marker."""
    return {
        "backend": _mermaid(draw(BACKEND)),
        "model": _mermaid(draw(MODEL)),
        "residence": _mermaid(draw(RESIDENCE)),
        "instance": _mermaid(draw(INSTANCE)),
        "numbers": _numbers(),
        **_Fields().tables,
    }


def drawn(page: str) -> str:
    """The page with every drawing as the tables are now. Raises KeyError for an unknown marker."""
    known = drawings()

    def block(match: re.Match[str]) -> str:
        return f"<!-- drawn: {match[1]} -->\n{known[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- drawn: (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


if __name__ == "__main__":
    sys.stdout.write(drawn(PAGES[sys.argv[1]].read_text(encoding="utf-8")))
