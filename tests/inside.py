"""Look into a runtime, for tests of its parts: no other file of the tests knows where it keeps its models."""

from __future__ import annotations

import moonpool
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.registry import ModelRegistry


def registry_of(runtime: moonpool.Runtime) -> ModelRegistry:
    return runtime._models


def hosted_in(runtime: moonpool.Runtime, name: str, version: int | None = None) -> HostedModel:
    return registry_of(runtime).find(name, version)
