"""Answers to questions about a server and its models: metadata, configuration, readiness, statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moonpool.runtime.errors import InvalidRequest, ModelNotFound, ModelUnavailable
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config.model import TensorConfig
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.process.terminal import harmless
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.options.table import ServerOptions
from moonpool.runtime.stubs.readiness import not_healthy, wait_for_answer
from moonpool.runtime.version import VERSION

_log = RuntimeLog("moonpool.server")
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

    Versions are texts, as in a request; "" is no version. Errors have Triton's texts and codes. Only `model_ready` may
    take long, as it asks the model.
    """

    def __init__(self, runtime: Runtime, *, server_id: str = ServerOptions.id, strict_readiness: bool = True) -> None:
        self._registry = runtime._models
        self._server_id = server_id
        self._strict_readiness = strict_readiness
        # False until the models of the start are loaded, and again after a signal to end. The server is not ready then.
        self.is_open = True

    # Server

    def server_metadata(self) -> dict[str, Any]:
        """Return name, version and extensions."""
        return {"name": self._server_id, "version": VERSION, "extensions": list(EXTENSIONS)}

    def is_ready(self) -> bool:
        """Return whether the server takes requests, and, with strict readiness, every version that should be loaded
        serves.

        As in Triton, unloaded versions and models that cannot even be read do not count.
        """
        return self.is_open and not self.missing()

    def missing(self) -> list[tuple[str, int, str]]:
        """List name, version and reason of the versions that keep a server with strict readiness from being ready."""
        if not self._strict_readiness:
            return []
        return [
            (name, version.version, version.reason or str(version.state))
            for name, status in sorted(self._registry.statuses().items())
            for version in status.versions
            if version.state is not ModelState.READY and not version.is_unloaded
        ]

    # Models

    def model_ready(self, name: str, version: str = "") -> bool:
        """Return whether a request to the model could run now, and its own `is_ready` agrees.

        A model that is not loaded is not ready. If an instance gives a reason, it is logged. Raises `InvalidRequest`
        unless the version is a number.
        """
        number = version_of(version)
        try:
            hosted = self._registry.find(name, number)
        except (ModelNotFound, ModelUnavailable):
            return False
        reason = wait_for_answer(hosted.ask_ready, hosted.scheduler.reactor)
        if reason is not None:
            # One line for each probe, as in Triton. Questions of models are not logged, as a model may ask without end.
            down = hosted.instance_down
            why = not_healthy(down) if down is not None else harmless(reason)
            _log.error("Model '%s' version %d is not ready: %s", name, hosted.model.version, why)
        return reason is None

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Return versions, platform and tensors. Raises `ModelNotFound`, `InvalidRequest`."""
        versions = self._versions(name)
        hosted = self._one_of(versions, name, version)
        config = hosted.model.config
        return {
            "name": name,
            "versions": [str(hosted.model.version)] if version else [str(n) for n in versions],
            "platform": config.raw["platform"] or config.backend,
            "inputs": _tensors(config.declared("input"), config.max_batch_size),
            "outputs": _tensors(config.declared("output"), config.max_batch_size),
        }

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """Return the configuration as the model completed it. Do not change it. Raises as `model_metadata`."""
        return self._one_of(self._versions(name), name, version).model.config.raw

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Return statistics of one version, of all versions of a model, or of all models. Raises `InvalidRequest`."""
        number = version_of(version)
        if not name:
            served = [hosted for each in sorted(self._registry.names()) for hosted in self._of(each)]
        else:
            served = self._of(name)
            if not served:
                raise InvalidRequest(f"requested model '{name}' is not available")
            if number is not None:
                served = [hosted for hosted in served if hosted.model.version == number]
            if not served:
                raise InvalidRequest(f"requested model version is not available for model '{name}'")
        return {"model_stats": [hosted.scheduler.statistics.snapshot() for hosted in served]}

    def _of(self, name: str) -> list[HostedModel]:
        """Return the versions of a model that serve, ascending."""
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
            raise ModelNotFound(f"Request for unknown model: '{name}' version {number} is not found")
        return versions[number]


def _tensors(tensors: Iterable[TensorConfig], max_batch_size: int) -> list[dict[str, Any]]:
    batch = [-1] if max_batch_size > 0 else []
    return [{"name": tensor.name, "datatype": tensor.datatype, "shape": [*batch, *tensor.dims]} for tensor in tensors]
