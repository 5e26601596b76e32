"""Unpacks archives that a test has in memory."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from moonpool.runtime.repository import archive


def unpack(packed: io.BytesIO, target: Path, size_limit_bytes: int = archive.SIZE_LIMIT_BYTES) -> None:
    """Unpack as `archive.unpack`, which takes a file: another process reads it."""
    with tempfile.TemporaryFile() as file:
        file.write(packed.getvalue())
        archive.unpack(file, target, size_limit_bytes)
