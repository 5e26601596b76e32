"""A stream that may be a terminal: how wide it is, and whether it may be coloured and redrawn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_WIDTH = 80
_CLEAR_LINE = "\r\x1b[K"


class Terminal:
    """Writes plain text where the stream is no terminal. Not thread-safe."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is this process's unless given: TERM and NO_COLOR (https://no-color.org)."""
        environment = os.environ if environment is None else environment
        self.stream = stream
        self.is_terminal = stream.isatty() and environment.get("TERM", "") not in ("", "dumb")
        self.has_colours = self.is_terminal and not environment.get("NO_COLOR")

    @property
    def width(self) -> int:
        """Columns now; windows change."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or _WIDTH
        except (OSError, ValueError):
            return _WIDTH

    def paint(self, text: str, *styles: str) -> str:
        """The text in styles (bold, dim, red, green, yellow), or as it is where there are no colours."""
        if not self.has_colours:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"

    def line(self, text: str = "") -> None:
        """Write a line."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def replace_line(self, text: str) -> None:
        """Show this instead of what stands in the last line; for terminals only."""
        self.stream.write(_CLEAR_LINE + text)
        self.stream.flush()
