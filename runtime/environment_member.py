"""A member of an archive of any format."""

from __future__ import annotations

from dataclasses import dataclass


class DamagedArchive(ValueError):
    """A stream that is no archive of its format, or ends too early."""


@dataclass(frozen=True, slots=True)
class Member:
    """One thing in an archive; `kind` is "directory", "file", "symlink", "hardlink" or else."""

    name: str
    kind: str
    mode: int = 0o755
    link: str = ""
