"""The layers of `best-effort` and `strict`, for models of strangers, in the order in which they are put on.

Namespaces and a user of its own are a second line, and are left out where the kernel does not allow them. Of the
others, `strict` goes without none, and `best-effort` without those that are refused. What was left out is said.

The order matters: mounts and users take rights that are given up after them, a change of user takes off what
should follow the parent's death, Landlock hides files that later imports would need, and the filter for
system calls forbids all the rest of it.
"""

from __future__ import annotations

import os
import select
import selectors
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moonpool.ipc.policy import STRICT
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
from moonpool.stub.sandbox.files import pinned_files, usual_files
from moonpool.stub.sandbox.refused import SandboxRefused, refusing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonpool.ipc.policy import Policy
    from moonpool.stub.sandbox.applied import Applied

_SECOND_LINE = ("namespaces", "own_user", "no_capabilities")
_MACHINES = " or ".join(syscalls.ARCHITECTURES)


class Contained:
    """The way through the layers."""

    def __init__(self, policy: Policy, applied: Applied, *, launches: bool) -> None:
        """`launches` is as for `layers.apply`."""
        self._policy = policy
        self._launches = launches
        self._applied = applied
        self._parent_pid = os.getppid()
        self._user: int | None = None
        self._has_mounts = self._has_user_namespace = False
        # Whether the files of others cannot be changed, whatever their modes are.
        self._others_are_safe = False

    def put_on(self) -> None:
        """Put them on, and note which. Raises `SandboxRefused`."""
        self._limit()
        with self._optional():
            self._choose_user()
        with self._optional():
            self._enter_namespaces()
        with self._optional():
            self._rearrange_mounts()
        with self._optional():
            self._give_up_rights()
        if self._policy.scratch:
            with refusing(
                "scratch", "set TMPDIR to a folder of the runtime's that others may pass"
            ):
                os.chdir(self._policy.scratch)
        os.umask(0o077)
        with self._required("no_new_privs"):
            identity.forbid_new_privileges()
        with self._required("not_dumpable"):
            identity.forbid_looking_inside()
        version = landlock.abi()
        with self._required("landlock", f"landlock:{version}"):
            self._restrict_files(version)
        self._check_calls()
        with self._required("seccomp"):
            self._filter_calls(scoped=version >= landlock.KNOWS_SCOPES)
        _choose_selector()

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Go on without where a layer of the second line is refused."""
        try:
            yield
        except SandboxRefused as refused:
            if refused.layer not in _SECOND_LINE:
                raise
            self._applied.left_out.append(str(refused))

    @contextmanager
    def _required(self, layer: str, name: str = "") -> Iterator[None]:
        """Note that a layer is on; at `best-effort` alone, go on without where it is refused."""
        try:
            with refusing(layer):
                yield
        except SandboxRefused as refused:
            if self._policy.level == STRICT:
                raise
            self._applied.left_out.append(str(refused))
        else:
            self._applied.on.append(name or layer)

    def _limit(self) -> None:
        policy = self._policy
        limits.set_limits(policy.limits)
        limits.share_processors(policy.cpus, policy.nice)
        limits.forbid_core_dumps()
        limits.forbid_what_outlives()
        limits.limit_what_is_shared()
        self._applied.on.append("limits")

    def _choose_user(self) -> None:
        if self._policy.user is None:
            raise SandboxRefused(
                "own_user",
                "the runtime has none to give",
                "run it as root, with the rights that SANDBOX.md names, to have it",
            )
        if not identity.may_change_user():
            raise SandboxRefused(
                "own_user",
                "the runtime may not change its user",
                "give it CAP_SETUID and CAP_SETGID to have it",
            )
        self._user = self._policy.user

    def _enter_namespaces(self) -> None:
        is_root = os.geteuid() == 0
        what = "give the runtime CAP_SYS_ADMIN" if is_root else "allow user namespaces, or use root"
        with refusing("namespaces", f"{what} to have it"):
            names = namespaces.enter(network=bool(self._policy.ports))
        self._applied.on.append("namespaces:" + "+".join(names))
        self._has_mounts = True
        self._has_user_namespace = "user" in names

    def _rearrange_mounts(self) -> None:
        if self._has_mounts:
            with refusing("namespaces", "allow mounts in them to have a scratch folder in memory"):
                self._others_are_safe = mounts.rearrange(self._policy, self._user)

    def _give_up_rights(self) -> None:
        policy = self._policy
        if "tasks" in policy.limits and (self._has_user_namespace or self._user is not None):
            limits.limit_tasks(policy.limits["tasks"])
        if os.geteuid() == 0 and identity.may_drop_bounding_set():
            # Others get nothing from it, as they get no new privileges.
            with refusing("no_capabilities"):
                identity.drop_bounding_set()
        if self._user is not None:
            self._become(self._user)
        with refusing("no_capabilities"):
            identity.drop_capabilities()
        self._applied.on.append("no_capabilities")
        identity.die_with(self._parent_pid)
        if self._user is not None:
            self._check_paths(self._user)

    def _become(self, user: int) -> None:
        # Not of the second line any more: the mounts are this user's already.
        with self._required("own_user"):
            identity.become(user)
        if os.geteuid() == user:
            self._others_are_safe = True
        else:
            self._user = None

    def _check_paths(self, user: int) -> None:
        """Say which of the granted paths its user cannot reach."""
        for path in (*self._policy.read, *self._policy.write):
            wanted = os.X_OK if os.path.isdir(path) else os.R_OK
            if not os.access(path, wanted) and not _is_absent(path):
                raise SandboxRefused(
                    "files",
                    f"user {user}, which this instance is, cannot read {path}",
                    f"let others read it (chmod -R o+rX {path}), and pass the folders above it",
                )

    def _restrict_files(self, version: int) -> None:
        if version == 0:
            raise SandboxRefused(
                "landlock",
                "this kernel does not have it",
                "use Linux 6.2 or later with landlock among its security modules (lsm=), or "
                "the level best-effort to go without",
            )
        if len(os.listdir("/proc/self/task")) != 1:
            raise SandboxRefused(
                "landlock",
                "this process has threads already, which it would not hold",
                "look for what begins threads when Python starts (sitecustomize, .pth files)",
            )
        if version < landlock.KNOWS_TRUNCATE and not self._others_are_safe:
            self._lack(
                "this kernel's does not keep files from being cut short",
                "use Linux 6.2 or later, allow user namespaces, or run the runtime as root",
            )
        if version < landlock.KNOWS_PORTS and self._policy.ports:
            self._lack(
                "this kernel's does not know of ports, of which some were granted",
                "use Linux 6.7 or later, or grant none",
            )
        self._pin_files()
        landlock.restrict(version, self._rights(), self._policy.ports)

    def _lack(self, why: str, what_to_do: str) -> None:
        """Note what Landlock does not do here, which `strict` cannot do without."""
        refused = SandboxRefused("landlock", why, what_to_do)
        if self._policy.level == STRICT:
            raise refused
        self._applied.left_out.append(str(refused))

    def _pin_files(self) -> None:
        """Hold the files that have to stay the same ones, as long as this process lives."""
        for path in pinned_files(gpu=bool(self._policy.devices)):
            if os.path.exists(path):
                fd = os.open(path, os.O_PATH)
                if self._launches:
                    os.set_inheritable(fd, True)

    def _rights(self) -> list[tuple[str, int]]:
        policy = self._policy
        read = landlock.READ
        if self._launches or {"execve", "execveat"} & set(policy.syscalls):
            read |= landlock.EXECUTE
        writable = [*policy.write, *([policy.scratch] if policy.scratch else [])]
        return [
            *usual_files(network=bool(policy.ports), gpu=bool(policy.devices)),
            *((path, landlock.USE_DEVICE) for path in policy.devices),
            *((path, read) for path in policy.read),
            *((path, _writing(path)) for path in writable),
        ]

    def _check_calls(self) -> None:
        """A grant that is misspelled is an error at all levels, and no reason to go without the filter."""
        machine = syscalls.this_machine()
        unknown = set(self._policy.syscalls) - kernel.NUMBERS.keys() - rules.GRANTED_TOGETHER
        if unknown and machine in syscalls.ARCHITECTURES:
            raise SandboxRefused(
                "seccomp",
                f"there is no system call {min(unknown)} on {machine}",
                "take it out of MOONPOOL_SANDBOX_SYSCALLS",
            )

    def _filter_calls(self, *, scoped: bool) -> None:
        machine = syscalls.this_machine()
        if machine not in syscalls.ARCHITECTURES:
            raise SandboxRefused(
                "seccomp",
                f"there is no filter for {machine}",
                f"use {_MACHINES}, or the level best-effort to go without",
            )
        _install_filter(
            self._policy,
            others_are_safe=self._others_are_safe,
            scoped=scoped,
            launches=self._launches,
        )


def tighten(policy: Policy) -> None:
    """Put on again what an exec takes off, and no longer allow one. Raises `SandboxRefused`."""
    try:
        with refusing("not_dumpable"):
            identity.forbid_looking_inside()
        if syscalls.this_machine() in syscalls.ARCHITECTURES:
            with refusing("seccomp"):
                # The first filter holds on, so what that one decides is decided.
                _install_filter(policy, others_are_safe=True, scoped=True)
    except SandboxRefused:
        # What `best-effort` goes without was said when the layers were put on.
        if policy.level == STRICT:
            raise


def _choose_selector() -> None:
    """Have event loops use `poll` if the filter refuses epoll. `selectors` chose epoll before the filter was on."""
    try:
        select.epoll().close()
    except OSError:
        selectors.DefaultSelector = selectors.PollSelector  # type: ignore[assignment,misc]


def _install_filter(
    policy: Policy, *, others_are_safe: bool, scoped: bool, launches: bool = False
) -> None:
    table = rules.allowed(
        pid=os.getpid(),
        ports=bool(policy.ports),
        granted=policy.syscalls,
        gpu=bool(policy.devices),
        metadata=others_are_safe,
        forks=policy.forks,
        signals_are_scoped=scoped,
        launches=launches,
    )
    machine = syscalls.this_machine()
    seccomp.install(seccomp.program(machine, table, rules.KILLED, rules.ABSENT))


def _writing(path: str) -> int:
    """The rights of who may write to what is there."""
    is_device = os.path.exists(path) and stat.S_ISCHR(os.stat(path).st_mode)
    return landlock.USE_DEVICE if is_device else landlock.CHANGE


def _is_absent(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
