"""Puts on the layers of `best-effort` and `strict`, for models that may be hostile, in order.

Namespaces and a private user are a second line. They are left out if the kernel does not allow them. `strict` needs all
other layers. `best-effort` leaves out those that the kernel refuses. The runtime logs each layer that was left out.

The order, and its reasons:

1. *Limits* come before rights are given up, because a priority over other processes needs them.
2. *Namespaces and mounts* need the rights of root, or of a user namespace, so they come before rights are given up.
   Granted folders are opened inside the new mount namespace, because a mount can only be copied in the namespace in
   which it is.
3. *User and capabilities* are given up next. Tasks are limited only for a private user or in a user namespace: the
   kernel counts the tasks of a user, and would count the runtime's otherwise. A change of user clears the signal at the
   parent's death, so `die_with` is called again after it.
4. *Paths are checked* as the final user, which alone shows if its rights are enough.
5. *no_new_privs* comes before Landlock and the filter, because a process without capabilities may install neither
   without it.
6. *Landlock* comes after the mounts, because its rules belong to the files that the paths lead to at this moment. It
   holds for the thread that puts it on and for its children only, so there must be no other thread yet.
7. *seccomp* is last, because it forbids the calls by which all other layers were put on.

Each module of these layers is imported before the first layer is on: Landlock hides files that a later import might
need.
"""

from __future__ import annotations

import os
import select
import selectors
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Callable

from moonpool.ipc import syscalls
from moonpool.ipc.policy import STRICT, Policy
from moonpool.stub.sandbox import granted, identity, kernel, landlock, limits, mounts, namespaces, rules, seccomp
from moonpool.stub.sandbox.landlock import pinned_files, usual_files
from moonpool.stub.sandbox.outcome import Applied, SandboxRefused, refusing

# Stands for the pid of a process that does not exist yet. No pid, and no other number in the rules, is so large.
_NO_PID = 0x7EADBEEF
_SECOND_LINE = ("namespaces", "own_user", "no_capabilities")
_MACHINES = " or ".join(syscalls.ARCHITECTURES)


