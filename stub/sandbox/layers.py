"""Puts on the layers of each level of the sandbox.

`off` has only one layer: the stub dies with its runtime. `standard` is for models that one trusts not to
be malicious: no new privileges, no core dumps with tensors in them, limits. The runtime has already given the
stub its own session, closed descriptors and selected variables. The layers of `best-effort` and
`strict` are in `contained.py`, which is imported only for them, to keep the start of other stubs short.

If the kernel refuses a required layer, the stub ends. It never goes on without.
"""

from __future__ import annotations

from functools import partial
from typing import Callable

from moonpool.ipc.policy import OFF, Policy
from moonpool.stub.sandbox import identity, limits
from moonpool.stub.sandbox.outcome import Applied, refusing


def apply(policy: Policy, *, launches: bool = False) -> Applied:
    """Put on the layers that `policy` asks for. Raises `SandboxRefused`.

    With `launches`, this process may still become another program, at a path that it may read.
    """
    applied = Applied()
    if policy.is_contained:
        from moonpool.stub.sandbox.contained import Contained

        Contained(policy, applied, launches=launches).put_on()
        return applied
    limits.set_limits(policy.limits)
    limits.share_processors(policy.cpus, policy.nice)
    applied.leave_out(limits.weigh_session())
    if policy.level != OFF:
        limits.forbid_core_dumps()
        with refusing("no_new_privs"):
            identity.forbid_new_privileges()
        applied.on += ["no_core_dumps", "no_new_privs"]
    if policy.limits or policy.cpus or policy.nice:
        applied.on.append("limits")
    return applied


def tighten(policy: Policy) -> None:
    """Take the right to become another program, after this process has become the one that `apply` allowed.

    Raises `SandboxRefused`. Does nothing below `best-effort`.
    """
    if policy.is_contained:
        from moonpool.stub.sandbox.contained import tighten

        tighten(policy)


def tightening(policy: Policy) -> Callable[[], object]:
    """Return a function that does what `tighten` does, in less time. A template makes it for all of its forks."""
    if policy.is_contained:
        from moonpool.stub.sandbox.contained import tightening

        return tightening(policy)
    return partial(tighten, policy)
