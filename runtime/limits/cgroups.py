"""Control groups, version 2: a group of the kernel's for each instance, where this process may make some.

Which it may, is what the kernel's documentation calls delegation (Documentation/admin-guide/cgroup-v2.rst): somebody, usually
systemd with `Delegate=yes` or a container, has left a group and what is below it to us. A group that was not left to
us belongs to another manager, so in doubt nothing is made there. `MOONPOOL_CGROUP` names a group that was left to us
where that cannot be seen; it must have no processes of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.limits import reached
from moonpool.runtime.config_values import USUAL_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("moonpool")
VARIABLE = "MOONPOOL_CGROUP"
_WANTED = ("memory", "pids", "cpu")
_PREFIX = "moonpool-"
# How long the processes of a group that was killed may take to be gone.
_GONE_S = 1.0
_PAUSE_S = 0.005


class NotDelegated(Exception):
    """Why no groups can be made, as a clause."""


@dataclass(frozen=True)
class Place:
    """A group below which others may be made, and the controllers that they get."""

    path: Path
    controllers: frozenset[str]


def find_place(proc: Path = Path("/proc"), variable: str | None = None) -> Place:
    """Where groups of instances can be made; moves this process into a group of its own there if it has to.

    Raises `NotDelegated`.
    """
    if variable:
        path = Path(variable)
        if not _is_group(path):
            raise NotDelegated(f"{VARIABLE} names {variable}, which is no group of cgroup v2")
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
    return Place(path, controllers)


def _own_group(proc: Path) -> tuple[Path, bool]:
    """The group of cgroup v2 that this process is in, and whether it sees none above it."""
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
    """The one group of the machine that has no parent: processes and groups may be beside each other in it."""
    return not (path / "cgroup.type").exists()


def _check_ours(path: Path, *, is_top: bool) -> None:
    """Raises `NotDelegated` unless it can be seen that the group was left to us.

    The highest one that there is belongs to whoever may write to it: root of a machine, or of a container, for
    which container managers mount it read-only where it is not the container's own.
    """
    if not os.access(path / "cgroup.subtree_control", os.W_OK):
        raise NotDelegated(f"{path} may not be written to")
    if not is_top and not _is_marked(path):
        raise NotDelegated(f"{path} is not marked as delegated (systemd: Delegate=yes)")


def _is_marked(path: Path) -> bool:
    """As systemd marks what it delegates."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, name) == b"1":
                return True
    return False


def _leave(path: Path, proc: Path, *, named: bool) -> None:
    """A group that is divided may have no processes: take ours into one below it, if there are no others."""
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
    """This process, or a child of it."""
    if pid == os.getpid():
        return True
    status = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return int(status.rpartition(")")[2].split()[1]) == os.getpid()


def _processes(path: Path) -> list[int]:
    return [int(each) for each in (path / "cgroup.procs").read_text(encoding="ascii").split()]


def _enable(path: Path) -> frozenset[str]:
    """Give the groups below it what there is of the controllers; one that is refused is not there."""
    offered = (path / "cgroup.controllers").read_text(encoding="ascii").split()
    control = path / "cgroup.subtree_control"
    for name in _WANTED:
        if name in offered and name not in control.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                control.write_text(f"+{name}", encoding="ascii")
    return frozenset(control.read_text(encoding="ascii").split()).intersection(_WANTED)


def _remove_leftovers(path: Path) -> None:
    """Groups of runtimes that were killed. One that has processes cannot be removed."""
    for folder in path.glob(f"{_PREFIX}*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Group:
    """The group of one instance. Any thread may call any method."""

    def __init__(self, place: Place, name: str, limits: Mapping[str, int], cpu_weight: int) -> None:
        """Make it. Raises OSError."""
        self.path = place.path / name
        # What it limits, of what was asked for.
        self.limits: dict[str, int] = {}
        self.has_weight = "cpu" in place.controllers
        # As in `memory+pids+cpu`.
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
        """Take a process in, and with it all that it will start. Raises OSError."""
        self._write("cgroup.procs", pid)

    def reached(self) -> str:
        """What `ipc.limits.reached` says of the limit that the kernel ended a process of this group for, else ""."""
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
        """End all that is in it, also what has left the session of its process."""
        with contextlib.suppress(OSError):  # a kernel before 5.14 has no such file
            self._write("cgroup.kill", 1)

    def remove(self) -> None:
        """End all that is in it, and give it up. May be called many times."""
        self.kill()
        end_s = time.monotonic() + _GONE_S
        while True:
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > end_s:
                    _log.error("the group %s cannot be removed: %s", self.path, error)
                    return
                time.sleep(_PAUSE_S)
            else:
                return


class Groups:
    """Makes the groups of this process's instances. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._place: Place | None = None
        # Why there are none, once that is known.
        self.refusal = ""

    def _find(self) -> Place | None:
        with self._lock:
            if self._place is None and not self.refusal:
                try:
                    self._place = find_place(variable=os.environ.get(VARIABLE))
                except (NotDelegated, OSError) as error:
                    self.refusal = str(error)
                    _log.debug("instances get no groups of their own: %s", error)
            return self._place

    def make(self, limits: Mapping[str, int], cpu_weight: int) -> Group | None:
        """A group for one instance; None where there are none, or nothing for it to do."""
        place = self._find() if limits or cpu_weight != USUAL_WEIGHT else None
        if place is None:
            return None
        name = f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        try:
            return Group(place, name, limits, cpu_weight)
        except OSError as error:
            _log.warning("an instance gets no group of its own: %s", error)
            return None


# A process is in one group, whatever number of runtimes it has.
GROUPS = Groups()
