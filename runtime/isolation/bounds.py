"""Keeps the process of one stub within its limits from outside, by a control group and the watcher."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moonpool.ipc.policy import MEMORY, OFF, OOM_SCORE, Policy, limit_named
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation.cgroups import GROUPS, Group
from moonpool.runtime.isolation.watcher import Watched, Watcher
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.process.child import ChildProcess
from moonpool.runtime.process.diagnose import death_in_words, fatal_call, oom_kills

_log = RuntimeLog("moonpool")
# A larger limit is seldom the reason why a process crashes or hangs without a message.
_SMALL_BYTES = 2 << 30
# These signals end a process whose library does not check if it got memory, or aborts if it got none.
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGTRAP)


class Bounds:
    """The limits of one process, made before it. Any thread may call any method. `hold` and `release` may wait some
    milliseconds.
    """

    def __init__(self, name: str, policy: Policy, options: ModelOptions, watcher: Watcher, processes: int = 1) -> None:
        """`processes` is the number of a template and its forks, which together have so many times the memory of
        one.
        """
        self._name = name
        self._watcher = watcher
        self._rss_bytes = options.recycle_rss_bytes
        self._watched: Watched | None = None
        self._oom_kills = oom_kills()
        self._made_s = time.monotonic()
        self._pid = 0
        limits = dict(policy.limits)
        # A template and its forks have one user, and a limit of tasks as such. Each fork is watched by itself.
        if options.task_limit is not None and not policy.forks:
            limits["tasks"] = options.task_limit
        self._tasks = limits.get("tasks")
        self._group: Group | None = GROUPS.make(limits, options.cpu_weight)
        # The limit of all processes together. Without a group, the kernel limits only each process by itself.
        self._memory: int | None = None
        memory = next((limits[name] for name in MEMORY if name in limits), None)
        if policy.may_start_processes and memory is not None and not self._limits_memory:
            self._memory = memory * processes
        # The policy that the process still has to put on itself.
        self.policy = policy if self._group is None else _without(policy, self._group)

    @property
    def layers(self) -> list[str]:
        """The layer as stubs name theirs, such as `cgroup:memory+pids`; empty without a group."""
        return [] if self._group is None else [f"cgroup:{self._group.controls}"]

    @property
    def _limits_memory(self) -> bool:
        return self._group is not None and "memory_bytes" in self._group.limits

    @property
    def ends_all(self) -> bool:
        """True if all that the process starts ends with it."""
        return self._group is not None and self._group.can_kill

    def begin(self, process: ChildProcess) -> None:
        """Note the process, which has just started, and raise its score for the out-of-memory killer."""
        self._pid = process.pid
        if self.policy.level == OFF:
            return
        try:
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")
        except OSError as error:
            _log.debug("[%s] cannot set oom_score_adj: %s", self._name, error)

    def hold(self, process: ChildProcess, end: Callable[[BaseException], object]) -> None:
        """Put the limits on. Call it before foreign code runs in the process. Raises `LoadFailed`.

        If the process has to end because of a limit, `end` is called with the reason.
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
        """Note that the model is loaded. `grown` gets the memory of the process when that is a reason to recycle it."""
        if self._watched is not None:
            self._watched.serves(grown)

    def death_in_words(self, code: int, python: str, tail: list[str]) -> tuple[str, str]:
        """Return the words of `diagnose.death_in_words`, with the limit for which the kernel ended the process, if it
        did.
        """
        if self._group is not None and (limit := self._group.reached()):
            return f"was ended by the kernel, as it {limit},", ""
        killed = oom_kills() > self._oom_kills
        limits = self.policy.limits
        words, last_words = death_in_words(
            code, python, tail, limits, oom_killed=killed, fatal_call=partial(fatal_call, self._pid, self._made_s)
        )
        if code in _CRASHES and "limit" not in words:
            words += self.suspected_memory()
        return words, last_words

    def suspected_memory(self) -> str:
        """Name the memory limit as a possible reason for a crash or hang without a message; "" if it is not likely."""
        limits = self.policy.limits
        name = next((name for name in MEMORY if name in limits), None)
        if name is None or limits[name] > _SMALL_BYTES:
            return ""
        return f", perhaps because of its {limit_named(name, limits[name])},"

    def release(self) -> None:
        """Stop watching, and end all that the process left in its group. May be called many times."""
        if self._watched is not None:
            self._watcher.remove(self._watched)
            self._watched = None
        if self._group is not None:
            self._group.remove()


def _without(policy: Policy, group: Group) -> Policy:
    """Return the policy without the limits that the group enforces better. The limit of tasks stays, for the process's
    errors.
    """
    limits = policy.limits
    if "memory_bytes" in group.limits:
        limits = {name: value for name, value in limits.items() if name not in MEMORY}
    nice = 0 if group.has_weight else policy.nice
    return policy.changed(limits=limits, nice=nice)
