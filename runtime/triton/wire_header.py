"""Writes `ipc/native/wire.h`, the tables of messages for all that is compiled: the library for tritonserver and the
extensions.

Run it with `python -m moonpool.runtime.triton.wire_header` after a change to a table. A message that the library
receives becomes a struct, which is read from a packet. A message that it sends is encoded by its kind, which knows the
number of fields. Rows of plain values can be encoded, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType

from moonpool.ipc import arena, channel, codec, denials, memory, messages
from moonpool.ipc.messages import Flag, Int, ListOf, Maybe, Message, OneOf, Packed, Raw, Real, Row, Spec, Table, Text
from moonpool.ipc.tensors import BYTES, ITEMSIZE, LENGTH_BYTES, MAX_ELEMENTS
from moonpool.runtime.model import budgets
from moonpool.runtime.process import terminal
from moonpool.runtime.triton import messages as launcher

HEADER = Path(messages.__file__).parent / "native" / "wire.h"

_TABLES: dict[str, tuple[type[IntEnum], dict[IntEnum, Message]]] = {
    "Work": (messages.Kind, dict(messages.WORK.items())),
    "Control": (messages.Kind, dict(messages.CONTROL.items())),
    "Calls": (messages.Kind, dict(messages.CALLS.items())),
    "Launcher": (launcher.Word, launcher.LAUNCHER),
}
_KINDS = {"Kind": messages.Kind, "Word": launcher.Word}
_SIDES = {"Side": messages.Side, "End": launcher.End}
_OURS = (messages.Side.RUNTIME, launcher.End.SHIM)
# What the stub's extension reads, too.
_READ_BY_STUBS = (messages.Kind.EXECUTE,)
_PLAIN = {Real: "double", Text: "std::string_view", Raw: "Raw", Packed: "Raw", Flag: "bool"}
_SCALARS = (Int, Real, Text, Raw, Flag)
_TYPES = {
    Int: "kInt",
    Real: "kReal",
    Text: "kText",
    Raw: "kRaw",
    Packed: "kRaw",
    Flag: "kFlag",
    Table: "kTable",
    ListOf: "kList",
    Row: "kRow",
    OneOf: "kOneOf",
}
_TOP = """\
// The messages between runtime and stub, and between shim and launcher. Made of the tables in ipc/messages.py and
// runtime/triton/messages.py, which say what they are for: `python -m moonpool.runtime.triton.wire_header`.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "codec.h"
#include "msgpack.h"

