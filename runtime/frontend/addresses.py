"""Where front ends listen."""

from __future__ import annotations

import os

from moonpool.ipc.errors import MoonpoolError


class CannotListen(MoonpoolError):
    """An address or a port that cannot be had."""

    code = "UNAVAILABLE"

    def __init__(self, protocol: str, address: str, port: int, error: OSError) -> None:
        # Event loops add words of their own.
        is_system_s = error.errno is not None and error.errno > 0
        why = os.strerror(error.errno) if is_system_s else error.strerror or str(error)  # type: ignore[arg-type]
        super().__init__(f"cannot listen at {address}, port {port} ({protocol}): {why}")
