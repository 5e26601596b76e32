"""The numbers of Triton's error codes."""

from __future__ import annotations

from moonpool.ipc.errors import CODES, MoonpoolError


def code_of(error: BaseException) -> int:
    """TRITONSERVER_Error_Code of an error; INTERNAL for those that are not moonpool's."""
    return CODES.index(error.code if isinstance(error, MoonpoolError) else MoonpoolError.code)
