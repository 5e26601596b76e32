"""From the options of a server to its runtime and its service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.log_control import LogControl
from moonpool.runtime.frontend.metadata import Metadata
from moonpool.runtime.frontend.repository_control import RepositoryControl
from moonpool.runtime.frontend.service import Service
from moonpool.runtime.frontend.setting_values import BadSetting
from moonpool.runtime.frontend.shared_memory import SystemSharedMemory
from moonpool.runtime.frontend.trace_settings import trace_options
from moonpool.runtime.frontend.traces import Traces
from moonpool.runtime.loading import HostingRules
from moonpool.runtime.metrics_options import metrics_options
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.frontends import trace_flags
from moonpool.runtime.server.option_sources import BadOption

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.runtime.audience import Audience
    from moonpool.runtime.progress import Progress
    from moonpool.runtime.server.log_lines import ServerLog
    from moonpool.runtime.server.options import ServerOptions


def config_limits(texts: Iterable[str]) -> ConfigLimits:
    """Read the limits of `--model-config-limit`. Raises `BadOption`."""
    try:
        return ConfigLimits().raised(texts)
    except ValueError as error:
        raise BadOption(f"--model-config-limit {error}") from error


# For a model that is unloaded while the server goes on.
_DRAIN_S = 30.0


def make_service(
    options: ServerOptions,
    log: ServerLog,
    progress: Progress | None,
    audience: Audience | None = None,
) -> Service:
    """A service whose runtime has no model yet; the caller closes both. `audience` is the runtime's.

    Raises `BadOption`, `RepositoryError`.
    """
    try:
        traces = trace_options(trace_flags(options))
        metrics = metrics_options(
            options.metrics_config,
            allow_cpu=options.allow_cpu_metrics,
            allow_gpu=options.allow_gpu_metrics,
            interval_ms=options.metrics_interval_ms,
        )
        limits = config_limits(options.model_config_limit)
    except (BadSetting, InvalidRequest) as error:
        raise BadOption(str(error)) from error
    runtime = Runtime(
        options.model_repository,
        models=(),
        backend_directory=options.backend_directory or None,
        drain_timeout_s=max(_DRAIN_S, options.exit_timeout_secs),
        verbose=options.log_verbose > 0,
        listener=progress,
        metrics=metrics,
        audience=audience,
    )
    registry = runtime.registry
    registry.rules = HostingRules(
        options.sandbox or None,
        completes=not options.disable_auto_complete_config,
        grants=frozenset(options.sandbox_grants),
        limits=limits,
    )
    try:
        return Service(
            runtime,
            shared_memory=SystemSharedMemory(is_enabled=options.allow_client_shm),
            metadata=Metadata(
                runtime, server_id=options.id, strict_readiness=options.strict_readiness
            ),
            repository=RepositoryControl(
                runtime,
                mode=options.model_control_mode,
                load_threads=options.model_load_thread_count,
            ),
            traces=Traces(traces, lambda name: bool(registry.versions(name))),
            logs=LogControl(registry.stubs.change_log, log),
        )
    except BaseException:
        runtime.close()
        raise
