"""Control groups, version 2: one for each instance, if this process may make some.

The kernel's documentation calls that delegation (Documentation/admin-guide/cgroup-v2.rst): a manager, usually
systemd with `Delegate=yes` or a container's, has left a group and all below it to us. Other groups
belong to their managers, so in doubt none is made. `MOONPOOL_CGROUP` names a delegated group
if that cannot be detected; it must have no processes of its own.

Theory of operation. The place is looked for once in a process, at the first instance that needs a group, and `_lock`
makes other threads wait for the result: to look may move this process into a group below, and must not happen twice. A
refusal is kept as well, so that the log says it once. After that, threads only make groups, with numbers of their own.

An instance is put into its group before foreign code runs in it. So all processes that it starts are in the group. The
kernel ends the whole group at once (`cgroup.kill`, and `memory.oom.group` when memory runs out), so no process can
escape by forking. A group can only be removed once all its processes are gone, so `remove` tries again for a second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonpool.ipc.policy import reached
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config.options import USUAL_WEIGHT

_log = RuntimeLog("moonpool")
VARIABLE = "MOONPOOL_CGROUP"
_WANTED = ("memory", "pids", "cpu")
_PREFIX = "moonpool-"
# The seconds that the processes of a killed group may take to be gone.
_GONE_S = 1.0
_PAUSE_S = 0.005


class NotDelegated(Exception):
    """No groups can be made. The text says why, as a clause."""


@dataclass(frozen=True)
class CgroupPlace:
    """A group below which others may be made, with the controllers that they get."""

    path: Path
    controllers: frozenset[str]


def find_place(proc: Path = Path("/proc"), variable: str | None = None) -> CgroupPlace:
    """Find the group below which groups of instances can be made. Moves this process into a group of its own there if
    needed.

    Raises `NotDelegated`.
    """
    if variable:
        path = Path(variable)
        if not _is_group(path):
            raise NotDelegated(f"{VARIABLE} names {variable}, which is not a group of cgroup v2")
    else:
        path, is_top = _own_group(proc)
        _check_ours(path, is_top=is_top)
    _remove_leftovers(path)
    try:
        _leave(path, proc, named=bool(variable))
        controllers = _enable(path)
    except OSError as error:
        raise NotDelegated(f"{path} cannot be divided: {error.strerror}") from error
    if not controllers:
        raise NotDelegated(f"{path} offers neither memory nor pids nor cpu")
    return CgroupPlace(path, controllers)


def _own_group(proc: Path) -> tuple[Path, bool]:
    """Return the group of cgroup v2 of this process, and True if the process sees none above it."""
    lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    inside = next((line[3:] for line in lines if line.startswith("0::")), None)
    mounted = _mount_point(proc)
    if inside is None or mounted is None:
        raise NotDelegated("there is no cgroup v2")
    if "/.." in inside:
        raise NotDelegated(f"the group {inside} lies outside of what is mounted here")
    return mounted / inside.lstrip("/"), inside == "/"


def _mount_point(proc: Path) -> Path | None:
    for line in (proc / "self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, filesystem = line.partition(" - ")
        if filesystem.split(" ", 1)[0] == "cgroup2":
            return Path(fields.split(" ")[4])
    return None


def _is_group(path: Path) -> bool:
    return path.is_absolute() and (path / "cgroup.controllers").is_file()


def _is_root(path: Path) -> bool:
    """Return True for the machine's one group without a parent, which may have both processes and groups."""
    return not (path / "cgroup.type").exists()


def _check_ours(path: Path, *, is_top: bool) -> None:
    """Raise `NotDelegated` unless the group is visibly delegated to us.

    The highest group belongs to the one who may write to it: root of a machine, or of a container.
    Container managers mount it read-only if it is not the container's own.
    """
    if not os.access(path / "cgroup.subtree_control", os.W_OK):
        raise NotDelegated(f"{path} may not be written to")
    if not is_top and not _is_marked(path):
        raise NotDelegated(f"{path} is not marked as delegated (systemd: Delegate=yes)")


