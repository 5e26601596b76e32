"""What a server says about itself and its models: metadata, configuration, readiness, statistics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from moonpool.runtime.errors import InvalidRequest, ModelNotFound, ModelUnavailable
from moonpool.runtime.model_control import version_of
from moonpool.runtime.output import harmless
from moonpool.runtime.readiness import not_healthy, wait_for_answer
from moonpool.runtime.states import ModelState
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.runtime.config import TensorConfig
    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.runtime import Runtime

_log = logging.getLogger("moonpool.server")
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class Metadata:
    """Answers in the JSON form of the protocol. Thread-safe.

    Versions are given as text, as they stand in a request; an empty one is none. Errors have Triton's texts
    and codes. Only `model_ready` may take long, as it asks the model.
    """

    def __init__(
        self, runtime: Runtime, *, server_id: str = "moonpool", strict_readiness: bool = True
    ) -> None:
        self._registry = runtime.registry
        self._server_id = server_id
        self._strict_readiness = strict_readiness
        # Whether requests are welcome: not before the first models are loaded, nor when the server is to end.
        self.is_open = True

    # Server

    def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions."""
        return {"name": self._server_id, "version": VERSION, "extensions": list(EXTENSIONS)}

    def is_ready(self) -> bool:
        """Whether the server takes requests, and, with strict readiness, every version that was to be loaded serves.

        As in Triton, one that somebody unloaded does not count, nor does what cannot even be read.
        """
        if not self.is_open:
            return False
        if not self._strict_readiness:
            return True
        return all(
            version.state is ModelState.READY or version.is_unloaded
            for status in self._registry.statuses().values()
            for version in status.versions
        )

    # Models

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a request to the model could run now, and its own `is_ready` says so.

        False for a model that is not loaded. If an instance gives a reason, it is logged. Raises `InvalidRequest` for a version
        that is no number.
        """
        number = version_of(version)
        try:
            hosted = self._registry.find(name, number)
        except (ModelNotFound, ModelUnavailable):
            return False
        reason = wait_for_answer(hosted.ask_ready)
        if reason is not None:
            # One line for each probe, as in Triton. Questions of models are not logged: a model may ask at any rate.
            down = hosted.instance_down
            why = not_healthy(down) if down is not None else harmless(reason)
            _log.error("Model '%s' version %d is not ready: %s", name, hosted.model.version, why)
        return reason is None

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Versions, platform and tensors. Raises `ModelNotFound`, `InvalidRequest`."""
        versions = self._versions(name)
        hosted = self._one_of(versions, name, version)
        config = hosted.model.config
        return {
            "name": name,
            "versions": [str(hosted.model.version)] if version else [str(n) for n in versions],
            "platform": config.raw["platform"] or config.backend,
            "inputs": _tensors(config.inputs, config.max_batch_size),
            "outputs": _tensors(config.outputs, config.max_batch_size),
        }

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """The configuration after the model completed it; not to be changed. Raises as `model_metadata`."""
        return self._one_of(self._versions(name), name, version).model.config.raw

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Of one version, all versions of a model, or of all models. Raises `InvalidRequest`."""
        number = version_of(version)
        if not name:
            served = [
                hosted for each in sorted(self._registry.names()) for hosted in self._of(each)
            ]
        else:
            served = self._of(name)
            if not served:
                raise InvalidRequest(f"requested model '{name}' is not available")
            if number is not None:
                served = [hosted for hosted in served if hosted.model.version == number]
            if not served:
                raise InvalidRequest(f"requested model version is not available for model '{name}'")
        self._registry.stubs.take_in_counts()
        return {"model_stats": [hosted.scheduler.statistics.snapshot() for hosted in served]}

    def _of(self, name: str) -> list[HostedModel]:
        """The versions of a model that serve, ascending; none where it is not loaded."""
        return list(self._registry.versions(name).values())

    def _versions(self, name: str) -> dict[int, HostedModel]:
        versions = self._registry.versions(name)
        if not versions:
            status = self._registry.statuses().get(name)
            is_known = status is not None and status.versions
            why = "has no available versions" if is_known else "is not found"
            raise ModelNotFound(f"Request for unknown model: '{name}' {why}")
        return versions

    def _one_of(self, versions: dict[int, HostedModel], name: str, version: str) -> HostedModel:
        number = version_of(version)
        if number is None:
            number = max(versions)
        if number not in versions:
            raise ModelNotFound(
                f"Request for unknown model: '{name}' version {number} is not found"
            )
        return versions[number]


def _tensors(tensors: Iterable[TensorConfig], max_batch_size: int) -> list[dict[str, Any]]:
    batch = [-1] if max_batch_size > 0 else []
    return [
        {"name": tensor.name, "datatype": tensor.datatype, "shape": [*batch, *tensor.dims]}
        for tensor in tensors
    ]
