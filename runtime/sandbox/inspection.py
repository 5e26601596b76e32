"""What can be seen from outside of a stub's sandbox, in /proc/PID/status.

Landlock cannot: the kernel shows it nowhere. That it is on, the stub says before anything foreign runs in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.policy import OFF, STRICT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.ipc.policy import Policy

# What `strict` does not go without, in the order in which it is put on.
REQUIRED = ("dies_with_runtime", "limits", "no_new_privs", "not_dumpable", "landlock", "seccomp")
# Not CapBnd, which only root can empty, and which gives nothing to a process that gets no new privileges.
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapAmb")
# As the kernel numbers the modes of seccomp.
_FILTER = "2"


def differences(pid: int, policy: Policy, layers: Sequence[str]) -> list[str]:
    """What is not as the policy wants it, or the stub says it is: a sentence each.

    The process is a child of this one that was not waited for, so that the pid is its own.
    """
    names = {layer.partition(":")[0] for layer in layers}
    wrong = []
    if policy.level == STRICT:
        wrong += [f"it did not put on {name}" for name in REQUIRED if name not in names]
    if policy.level == OFF:
        return wrong
    status = _status(pid)
    if status.get("NoNewPrivs") != "1":
        wrong.append("it may get new privileges")
    if "seccomp" in names and status.get("Seccomp") != _FILTER:
        wrong.append("it has no filter for system calls")
    if "no_capabilities" in names:
        held = [name for name in _CAPABILITIES if int(status.get(name, "1"), 16)]
        wrong += [f"it has capabilities ({name})" for name in held]
    if policy.user is not None and "own_user" in names:
        ids = f"{status.get('Uid', '')} {status.get('Gid', '')}".split()
        if ids != [str(policy.user)] * 8 or status.get("Groups"):
            wrong.append(f"it is not user {policy.user} alone")
    if policy.is_contained and status.get("Threads") != "1":
        wrong.append("it had begun threads before")
    return wrong


def _status(pid: int) -> Mapping[str, str]:
    """The lines of its status; empty where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines.splitlines())
    return {name: value.strip() for name, _, value in pairs}
