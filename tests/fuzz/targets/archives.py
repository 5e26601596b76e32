"""Packed environments."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.archive import unpack


def archive(data: bytes) -> None:
    """Unpack an archive of any format."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            unpack(io.BytesIO(data), Path(folder), size_limit_bytes=1 << 20)
        except (BadEnvironment, OSError) as error:
            str(error)