namespace moonpool::wire {
"""
_BOTTOM = """\
// Returns true if the bytes are a layout of at most so many values; else `wrong` says why.
inline bool check_layout(std::string_view packed, uint64_t most, std::string* wrong) {
  return check_packed(kSpecs, kSpecs[kLayoutSpec], packed, most, wrong);
}

template <class Table>
constexpr size_t fields_in(const Table& table, typename Table::Kind kind) {
  for (const Message& message : table.messages) {
    if (message.kind == static_cast<uint8_t>(kind)) return message.count;
  }
  return 0;
}
constexpr size_t field_count(Kind kind) {
  return std::max({fields_in(kWork, kind), fields_in(kControl, kind), fields_in(kCalls, kind)});
}
constexpr size_t field_count(Word kind) { return fields_in(kLauncher, kind); }

// The packet of a message; its fields are checked for nothing but their number.
template <auto kind, class... Fields>
void encode(Writer& writer, const Fields&... fields) {
  static_assert(sizeof...(fields) == field_count(kind), "the table has another number of fields");
  writer.clear();
  writer.array(1 + sizeof...(fields));
  writer.uint(static_cast<uint64_t>(kind));
  write_all(writer, fields...);
}

}  // namespace moonpool::wire
"""


def header() -> str:
    """Return the whole text of the header."""
    rows = Rows()
    structs = [rows.message(kind, message) for kind, message in received().items()]
    specs = _Specs()
    tables = [specs.table(name, enum, table) for name, (enum, table) in _TABLES.items()]
    layout = specs.placed([("", messages.LAYOUT.item)])
    # The row of a layout, which is read for itself.
    rows.type(messages.LAYOUT.item, "")
    parts = [
        _TOP,
        *(_enumeration(name, enum) for name, enum in _SIDES.items()),
        *(_kinds(name, enum) for name, enum in _KINDS.items()),
        _constants(),
        *rows.structs,
        *structs,
        specs.text(),
        *tables,
        f"constexpr size_t kLayoutSpec = {layout};",
        _BOTTOM,
    ]
    return "\n".join(parts)


def received() -> dict[IntEnum, Message]:
    """Return the messages that something compiled receives, each kind once."""
    return {
        kind: message
        for _, table in _TABLES.values()
        for kind, message in table.items()
        if message.sender not in _OURS or kind in _READ_BY_STUBS
    }


def _all(enum: type[IntEnum]) -> dict[IntEnum, Message]:
    return {kind: message for _, table in _TABLES.values() for kind, message in table.items() if isinstance(kind, enum)}


def camel(name: str) -> str:
    """Turn `NEW_METRIC` into `NewMetric`."""
    return "".join(word.capitalize() for word in name.strip("_").split("_"))


def _enumeration(name: str, enum: type[IntEnum]) -> str:
    lines = [f"  {member.name} = {int(member)}," for member in enum]
    return "\n".join([f"enum class {name} : uint8_t {{", *lines, "};\n"])


def _kinds(name: str, enum: type[IntEnum]) -> str:
    """Write the enumeration of a table, with the fields of each message."""
    table = _all(enum)
    lines = [f"enum class {name} : uint8_t {{"]
    lines += [f"  {kind.name} = {int(kind)},  // {', '.join(table[kind].fields)}" for kind in enum]
    lines.append("};\n")
    return "\n".join(line.removesuffix("  // ") for line in lines)


def _numbers(module: ModuleType) -> dict[str, int]:
    """Return the numbers that a module itself defines."""
    return {
        name: value for name, value in vars(module).items() if type(value) is int and name.isupper() and name[0] != "_"
    }


def _constants() -> str:
    numbers = {
        **_numbers(messages),
        **_numbers(launcher),
        **_numbers(budgets),
        "MAX_PACKET_BYTES": channel.MAX_PACKET_BYTES,
        "ALIGNMENT": memory.ALIGNMENT,
        "LARGEST_CLASS": arena.LARGEST_CLASS,
        "MAX_ELEMENTS": MAX_ELEMENTS,
        "LENGTH_BYTES": LENGTH_BYTES,
        "BYTES": BYTES,
    }
    lines = [
        f"constexpr {'uint64_t' if value >= 0 else 'int64_t'} k{camel(name)} = {value};"
        for name, value in numbers.items()
    ]
    sizes = ", ".join(str(ITEMSIZE.get(code, 0)) for code in range(max(ITEMSIZE) + 1))
    lines.append("// Bytes that an element takes, by its datatype; 0 for BYTES, and for 0, which is none.")
    lines.append(f"constexpr std::array<uint8_t, {max(ITEMSIZE) + 1}> kItemBytes = {{{sizes}}};")
    ranges = _ranges(terminal.SHOWN_CODES)
    pairs = ", ".join(f"{{{first}, {last}}}" for first, last in ranges)
    lines.append("// Characters that a line of the log shows as escapes, from the first to the last.")
    lines.append(f"constexpr std::array<std::array<uint32_t, 2>, {len(ranges)}> kShownCodes = {{{{{pairs}}}}};")
    lines += _denials()
    lines.append(f'static_assert(kMaxValues == {codec.MAX_ITEMS}, "as in ipc/codec.py");\n')
    lines += ["// How many messages one counts as, beside its size.", "constexpr double cost_of(Kind kind) {"]
    lines += ["  switch (kind) {"]
    lines += [f"    case Kind::{messages.Kind(kind).name}: return {cost};" for kind, cost in budgets.COSTS.items()]
    lines += ["    default: return 1;", "  }", "}\n"]
    return "\n".join(lines)


def _denials() -> list[str]:
    """Write the words for refusals of the sandbox, and the clause that names the option, without its value."""
    kinds = range(len(denials.KINDS))
    words = [denials.in_words(kind, "") for kind in kinds]
    options = [denials.would_allow(kind, "") for kind in kinds]
    rows = (("Words", words), ("Options", options))
    return [
        f"constexpr uint64_t kFork = {denials.FORK};",
        *(
            f"constexpr std::array<std::string_view, {len(texts)}> kDenial{name} = {{"
            + ", ".join(f'"{text}"' for text in texts)
            + "};"
            for name, texts in rows
        ),
    ]


def _ranges(codes: Sequence[int]) -> list[tuple[int, int]]:
    """Turn ordered codes into ranges, each with its first and its last code."""
    found: list[tuple[int, int]] = []
    for code in codes:
        first = found.pop()[0] if found and found[-1][1] == code - 1 else code
        found.append((first, code))
    return found


class Rows:
    """The structs. Those of messages are made on request, those of rows when a message has them."""

    def __init__(self) -> None:
        self.structs: list[str] = []
        # The names of the fields of each struct.
        self.fields: dict[str, list[str]] = {}
        self._names: dict[Row, str] = {}
        self._known = {
            spec: camel(name)
            for module in (messages, launcher)
            for name, spec in vars(module).items()
            if isinstance(spec, Row)
        }

    def message(self, kind: IntEnum, message: Message) -> str:
        """Make the struct of a message, which is read from the place where its fields begin."""
        name = camel(kind.name)
        lines = self._members(name, message.fields)
        names = ", ".join(message.fields)
        lines.append(f"  explicit {name}(Reader reader) {{ read_all(reader, {names}); }}")
        self.fields[name] = list(message.fields)
        return "\n".join([*lines, "};\n"])

    def _row(self, row: Row, where: str) -> str:
        name = self._names.get(row)
        if name is None:
            name = self._names[row] = self._known.get(row, where)
            lines = self._members(name, row.fields)
            names = ", ".join(row.fields)
            lines += ["  void read(Reader& reader) {", "    reader.array();"]
            lines += [f"    read_all(reader, {names});", "  }"]
            if all(type(spec) in _SCALARS for spec in row.fields.values()):
                lines += ["  void write(Writer& writer) const {"]
                lines += [f"    writer.array({len(row.fields)});"]
                lines += [f"    write_all(writer, {names});", "  }"]
            self.fields[name] = list(row.fields)
            self.structs.append("\n".join([*lines, "};\n"]))
        return name

    def _members(self, name: str, fields: dict[str, Spec]) -> list[str]:
        return [f"struct {name} {{"] + [
            f"  {self.type(spec, name + camel(field))} {field}{{}};" for field, spec in fields.items()
        ]

    def type(self, spec: Spec, where: str) -> str:
        """Return the C++ type of a value. A row without a name of its own gets one from its place."""
        if isinstance(spec, Int):
            return "int64_t" if spec.low < 0 else "uint64_t"
        if isinstance(spec, Table):
            return "Entries"
        if isinstance(spec, OneOf):
            return "Value"
        if isinstance(spec, Maybe):
            return f"std::optional<{self.type(spec.item, where)}>"
        if isinstance(spec, ListOf):
            return f"List<{self.type(spec.item, where)}>"
        if isinstance(spec, Row):
            return self._row(spec, where)
        return _PLAIN[type(spec)]


class _Specs:
    """The array of all specs. The parts of a spec stand in a row, and equal rows appear once."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._places: dict[tuple[tuple[str, Spec], ...], int] = {}

    def placed(self, specs: list[tuple[str, Spec]]) -> int:
        """Return the place of these specs in the array, and add them if they are new."""
        key = tuple(specs)
        if key not in self._places:
            first = self._places[key] = len(self._lines)
            self._lines += [""] * len(specs)
            for i, (name, spec) in enumerate(specs, first):
                self._lines[i] = self._line(name, spec)
        return self._places[key]

    def _line(self, name: str, spec: Spec) -> str:
        maybe = isinstance(spec, Maybe)
        while isinstance(spec, Maybe):
            spec = spec.item
        inner: list[tuple[str, Spec]] = []
        if isinstance(spec, Row):
            inner = list(spec.fields.items())
        elif isinstance(spec, OneOf):
            inner = [("", item) for item in spec.items]
        elif isinstance(spec, ListOf):
            inner = [("", spec.item)]
        low, high = (spec.low, spec.high) if isinstance(spec, Int) else (0, 0)
        if isinstance(spec, (Text, Raw, Packed, Table, ListOf)):
            high = spec.length
        first = self.placed(inner) if inner else 0
        return (
            f'    {{"{name}", Type::{_TYPES[type(spec)]}, {str(maybe).lower()}, '
            f"{first}, {len(inner)}, {low}, {high}u}},"
        )

    def table(self, name: str, enum: type[IntEnum], table: dict[IntEnum, Message]) -> str:
        """Write the rows of a channel."""
        lines = []
        for kind, message in table.items():
            first = self.placed(list(message.fields.items()))
            sender = int(message.sender or 0)
            lines.append(f'    {{"{kind.name}", {int(kind)}, {sender}, {first}, {len(message.fields)}}},')
        head = f"constexpr Table<{enum.__name__}, {len(lines)}> k{name} = {{{{{{"
        return "\n".join([head, *lines, "}}, kSpecs};\n"])

    def text(self) -> str:
        """Write the array."""
        return "\n".join(["inline constexpr Spec kSpecs[] = {", *self._lines, "};\n"])


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