class Contained:
    """Puts on the layers one after the other, and keeps the facts that later layers depend on."""

    def __init__(self, policy: Policy, applied: Applied, *, launches: bool) -> None:
        """`launches` has the meaning that it has in `layers.apply`."""
        self._policy = policy
        self._launches = launches
        self._applied = applied
        self._parent_pid = os.getppid()
        self._user: int | None = None
        self._has_mounts = self._has_user_namespace = False
        # True if the process cannot change files of other users, whatever their modes are.
        self._others_are_safe = False
        self._granted: list[granted.Granted] = []
        # The folder of its own shared memory; "" for none.
        self._shared_memory = ""

    def put_on(self) -> None:
        """Put the layers on, and note them. Raises `SandboxRefused`."""
        try:
            self._put_on()
        finally:
            # The descriptors lead past the mounts that were put over the paths.
            for each in self._granted:
                each.close()

    def _put_on(self) -> None:
        self._limit()
        with self._optional():
            self._choose_user()
        own = granted.owned(self._policy.granted)
        with self._optional():
            self._enter_namespaces()
        # A copy of a mount is made in the namespace that the mount is in.
        self._granted = granted.opened(self._policy.granted, self._user, own)
        with self._optional():
            self._rearrange_mounts()
        with self._optional():
            self._give_up_rights()
        for each in self._granted:
            each.check()
        if self._is_lent:
            self._applied.on.append(granted.LAYER)
        if self._policy.scratch:
            with refusing("scratch", "set TMPDIR to a folder of the runtime's that others may pass"):
                os.chdir(self._policy.scratch)
        os.umask(0o077)
        with self._required("no_new_privs"):
            identity.forbid_new_privileges()
        with self._required("not_dumpable"):
            identity.forbid_looking_inside()
        version = landlock.abi()
        with self._required("landlock", f"landlock:{version}"):
            self._restrict_files(version)
        if version > landlock.NEWEST:
            self._applied.left_out.append(
                f"what Landlock of version {version} can do beyond version {landlock.NEWEST}, the last that this "
                "moonpool knows"
            )
        self._check_calls()
        with self._required("seccomp"):
            self._filter_calls(scoped=version >= landlock.KNOWS_SCOPES)
        _choose_selector()

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Leave a layer of the second line out if the kernel refuses it."""
        try:
            yield
        except SandboxRefused as refused:
            if refused.layer not in _SECOND_LINE:
                raise
            self._applied.left_out.append(str(refused))

    @contextmanager
    def _required(self, layer: str, name: str = "") -> Iterator[None]:
        """Note that a layer is on. If the kernel refuses it, only `best-effort` leaves it out."""
        try:
            with refusing(layer):
                yield
        except SandboxRefused as refused:
            # Without the filter, a model with the rights of an owner could make programs there that give them to
            # everybody.
            if self._policy.level == STRICT or (layer == "seccomp" and self._is_lent):
                raise
            self._applied.left_out.append(str(refused))
        else:
            self._applied.on.append(name or layer)

    @property
    def _is_lent(self) -> bool:
        """True if the instance has the rights of another user in a granted folder."""
        return any(each.is_lent for each in self._granted)

    def _limit(self) -> None:
        policy = self._policy
        limits.set_limits(policy.limits)
        limits.share_processors(policy.cpus, policy.nice)
        self._applied.leave_out(limits.weigh_session())
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
                "own_user", "the runtime may not change its user", "give it CAP_SETUID and CAP_SETGID to have it"
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
                arranged = mounts.rearrange(self._policy, self._user, self._granted)
            self._others_are_safe = arranged.is_read_only
            if arranged.shared_memory:
                self._shared_memory = arranged.shared_memory
                self._applied.on.append(mounts.LAYER)

    def _give_up_rights(self) -> None:
        policy = self._policy
        if "tasks" in policy.limits and (self._has_user_namespace or self._user is not None):
            limits.limit_tasks(policy.limits["tasks"])
        if os.geteuid() == 0 and identity.may_drop_bounding_set():
            # Without the right to do so, the set stays full. It gives nothing to a process that gets no new privileges.
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
        # Required from here on, because the mounts were made for this user.
        with self._required("own_user"):
            identity.become(user)
        if os.geteuid() == user:
            self._others_are_safe = True
        else:
            self._user = None

    def _check_paths(self, user: int) -> None:
        """Raise `SandboxRefused` for a needed path that the instance's user cannot read."""
        for path in self._policy.read:
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
        """Note a missing ability of Landlock. `strict` refuses to go without it."""
        refused = SandboxRefused("landlock", why, what_to_do)
        if self._policy.level == STRICT:
            raise refused
        self._applied.left_out.append(str(refused))

    def _pin_files(self) -> None:
        """Keep files open whose rules would be lost if the kernel made them anew, as long as this process lives."""
        for path in pinned_files(gpu=bool(self._policy.devices)):
            if os.path.exists(path):
                fd = os.open(path, os.O_PATH)
                if self._launches:
                    os.set_inheritable(fd, True)

    def _rights(self) -> list[tuple[str | int, int]]:
        policy = self._policy
        read = landlock.READ
        if self._launches or {"execve", "execveat"} & set(policy.syscalls):
            read |= landlock.EXECUTE
        return [
            *usual_files(network=bool(policy.ports), gpu=bool(policy.devices)),
            *((path, landlock.USE_DEVICE) for path in policy.devices),
            *((path, read) for path in policy.read),
            *((each.fd, read) for each in self._granted),
            *((each.fd, _writing(each)) for each in self._granted if each.writes),
            *((path, landlock.CHANGE) for path in (policy.scratch, self._shared_memory) if path),
        ]

    def _check_calls(self) -> None:
        """Refuse a misspelled grant at all levels. It must not lead to a process without the filter."""
        machine = syscalls.this_machine()
        unknown = set(self._policy.syscalls) - kernel.NUMBERS.keys() - rules.GRANTED_TOGETHER
        if unknown and machine in syscalls.ARCHITECTURES:
            raise SandboxRefused(
                "seccomp",
                f"there is no system call {min(unknown)} on {machine}",
                "take it out of MOONPOOL_SANDBOX_SYSCALLS",
            )
        hiding = set(self._policy.syscalls) & rules.HIDING_MODES
        if hiding and self._is_lent:
            raise SandboxRefused(
                "seccomp",
                f"with {min(hiding)}, which no filter looks into, a model could make programs in a granted folder that "
                "give everybody the rights of its owner",
                "take it out of MOONPOOL_SANDBOX_SYSCALLS, or grant no folder of another user",
            )

    def _filter_calls(self, *, scoped: bool) -> None:
        machine = syscalls.this_machine()
        if machine not in syscalls.ARCHITECTURES:
            raise SandboxRefused(
                "seccomp",
                f"there is no filter for {machine}",
                f"use {_MACHINES}, or the level best-effort to go without",
            )
        safe, launches = self._others_are_safe, self._launches
        seccomp.install(_filter(self._policy, os.getpid(), others_are_safe=safe, scoped=scoped, launches=launches))


