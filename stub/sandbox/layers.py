"""The layers of a sandbox in the order in which they are put on.

`off` keeps everything but that the stub dies with its runtime. `standard` is for models that one trusts not to
be malicious: no new privileges, no core dumps with tensors in them, limits. The runtime has already given the
stub its own session, closed descriptors and an environment of allowed variables.

A layer that is required and refused ends the stub: it never goes on without.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import TYPE_CHECKING

from moonpool.ipc.policy import OFF, STANDARD

if TYPE_CHECKING:
    from moonpool.ipc.policy import Policy

_PR_SET_NO_NEW_PRIVS = 38


class SandboxRefused(Exception):
    """The kernel, or this version of moonpool, does not offer a layer that is required."""


class Applied:
    """Names of the layers that are on, in order, and a sentence for each that was left out."""

    def __init__(self) -> None:
        self.on: list[str] = ["dies_with_runtime"]
        self.left_out: list[str] = []


def apply(policy: Policy) -> Applied:
    """Put the layers on that `policy` asks for. Raises `SandboxRefused`."""
    if policy.level not in (OFF, STANDARD):
        raise SandboxRefused(f"sandbox level {policy.level!r} is not offered")
    applied = Applied()
    if policy.level != OFF:
        _limit(resource.RLIMIT_CORE, 0, "core dumps")
        _forbid_new_privileges()
        os.umask(0o077)
        applied.on += ["no_core_dumps", "no_new_privs", "umask"]
    memory_bytes = policy.limits.get("memory_bytes")
    if memory_bytes is not None:
        _limit(resource.RLIMIT_AS, memory_bytes, "memory_bytes")
        applied.on.append("limits")
    return applied


def _limit(which: int, value: int, name: str) -> None:
    try:
        resource.setrlimit(which, (value, value))
    except (OSError, ValueError) as error:
        raise SandboxRefused(f"the limit {name}={value} was refused: {error}") from error


def _forbid_new_privileges() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SandboxRefused(f"no_new_privs was refused: {os.strerror(ctypes.get_errno())}")
