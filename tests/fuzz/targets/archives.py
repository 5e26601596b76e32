"""Packed environments."""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Event

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.archive import Unpacker, write_members


def archive(data: bytes) -> None:
    """Write the members that the process which reads an archive sends."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        said.write(data)
        said.seek(0)
        try:
            write_members(said.fileno(), Unpacker(Path(folder), 1 << 20), Event())
        except (BadEnvironment, EOFError, OSError) as error:
            str(error)