def tighten(policy: Policy) -> None:
    """Put on again what an exec takes off, and forbid another exec. Raises `SandboxRefused`."""
    tightening(policy)()


def tightening(policy: Policy) -> Callable[[], None]:
    """Return a function that does what `tighten` does, in less time. A template makes it for all of its forks."""
    if syscalls.this_machine() not in syscalls.ARCHITECTURES:
        return partial(_tighten, policy, None, [])
    # The first filter stays on, and the kernel takes the stricter answer of the two. So conditions that the first
    # one decides are left open here.
    prepared = seccomp.PreparedFilter(_filter(policy, _NO_PID, others_are_safe=True, scoped=True))
    return partial(_tighten, policy, prepared, prepared.places_of(_NO_PID))


def _tighten(policy: Policy, prepared: seccomp.PreparedFilter | None, places: Sequence[int]) -> None:
    # Without `refusing`: in a fork, every object that is used for the first time takes a page.
    layer = "not_dumpable"
    try:
        identity.forbid_looking_inside()
        layer = "seccomp"
        if prepared is not None:
            prepared.change(places, os.getpid())
            prepared.install()
    except OSError as error:
        # `best-effort` reported the layer when it was left out the first time.
        if policy.level == STRICT:
            with refusing(layer):
                raise error


def _choose_selector() -> None:
    """Make event loops use `poll` if the filter refuses epoll. `selectors` chose epoll before the filter was on."""
    try:
        select.epoll().close()
    except OSError:
        selectors.DefaultSelector = selectors.PollSelector  # type: ignore[assignment,misc]


def _filter(policy: Policy, pid: int, *, others_are_safe: bool, scoped: bool, launches: bool = False) -> bytes:
    """Return the filter of the process `pid`."""
    table = rules.allowed(
        pid=pid,
        ports=bool(policy.ports),
        granted=policy.syscalls,
        gpu=bool(policy.devices),
        metadata=others_are_safe,
        has_files_alone=policy.has_files_alone,
        forks=policy.forks,
        signals_are_scoped=scoped,
        launches=launches,
    )
    machine = syscalls.this_machine()
    silent = rules.silent(has_files_alone=policy.has_files_alone)
    return seccomp.program(machine, table, rules.KILLED, rules.ABSENT, silent)


def _writing(path: granted.Granted) -> int:
    """Return the rights of a process that may write to this path."""
    return landlock.USE_DEVICE if path.is_device else landlock.CHANGE


def _is_absent(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
