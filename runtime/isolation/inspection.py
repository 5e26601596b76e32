"""Checks a stub's sandbox from outside, by /proc/PID/status.

The kernel does not show Landlock there or elsewhere. For that layer, the runtime relies on the stub's word, which it
gives before foreign code runs in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moonpool.ipc.policy import OFF, STRICT, Policy
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.confinement import Confinement

# The layers that `strict` requires, in the order in which they are put on.
REQUIRED = ("dies_with_runtime", "limits", "no_new_privs", "not_dumpable", "landlock", "seccomp")
# Without CapBnd, which only root can empty, and which gives nothing to a process that gets no new privileges.
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapAmb")
# The kernel's number for seccomp with a filter.
_FILTER = "2"


def confirmed(
    name: str, pid: int, policy: Policy, granted: Sequence[str], layers: Sequence[str], left_out: Sequence[str]
) -> Confinement:
    """Return the confinement that a stub reports, unless the kernel contradicts it. Raises `LoadFailed`."""
    wrong = differences(pid, policy, layers)
    if wrong:
        raise LoadFailed(
            f"Stub process '{name}' is not confined as it says and was ended: {'; '.join(wrong)}", stage="sandbox"
        )
    return Confinement(policy.level, tuple(layers), tuple(left_out), tuple(granted), policy.user)


def differences(pid: int, policy: Policy, layers: Sequence[str]) -> list[str]:
    """Return a sentence for each difference from the policy, or from the stub's report.

    The process must be a child of this one that has not been reaped, so that the pid is its own.
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
    """Return the lines of a process's status; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines.splitlines())
    return {name: value.strip() for name, _, value in pairs}
