"""The types that the readers of archives and the unpacker share, without the decompressors, which take long to
import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SIZE_LIMIT_BYTES = 64 << 30


class Readable(Protocol):
    """A stream. `read` returns at most `size_bytes`, and nothing only at its end."""

    def read(self, size_bytes: int, /) -> bytes: ...


class DamagedArchive(ValueError):
    """The stream is no archive of its format, or ends too early."""


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of an archive. `kind` is "directory", "file", "symlink", "hardlink" or a word for a kind that is
    refused.
    """

    name: str
    kind: str
    mode: int = 0o755
    link: str = ""
