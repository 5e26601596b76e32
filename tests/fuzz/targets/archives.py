"""Packed environments."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from moonpool.runtime.environment_archive import unpack
from moonpool.runtime.environment_error import BadEnvironment


def archive(data: bytes) -> None:
    """An archive of any format, unpacked."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            unpack(io.BytesIO(data), Path(folder), size_limit_bytes=1 << 20)
        except (BadEnvironment, OSError) as error:
            str(error)