def _is_marked(path: Path) -> bool:
    """Return True if the group has systemd's mark of delegated groups."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, name) == b"1":
                return True
    return False


def _leave(path: Path, proc: Path, *, named: bool) -> None:
    """Move our processes into a group below, because a divided group may have none. Refuse if there are others."""
    if _is_root(path):
        return
    inside = _processes(path)
    if inside and (named or not all(_is_ours(pid, proc) for pid in inside)):
        raise NotDelegated(f"{path} has processes that are not moonpool's to move")
    own = path / f"{_PREFIX}{os.getpid()}-runtime"
    if inside:
        own.mkdir(exist_ok=True)
    for pid in inside:
        (own / "cgroup.procs").write_text(str(pid), encoding="ascii")


def _is_ours(pid: int, proc: Path) -> bool:
    """Return True for this process, or a child of it."""
    if pid == os.getpid():
        return True
    status = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return int(status.rpartition(")")[2].split()[1]) == os.getpid()


def _processes(path: Path) -> list[int]:
    return [int(each) for each in (path / "cgroup.procs").read_text(encoding="ascii").split()]


def _enable(path: Path) -> frozenset[str]:
    """Enable the controllers for the groups below, and return those that the kernel did not refuse."""
    offered = (path / "cgroup.controllers").read_text(encoding="ascii").split()
    control = path / "cgroup.subtree_control"
    for name in _WANTED:
        if name in offered and name not in control.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                control.write_text(f"+{name}", encoding="ascii")
    return frozenset(control.read_text(encoding="ascii").split()).intersection(_WANTED)


def _remove_leftovers(path: Path) -> None:
    """Remove groups of runtimes that were killed. Those with processes stay."""
    for folder in path.glob(f"{_PREFIX}*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Group:
    """The group of one instance. Any thread may call any method."""

    def __init__(self, place: CgroupPlace, name: str, limits: Mapping[str, int], cpu_weight: int) -> None:
        """Make it. Raises OSError."""
        self.path = place.path / name
        # The limits that it enforces, of those that were asked for.
        self.limits: dict[str, int] = {}
        self.has_weight = "cpu" in place.controllers
        # Such as `memory+pids+cpu`.
        self.controls = "+".join(name for name in _WANTED if name in place.controllers)
        self.path.mkdir()
        try:
            memory = limits.get("memory_bytes", limits.get("data_bytes"))
            tasks = limits.get("tasks")
            if "memory" in place.controllers and memory is not None:
                self._write("memory.max", memory)
                with contextlib.suppress(OSError):  # a kernel without swap has no such file
                    self._write("memory.swap.max", 0)
                self._write("memory.oom.group", 1)
                self.limits["memory_bytes"] = memory
            if "pids" in place.controllers and tasks is not None:
                self._write("pids.max", tasks)
                self.limits["tasks"] = tasks
            if "cpu" in place.controllers:
                self._write("cpu.weight", cpu_weight)
        except OSError:
            self.remove()
            raise

    def _write(self, name: str, value: object) -> None:
        (self.path / name).write_text(str(value), encoding="ascii")

    def add(self, pid: int) -> None:
        """Add a process, and with it all that it will start. Raises OSError."""
        self._write("cgroup.procs", pid)

    def reached(self) -> str:
        """Return the clause of `policy.reached` for the limit for which the kernel ended a process of this group, else
        "".
        """
        is_full = self._event("memory.events", "oom") and self._event("memory.events", "oom_kill")
        if "memory_bytes" in self.limits and is_full:
            return reached("memory_bytes", self.limits["memory_bytes"])
        return ""

    def _event(self, name: str, key: str) -> int:
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_text(encoding="ascii").splitlines():
                words = line.split()
                if words[0] == key:
                    return int(words[1])
        return 0

    @property
    def can_kill(self) -> bool:
        """True if the kernel can end all processes of the group at once, as it can since 5.14."""
        return (self.path / "cgroup.kill").exists()

    def kill(self) -> None:
        """End all processes in it, even those that have left the session of the instance."""
        with contextlib.suppress(OSError):  # a kernel before 5.14 has no such file
            self._write("cgroup.kill", 1)

    def remove(self) -> None:
        """End all processes in it, and remove it. May be called many times."""
        self.kill()
        end_s = time.monotonic() + _GONE_S
        while True:
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > end_s:
                    _log.error("cannot remove the cgroup %s: %s", self.path, error)
                    return
                time.sleep(_PAUSE_S)
            else:
                return


class Groups:
    """Makes the groups of this process's instances. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._place: CgroupPlace | None = None
        # The reason why there are no groups, once that is known.
        self.refusal = ""

    def _find(self) -> CgroupPlace | None:
        with self._lock:
            if self._place is None and not self.refusal:
                try:
                    self._place = find_place(variable=os.environ.get(VARIABLE))
                except (NotDelegated, OSError) as error:
                    self.refusal = str(error)
                    _log.debug("cannot make cgroups for instances: %s", error)
            return self._place

    def make(self, limits: Mapping[str, int], cpu_weight: int) -> Group | None:
        """Make a group for one instance; return None if groups cannot be made, or it would have nothing to do."""
        place = self._find() if limits or cpu_weight != USUAL_WEIGHT else None
        if place is None:
            return None
        name = f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        try:
            return Group(place, name, limits, cpu_weight)
        except OSError as error:
            _log.warning("cannot make a cgroup for an instance: %s", error)
            return None


# One object for the process, which is in one group, however many runtimes it has.
GROUPS = Groups()
