"""The error of execution environments, apart from what unpacks them, which is slow to import."""

from __future__ import annotations

from moonpool.ipc.errors import MoonpoolError


class BadEnvironment(MoonpoolError):
    """An execution environment that cannot be used: says which path, and what to do."""

    code = "INVALID_ARG"
