"""Changes the user and the capabilities of this process, and ties its life to the runtime's.

Source: `capabilities(7)`, `prctl(2)`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct

from moonpool.stub.sandbox import kernel

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_NO_NEW_PRIVS = 1, 4, 38
_CAPBSET_DROP, _CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SETGID, _CAP_SETUID, _CAP_SETPCAP = 6, 7, 8
# The score of a process that the kernel ends before all others.
FIRST_TO_END = 1000


def drop_bounding_set() -> None:
    """Take from all programs that are started later the way to capabilities. Call it before the user changes. Raises
    OSError.
    """
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        last = int(file.read())
    for capability in range(last + 1):
        kernel.prctl(_CAPBSET_DROP, capability)


def become(user: int) -> None:
    """Become a user, in the group of the same number and in no other. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_capabilities() -> None:
    """Give up all capabilities, and those that programs would inherit. Raises OSError."""
    kernel.prctl(_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    nothing = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    kernel.call("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), nothing)


def die_with(parent_pid: int) -> None:
    """End this process when its parent ends, and at once if that has happened. A change of user undoes it.

    In a PID namespace the parent has the number 0. There the keeper ends this process (`programs/process_tree.py`).
    """
    kernel.prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent_pid, 0):
        os._exit(1)


def forbid_new_privileges() -> None:
    kernel.prctl(_SET_NO_NEW_PRIVS, 1)


def forbid_looking_inside() -> None:
    """Forbid processes of the same user to trace this one or read its memory, and write no core dumps. An exec undoes
    it.
    """
    kernel.prctl(_SET_DUMPABLE, 0)


def allow_looking_inside() -> None:
    """Undo `forbid_looking_inside`. Raises OSError."""
    kernel.prctl(_SET_DUMPABLE, 1)


def score_for_ending(score: int) -> None:
    """Say how soon the kernel is to end this process when memory is full, if that is allowed."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(score))


def may_change_user() -> bool:
    return _has(_CAP_SETGID) and _has(_CAP_SETUID)


def may_drop_bounding_set() -> bool:
    return _has(_CAP_SETPCAP)


def _has(capability: int) -> bool:
    data = ctypes.create_string_buffer(24)
    kernel.call("capget", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), data)
    effective: int = struct.unpack_from("=I", data)[0]
    return bool(effective >> capability & 1)
