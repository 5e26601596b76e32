"""Everything that clients ask except for inference: health, metadata, repository, memory, settings.

The service speaks the JSON form of the protocol. Here its answers become messages.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.protobuf import config_messages, service_messages
from moonpool.runtime.server.grpc.reflection import HealthCheckResponse
from moonpool.runtime.server.log import check_parameters
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.settings import changes_of_lists

kserve = service_messages()
_NOT_SERVING, _SERVING = 2, 1


class GrpcControl:
    """Each method answers the RPC of its name. Any thread may call any of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.is_draining = False

    # Health

    def server_live(self, _: Any) -> Any:
        return kserve.ServerLiveResponse(live=True)

    def server_ready(self, _: Any) -> Any:
        return kserve.ServerReadyResponse(ready=self._is_ready())

    def model_ready(self, asked: Any) -> Any:
        is_ready = self._service.metadata.model_ready(asked.name, asked.version)
        return kserve.ModelReadyResponse(ready=is_ready)

    def check(self, _: Any) -> Any:
        """Answer `grpc.health.v1.Health`, which load balancers and probes ask of every gRPC server."""
        status = _SERVING if self._is_ready() else _NOT_SERVING
        return HealthCheckResponse(status=status)

    def _is_ready(self) -> bool:
        return not self.is_draining and self._service.metadata.is_ready()

    # Metadata

    def server_metadata(self, _: Any) -> Any:
        return _message("ServerMetadataResponse", self._service.metadata.server_metadata())

    def model_metadata(self, asked: Any) -> Any:
        described = self._service.metadata.model_metadata(asked.name, asked.version)
        return _message("ModelMetadataResponse", described)

    def model_config(self, asked: Any) -> Any:
        config = self._service.metadata.model_config(asked.name, asked.version)
        # Fields that this schema does not know were accepted when the model was loaded.
        message = ParseDict(config, config_messages().ModelConfig(), ignore_unknown_fields=True)
        return kserve.ModelConfigResponse(config=message)

    def model_statistics(self, asked: Any) -> Any:
        statistics = self._service.metadata.statistics(asked.name, asked.version)
        return _message("ModelStatisticsResponse", statistics)

    # Repository

    def repository_index(self, asked: Any) -> Any:
        _check_repository(asked)
        models = self._service.repository.index(ready_only=asked.ready)
        return _message("RepositoryIndexResponse", {"models": models})

    def repository_model_load(self, asked: Any) -> Any:
        _check_repository(asked)
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, parameter in asked.parameters.items():
            kind = parameter.WhichOneof("parameter_choice")
            if name == "config":
                _check_kind(f"load parameter '{name}'", kind, "string_param")
                config = parameter.string_param
            elif name.startswith("file:"):
                _check_kind(f"load parameter '{name}'", kind, "bytes_param")
                files[name] = parameter.bytes_param
            else:
                raise InvalidRequest(f"unrecognized load parameter '{name}'.")
        self._service.repository.load(asked.model_name, config, files or None)
        return kserve.RepositoryModelLoadResponse()

    def repository_model_unload(self, asked: Any) -> Any:
        _check_repository(asked)
        name = "unload_dependents"
        dependents = False
        if name in asked.parameters:
            parameter = asked.parameters[name]
            kind = parameter.WhichOneof("parameter_choice")
            _check_kind(f"'{name}' parameter", kind, "bool_param")
            dependents = parameter.bool_param
        self._service.repository.unload(asked.model_name, unload_dependents=dependents)
        return kserve.RepositoryModelUnloadResponse()

    # Shared memory

    def system_shared_memory_status(self, asked: Any) -> Any:
        regions = self._service.shared_memory.status(asked.name)
        shown = {"regions": {region["name"]: region for region in regions}}
        return _message("SystemSharedMemoryStatusResponse", shown)

    def system_shared_memory_register(self, asked: Any) -> Any:
        memory = self._service.shared_memory
        memory.register(asked.name, asked.key, asked.offset, asked.byte_size)
        return kserve.SystemSharedMemoryRegisterResponse()

    def system_shared_memory_unregister(self, asked: Any) -> Any:
        self._service.shared_memory.unregister(asked.name)
        return kserve.SystemSharedMemoryUnregisterResponse()

    def cuda_shared_memory_status(self, asked: Any) -> Any:
        if asked.name:
            raise ModelError(f"Unable to find cuda shared memory region: '{asked.name}'", "NOT_FOUND")
        return kserve.CudaSharedMemoryStatusResponse()

    def cuda_shared_memory_register(self, asked: Any) -> Any:
        self._service.shared_memory.check_enabled()
        raise ModelError(
            f"failed to register CUDA shared memory region '{asked.name}': this server has no GPU support",
            "UNSUPPORTED",
        )

    def cuda_shared_memory_unregister(self, _: Any) -> Any:
        self._service.shared_memory.check_enabled()
        return kserve.CudaSharedMemoryUnregisterResponse()

    # Settings

    def trace_setting(self, asked: Any) -> Any:
        given = {name: list(each.value) for name, each in asked.settings.items()}
        message = kserve.TraceSettingResponse()
        settings = self._service.traces.settings(asked.model_name, changes_of_lists(given))
        for name, value in settings.items():
            message.settings[name].value.extend(value if isinstance(value, list) else [str(value)])
        return message

    def log_settings(self, asked: Any) -> Any:
        given: dict[str, object] = {}
        for name, each in asked.settings.items():
            kind = each.WhichOneof("parameter_choice")
            given[name] = None if kind is None else getattr(each, kind)
        message = kserve.LogSettingsResponse()
        for name, value in self._service.logs.settings(check_parameters(given)).items():
            if isinstance(value, bool):
                message.settings[name].bool_param = value
            elif isinstance(value, int):
                message.settings[name].uint32_param = value
            else:
                message.settings[name].string_param = value
        return message


def _message(kind: str, shown: dict[str, Any]) -> Any:
    return ParseDict(shown, getattr(kserve, kind)())


def _check_repository(asked: Any) -> None:
    if asked.repository_name:
        raise ModelError("'repository_name' specification is not supported", "UNSUPPORTED")


def _check_kind(what: str, kind: str | None, wanted: str) -> None:
    if kind != wanted:
        raise InvalidRequest(f"invalid value type for {what}, expected {wanted}.")
