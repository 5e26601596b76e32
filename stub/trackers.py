"""Fits `multiprocessing` and joblib to a stub: who removes their shared memory, semaphores and folders, and how they
pass descriptors.

These libraries start a process, the *tracker*, that removes them when all processes that use it have ended: each of
them has the other end of its pipe. The runtime gives it the time for that (`runtime/process/child.py`).

A contained process may not start one. If it has shared memory of its own, it needs none: the kernel removes all of it
with the process. Then the tracker of `multiprocessing` is /dev/null, which takes every message, and which children
inherit like the pipe.

To import a module of `multiprocessing` would take longer than all else in a stub. So `_AtImport` acts when the model,
or a library of it, imports it.

A contained model that may fork, and that may have no Unix sockets with names, passes descriptors between its processes
by the stub (`hosts/descriptors.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from moonpool.ipc.policy import Policy
from moonpool.stub.hosts.descriptors import SharedDescriptor
from moonpool.stub.sandbox.mounts import LAYER
from moonpool.stub.sandbox.rules import FORK, UNIX

_TRACKER = "multiprocessing.resource_tracker"
_TRACKERS = (_TRACKER, "joblib.externals.loky.backend.resource_tracker", "loky.backend.resource_tracker")


def settle(policy: Policy, layers: Collection[str]) -> None:
    """Make the tracker superfluous if these layers of the sandbox give the process shared memory of its own, and pass
    descriptors.
    """
    if LAYER in layers:
        _at_import(_TRACKER, _track_nothing)
    if policy.is_contained and FORK in policy.syscalls and UNIX not in policy.syscalls:
        _at_import("multiprocessing.resource_sharer", _share_by_the_stub)


def _share_by_the_stub(module: ModuleType) -> None:
    module.DupFd = SharedDescriptor  # type: ignore[attr-defined]


def _track_nothing(module: ModuleType) -> None:
    tracker = module._resource_tracker
    if tracker._fd is None:
        tracker._fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def forget() -> None:
    """Let a fork of a template have trackers of its own: that of the template would remove nothing before the template
    ends.
    """
    for name in _TRACKERS:
        tracker: Any = getattr(sys.modules.get(name), "_resource_tracker", None)
        # Without a process, it is /dev/null.
        if tracker is not None and tracker._fd is not None and tracker._pid is not None:
            with contextlib.suppress(OSError):
                os.close(tracker._fd)
            tracker._fd = tracker._pid = None


def _at_import(name: str, act: Callable[[ModuleType], object]) -> None:
    """Call `act` with a module when it has been imported; now if it has been."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AtImport(name, act))


class _AtImport:
    """Finds one module, as Python does, and acts after it was executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            loader.exec_module = execute_and_act
        return spec
