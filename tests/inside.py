"""Look into a runtime, for tests of its parts: no other file of the tests knows where it keeps what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.process import child
from moonpool.runtime.schedule.lane import Lane


def registry_of(runtime: moonpool.Runtime) -> ModelRegistry:
    return runtime._models


def hosted_in(runtime: moonpool.Runtime, name: str, version: int | None = None) -> HostedModel:
    return registry_of(runtime).find(name, version)


def queue_of(scheduler: Lane) -> Any:
    return scheduler._queue


def boot_with(program: Path, patch: pytest.MonkeyPatch) -> None:
    """Start this program in place of the stub from now on. It finds the stub's own in `FAULT_BOOT`."""
    patch.setenv("FAULT_BOOT", child._BOOT)
    patch.setattr(child, "_BOOT", str(program))
