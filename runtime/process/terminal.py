"""Writes to streams that may be terminals, and makes untrusted text harmless to terminals and logs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_WIDTH = 80
_CLEAR_LINE = "\r\x1b[K"
# All control characters but tab. Terminals obey some of them.
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if code != 9}
# Characters that begin a line, or change the direction of one, so that it reads as another text.
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x2070)]
_CONTROL |= {code: f"\\u{code:04x}" for code in _DIRECTIONS}
# The library for tritonserver gets them from here, too.
SHOWN_CODES = tuple(sorted(_CONTROL))
_IN_JSON = {code: f"\\u{code:04x}" for code in _CONTROL}


def harmless(text: str) -> str:
    """Return the text with its control characters as escapes."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """Return the text as one line of a log, with its control characters and newlines as escapes."""
    return harmless(text.rstrip("\n").replace("\n", "\\n"))


def harmless_json(text: str) -> str:
    """Escape the same characters in JSON text, without a change of its value."""
    return text.translate(_IN_JSON)


class Terminal:
    """A stream that may be a terminal. If it is not, all text is plain. Not thread-safe."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str] | None = None) -> None:
        """`environment` has TERM and NO_COLOR (https://no-color.org); this process's if None."""
        environment = os.environ if environment is None else environment
        self.stream = stream
        self.is_terminal = stream.isatty() and environment.get("TERM", "") not in ("", "dumb")
        self.has_colours = self.is_terminal and not environment.get("NO_COLOR")

    @property
    def width(self) -> int:
        """The present number of columns."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or _WIDTH
        except (OSError, ValueError):
            return _WIDTH

    def paint(self, text: str, *styles: str) -> str:
        """Return the text in styles (bold, dim, red, green, yellow), or unchanged if the stream has no colours."""
        if not self.has_colours:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"

    def line(self, text: str = "") -> None:
        """Write a line."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def last_line(self, text: str) -> None:
        """Write a line in place of what an interrupted program, or the echo of Ctrl-C, has left in the present one."""
        self.stream.write(_CLEAR_LINE * self.is_terminal + text + "\n")
        self.stream.flush()

    def replace_line(self, text: str) -> None:
        """Show this text in place of the last line. For terminals only."""
        self.stream.write(_CLEAR_LINE + text)
        self.stream.flush()
