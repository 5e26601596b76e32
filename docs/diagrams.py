"""Draws the tables of the code into ARCHITECTURE.md, between the markers that name them.

Run it with `python docs/diagrams.py` after a change to a table.
"""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.ipc.messages import CALLS, CONTROL, WORK, Kind, Message, Side
from moonpool.runtime.states import BACKEND, INSTANCE, MODEL, draw

PAGE = Path(__file__).parent / "ARCHITECTURE.md"


def _mermaid(text: str) -> str:
    return f"```mermaid\n{text.rstrip()}\n```"


def _messages(table: dict[Kind, Message], *, ordered: bool) -> str:
    lines = ["| message | from | fields |" + (" may be followed by |" if ordered else "")]
    lines.append("| --- | --- | --- |" + (" --- |" if ordered else ""))
    for kind, message in table.items():
        sender = "either" if message.sender is None else Side(message.sender).name.lower()
        fields = ", ".join(message.fields) or "none"
        row = f"| {kind.name} ({int(kind)}) | {sender} | {fields} |"
        if ordered:
            row += f" {', '.join(sorted(k.name for k in message.followers)) or 'the end'} |"
        lines.append(row)
    return "\n".join(lines)


def drawings() -> dict[str, str]:
    """What stands behind each marker."""
    return {
        "backend": _mermaid(draw(BACKEND)),
        "model": _mermaid(draw(MODEL)),
        "instance": _mermaid(draw(INSTANCE)),
        "work": _messages(WORK, ordered=True),
        "control": _messages(CONTROL, ordered=False),
        "calls": _messages(CALLS, ordered=False),
    }


def drawn(page: str) -> str:
    """The page with every drawing as the tables are now. Raises KeyError for an unknown marker."""
    known = drawings()

    def block(match: re.Match[str]) -> str:
        return f"<!-- drawn: {match[1]} -->\n{known[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- drawn: (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
