"""The layers of a sandbox in the order in which they are put on.

`off` keeps everything but that the stub dies with its runtime. `standard` is for models that one trusts not to
be malicious: no new privileges, no core dumps with tensors in them, limits. The runtime has already given the
stub its own session, closed descriptors and an environment of allowed variables.

`strict` is for models of strangers. A layer that is required and refused ends the stub: it never goes on without.
Namespaces and a user of its own are a second line, and are left out where the kernel does not allow them.
`best-effort` leaves out whatever is refused. What was left out is said.

The order matters: mounts and users take rights that are given up after them, a change of user takes off what
should follow the parent's death, Landlock hides files that later imports would need, and the filter for
system calls forbids all the rest of it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moonpool.ipc.policy import OFF, STRICT
from moonpool.stub.sandbox import (
    identity,
    kernel,
    landlock,
    limits,
    mounts,
    namespaces,
    rules,
    seccomp,
    syscalls,
)
from moonpool.stub.sandbox.files import usual_files
from moonpool.stub.sandbox.refused import SandboxRefused

if TYPE_CHECKING:
    from typing import Callable

    from moonpool.ipc.policy import Policy

_GO_WITHOUT = "use the level best-effort to go without"
_AS_ROOT = "run the runtime as root to have it"


class Applied:
    """Names of the layers that are on, in order, and a sentence for each that was left out."""

    def __init__(self) -> None:
        self.on: list[str] = ["dies_with_runtime"]
        self.left_out: list[str] = []


def apply(policy: Policy, *, launches: bool = False) -> Applied:
    """Put the layers on that `policy` asks for. Raises `SandboxRefused`.

    `launches`: this process is to become another program, which may be found at the paths that it may read.
    """
    applied = Applied()
    if policy.is_contained:
        _Contained(policy, launches, applied).put_on()
        return applied
    _limit(policy)
    if policy.level != OFF:
        limits.forbid_core_dumps()
        _try("no_new_privs", identity.forbid_new_privileges)
        os.umask(0o077)
        applied.on += ["no_core_dumps", "no_new_privs", "umask"]
    if policy.limits or policy.cpus or policy.nice:
        applied.on.append("limits")
    return applied


def tighten(policy: Policy) -> None:
    """After this process has become the program that `apply` let it become: take the right to do so again.

    Raises `SandboxRefused`. Does nothing below `best-effort`.
    """
    if not policy.is_contained:
        return
    _try("not_dumpable", identity.forbid_looking_inside)
    if syscalls.this_machine() in syscalls.ARCHITECTURES:
        # The first filter holds on, so what that one decides is decided.
        _try("seccomp", lambda: _install_filter(policy, others_are_safe=True, scoped=True))


def _limit(policy: Policy) -> None:
    limits.set_limits(policy.limits)
    limits.share_processors(policy.cpus, policy.nice)


def _try(layer: str, put_on: Callable[[], None]) -> None:
    try:
        put_on()
    except OSError as error:
        raise _refused(layer, error) from error


def _refused(layer: str, error: OSError, what_to_do: str = _GO_WITHOUT) -> SandboxRefused:
    where = f" at {error.filename}" if error.filename else ""
    return SandboxRefused(layer, f"the kernel refused it{where} ({error.strerror})", what_to_do)


class _Contained:
    """The way through the layers of `strict` and `best-effort`."""

    def __init__(self, policy: Policy, launches: bool, applied: Applied) -> None:
        self._policy = policy
        self._launches = launches
        self._applied = applied
        self._parent_pid = os.getppid()
        self._user: int | None = None
        # Whether the files of others cannot be changed, whatever their modes are.
        self._others_are_safe = False
        self._counts_tasks = False

    def put_on(self) -> None:
        policy = self._policy
        _limit(policy)
        limits.forbid_core_dumps()
        limits.forbid_what_outlives()
        self._applied.on.append("limits")
        if policy.user is not None:
            self._offered(self._choose_user)
        self._offered(self._enter_namespaces)
        self._offered(self._give_up_rights)
        os.umask(0o077)
        self._required("no_new_privs", identity.forbid_new_privileges)
        self._required("not_dumpable", identity.forbid_looking_inside)
        version = landlock.abi()
        # Made before anything is hidden or forbidden.
        rights = self._rights()
        self._required(f"landlock:{version}", lambda: self._restrict_files(version, rights))
        self._required("seccomp", lambda: self._filter_calls(version))

    def _offered(self, put_on: Callable[[], None]) -> None:
        """A layer of the second line."""
        try:
            put_on()
        except SandboxRefused as refused:
            if refused.layer not in ("namespaces", "own_user", "no_capabilities"):
                raise
            self._applied.left_out.append(str(refused))

    def _required(self, name: str, put_on: Callable[[], None]) -> None:
        layer = name.partition(":")[0]
        try:
            _try(layer, put_on)
        except SandboxRefused as refused:
            if self._policy.level == STRICT:
                raise
            self._applied.left_out.append(str(refused))
        else:
            self._applied.on.append(name)

    def _choose_user(self) -> None:
        if not identity.may_change_user():
            raise SandboxRefused(
                "own_user",
                "the runtime may not change its user",
                "give it CAP_SETUID and CAP_SETGID",
            )
        self._user = self._policy.user

    def _enter_namespaces(self) -> None:
        try:
            names = namespaces.enter(network=bool(self._policy.ports))
        except OSError as error:
            raise _refused("namespaces", error, "allow user namespaces, or " + _AS_ROOT) from error
        self._applied.on.append("namespaces:" + "+".join(names))
        self._counts_tasks = "user" in names
        try:
            self._others_are_safe = mounts.rearrange(self._policy, self._user)
        except OSError as error:
            raise _refused(
                "namespaces", error, "allow it to mount, for a scratch of its own"
            ) from error

    def _give_up_rights(self) -> None:
        policy = self._policy
        may_drop = identity.may_drop_bounding_set()
        if may_drop:
            _try("no_capabilities", identity.drop_bounding_set)
        if "tasks" in policy.limits and (self._counts_tasks or self._user is not None):
            limits.limit_tasks(policy.limits["tasks"])
        if self._user is not None:
            self._become(self._user)
        _try("no_capabilities", identity.drop_capabilities)
        self._applied.on.append("no_capabilities")
        identity.die_with(self._parent_pid)
        if self._user is not None:
            self._check_paths()
        if policy.scratch:
            os.chdir(policy.scratch)

    def _become(self, user: int) -> None:
        # Not among what is left out at strict: the mounts are this user's already.
        self._required("own_user", lambda: identity.become(user))
        if os.geteuid() == user:
            self._others_are_safe = True
        else:
            self._user = None

    def _check_paths(self) -> None:
        """Say which of the granted paths its user cannot reach."""
        policy = self._policy
        for path in (*policy.read, *policy.write):
            wanted = os.X_OK if os.path.isdir(path) else os.R_OK
            if not os.access(path, wanted) and (os.path.lexists(path) or not _is_absent(path)):
                raise SandboxRefused(
                    "files",
                    f"user {self._user}, which this instance is, cannot read {path}",
                    "let others read it (chmod -R o+rX), with the folders above it",
                )

    def _rights(self) -> list[tuple[str, int]]:
        policy = self._policy
        read = landlock.READ
        if self._launches or {"execve", "execveat"} & set(policy.syscalls):
            read |= landlock.EXECUTE
        writable = [*policy.write, *([policy.scratch] if policy.scratch else [])]
        return [
            *usual_files(network=bool(policy.ports)),
            *((path, read) for path in policy.read),
            *((path, landlock.CHANGE) for path in writable),
        ]

    def _restrict_files(self, version: int, rights: list[tuple[str, int]]) -> None:
        if version == 0:
            raise SandboxRefused(
                "landlock",
                "this kernel does not have it",
                "use Linux 6.2 or later with landlock among its security modules (lsm=), or "
                "the level best-effort to go without",
            )
        if version < landlock.KNOWS_TRUNCATE and not self._others_are_safe:
            raise SandboxRefused(
                "landlock",
                "this kernel's does not keep files from being cut short",
                "use Linux 6.2 or later, allow user namespaces, or " + _AS_ROOT,
            )
        if version < landlock.KNOWS_PORTS and self._policy.ports:
            raise SandboxRefused(
                "landlock",
                "this kernel's does not know of ports, of which some were granted",
                "use Linux 6.7 or later, or grant none",
            )
        if len(os.listdir("/proc/self/task")) != 1:
            raise SandboxRefused(
                "landlock",
                "this process has threads already, which it would not hold",
                "look for what begins threads when Python starts (sitecustomize, .pth files)",
            )
        landlock.restrict(version, rights, self._policy.ports)

    def _filter_calls(self, version: int) -> None:
        policy = self._policy
        machine = syscalls.this_machine()
        if machine not in syscalls.ARCHITECTURES:
            raise SandboxRefused(
                "seccomp",
                f"there is no filter for {machine}",
                f"use {' or '.join(syscalls.ARCHITECTURES)}, or the level best-effort to go without",
            )
        unknown = set(policy.syscalls) - kernel.NUMBERS.keys() - {"fork"}
        if unknown:
            raise SandboxRefused(
                "seccomp",
                f"there is no system call {min(unknown)} on {machine}",
                "take it out of MOONPOOL_SANDBOX_SYSCALLS",
            )
        _install_filter(
            policy,
            others_are_safe=self._others_are_safe,
            scoped=version >= landlock.KNOWS_SCOPES,
            launches=self._launches,
        )


def _install_filter(
    policy: Policy, *, others_are_safe: bool, scoped: bool, launches: bool = False
) -> None:
    table = rules.allowed(
        pid=os.getpid(),
        ports=bool(policy.ports),
        granted=policy.syscalls,
        metadata=others_are_safe,
        forks=policy.forks,
        signals_are_scoped=scoped,
        launches=launches,
    )
    machine = syscalls.this_machine()
    seccomp.install(seccomp.program(machine, table, rules.KILLED, rules.ABSENT))


def _is_absent(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
