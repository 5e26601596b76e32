"""What keeps the process of one stub within its limits from outside: a group of the kernel's, and the watcher."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.ipc.policy import OFF, Policy
from moonpool.runtime.diagnose import death_in_words, oom_kills
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.limits.cgroups import GROUPS
from moonpool.runtime.limits.watcher import Watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.limits.cgroups import Group
    from moonpool.runtime.limits.watcher import Watcher
    from moonpool.runtime.process import ChildProcess

_log = logging.getLogger("moonpool")
# Where memory runs out, a stub is to be ended before its runtime is.
_OOM_SCORE = 500
_MEMORY = ("memory_bytes", "data_bytes")


class Bounds:
    """Made before the process. Any thread may call any method; `hold` and `release` may wait some milliseconds."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        options: ModelOptions,
        watcher: Watcher,
        processes: int = 1,
    ) -> None:
        """`processes` of them have so many times the memory of one, together: a template, and those that it forks."""
        self._name = name
        self._watcher = watcher
        self._rss_bytes = options.recycle_rss_bytes
        self._watched: Watched | None = None
        self._oom_kills = oom_kills()
        limits = dict(policy.limits)
        # A template and its forks are one user's, and limited as such; each fork is watched by itself.
        if options.task_limit is not None and not policy.forks:
            limits["tasks"] = options.task_limit
        self._tasks = limits.get("tasks")
        self._group: Group | None = GROUPS.make(limits, options.cpu_weight)
        # The limit of all processes together. Without a group, the kernel limits only each process by itself.
        self._memory: int | None = None
        memory = next((limits[name] for name in _MEMORY if name in limits), None)
        if policy.may_start_processes and memory is not None and not self._limits_memory:
            self._memory = memory * processes
        # What is left for the process to put on itself.
        self.policy = policy if self._group is None else _without(policy, self._group)

    @property
    def layers(self) -> list[str]:
        """As the stub names its own: `cgroup:memory+pids`, if there is one."""
        return [] if self._group is None else [f"cgroup:{self._group.controls}"]

    @property
    def _limits_memory(self) -> bool:
        return self._group is not None and "memory_bytes" in self._group.limits

    @property
    def ends_all(self) -> bool:
        """True if everything that the process starts ends with it."""
        return self._group is not None and self._group.can_kill

    def begin(self, process: ChildProcess) -> None:
        """The process has just started."""
        if self.policy.level == OFF:
            return
        try:
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")
        except OSError as error:
            _log.debug("[%s] its score for the out-of-memory killer stays: %s", self._name, error)

    def hold(self, process: ChildProcess, end: Callable[[BaseException], object]) -> None:
        """To be called before anything foreign runs in the process. Raises `LoadFailed`.

        `end` gets the reason where the process is to end for a limit.
        """
        if self._group is not None:
            try:
                self._group.add(process.pid)
            except OSError as error:
                raise LoadFailed(
                    f"Stub process '{self._name}' cannot be put into its group {self._group.path}, "
                    f"which limits it: {error.strerror}; see the rules of delegation in LIMITS.md",
                    stage="sandbox",
                ) from error
        policy = self.policy
        watched = Watched(
            self._name,
            process,
            end,
            tasks=self._tasks,
            scratch=policy.scratch,
            scratch_bytes=policy.scratch_bytes if policy.scratch else None,
            rss_bytes=self._rss_bytes,
            memory_bytes=self._memory,
        )
        if watched.is_needed:
            self._watched = watched
            self._watcher.add(watched)

    def serves(self, grown: Callable[[int], object]) -> None:
        """The model is loaded; `grown` gets the memory of the process when it is to be recycled for it."""
        if self._watched is not None:
            self._watched.serves(grown)

    def death_in_words(self, code: int, python: str, tail: list[str]) -> tuple[str, str]:
        """As `diagnose.death_in_words`, with the limit that the kernel has ended the process for, if it was one."""
        if self._group is not None and (limit := self._group.reached()):
            return f"was ended by the kernel, as it {limit},", ""
        killed = oom_kills() > self._oom_kills
        return death_in_words(code, python, tail, self.policy.limits, oom_killed=killed)

    def release(self) -> None:
        """The process has ended; what it may have left in its group ends as well. May be called many times."""
        if self._watched is not None:
            self._watcher.remove(self._watched)
            self._watched = None
        if self._group is not None:
            self._group.remove()


def _without(policy: Policy, group: Group) -> Policy:
    """What a group limits better. Of tasks the process is to know, for its errors."""
    limits = policy.limits
    if "memory_bytes" in group.limits:
        limits = {name: value for name, value in limits.items() if name not in _MEMORY}
    nice = 0 if group.has_weight else policy.nice
    return policy.changed(limits=limits, nice=nice)
