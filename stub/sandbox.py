"""What a stub gives up before anything foreign is imported.

Levels: `off` keeps everything but that the stub dies with its runtime. `standard` is for models that one
trusts not to be malicious: no new privileges, no core dumps with tensors in them, limits. The runtime has
already given the stub its own session, closed descriptors and an environment of allowed variables.

A layer that is asked for and refused ends the stub: it never goes on without.
"""

from __future__ import annotations

import ctypes
import os
import resource

LEVELS = ("off", "standard")

_PR_SET_NO_NEW_PRIVS = 38


class SandboxRefused(Exception):
    """The kernel, or this version of moonpool, does not offer a layer that is required."""


def apply(level: str, limits: dict[str, object]) -> list[str]:
    """Put the layers of `level` on, in order; returns their names. Raises `SandboxRefused`."""
    if level not in LEVELS:
        raise SandboxRefused(
            f"sandbox level {level!r} is not offered; use one of {', '.join(LEVELS)}"
        )
    layers = ["dies_with_runtime"]
    if level != "off":
        _forbid_core_dumps()
        _forbid_new_privileges()
        os.umask(0o077)
        layers += ["no_core_dumps", "no_new_privs", "umask"]
    memory = limits.get("memory_bytes")
    if isinstance(memory, int):
        _limit(resource.RLIMIT_AS, memory, "memory_bytes")
        layers.append("memory_limit")
    return layers


def _forbid_core_dumps() -> None:
    _limit(resource.RLIMIT_CORE, 0, "core dumps")


def _limit(which: int, value: int, name: str) -> None:
    try:
        resource.setrlimit(which, (value, value))
    except (OSError, ValueError) as error:
        raise SandboxRefused(f"the limit {name}={value} was refused: {error}") from error


def _forbid_new_privileges() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SandboxRefused(f"no_new_privs was refused: {os.strerror(ctypes.get_errno())}")
