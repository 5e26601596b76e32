"""The layers of a sandbox: what each level puts on.

`off` keeps everything but that the stub dies with its runtime. `standard` is for models that one trusts not to
be malicious: no new privileges, no core dumps with tensors in them, limits. The runtime has already given the
stub its own session, closed descriptors and an environment of allowed variables. What `best-effort` and
`strict` are is in `contained.py`.

A layer that is required and refused ends the stub: it never goes on without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.policy import OFF
from moonpool.stub.sandbox import identity, limits
from moonpool.stub.sandbox.applied import Applied
from moonpool.stub.sandbox.refused import refusing

if TYPE_CHECKING:
    from moonpool.ipc.policy import Policy


def apply(policy: Policy, *, launches: bool = False) -> Applied:
    """Put the layers on that `policy` asks for. Raises `SandboxRefused`.

    `launches`: this process is to become another program, which may be found at the paths that it may read.
    """
    applied = Applied()
    if policy.is_contained:
        from moonpool.stub.sandbox.contained import Contained

        Contained(policy, applied, launches=launches).put_on()
        return applied
    limits.set_limits(policy.limits)
    limits.share_processors(policy.cpus, policy.nice)
    if policy.level != OFF:
        limits.forbid_core_dumps()
        with refusing("no_new_privs"):
            identity.forbid_new_privileges()
        applied.on += ["no_core_dumps", "no_new_privs"]
    if policy.limits or policy.cpus or policy.nice:
        applied.on.append("limits")
    return applied


def tighten(policy: Policy) -> None:
    """After this process has become the program that `apply` let it become: take the right to do so again.

    Raises `SandboxRefused`. Does nothing below `best-effort`.
    """
    if policy.is_contained:
        from moonpool.stub.sandbox.contained import tighten

        tighten(policy)
