"""What a model may do beyond its level, as its configuration says."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from moonpool.ipc.policy import BEST_EFFORT, LEVELS, OFF, STRICT
from moonpool.runtime.errors import NotGranted

if TYPE_CHECKING:
    from moonpool.runtime.backend import Model
    from moonpool.runtime.config_options import ModelOptions


def granted(options: ModelOptions) -> tuple[str, ...]:
    """In words, for the log and for those who look at the instance."""
    if options.sandbox not in (BEST_EFFORT, STRICT):
        return ()
    paths = [f"{'write' if writes else 'read'} {path}" for path, writes in options.sandbox_paths]
    return (
        *paths,
        *(f"connect to port {port}" for port in options.sandbox_ports),
        *(f"call {name}" for name in options.sandbox_syscalls),
        *(f"ask model {pattern}" for pattern in options.sandbox_models),
        *(f"see {pattern} of the environment" for pattern in options.environment),
        *(["share a template with its other instances"] if options.prefork != "no" else []),
    )


def check_may_ask(asker: Model, name: str) -> None:
    """Raises `NotGranted` where the sandbox of a model does not let it ask another one, load it or unload it."""
    options = asker.options
    if options.sandbox not in (BEST_EFFORT, STRICT):
        return
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.sandbox_models):
        raise NotGranted(
            f"the sandbox of model '{asker.name}' does not let it ask for model '{name}'; "
            "MOONPOOL_SANDBOX_MODELS in its configuration names those that it may"
        )


def check_ungranted(model: Model) -> None:
    """Raises `ConfigError` where the configuration gives the model more than its level does.

    Under a level that holds for a whole server, a model is not to open its own door.
    """
    defaults = type(model.options)()
    for key, attribute in _GRANTS.items():
        if getattr(model.options, attribute) != getattr(defaults, attribute):
            raise model.config.source.error(
                f"parameters[{key}]",
                f"this server lets no model give itself more than its sandbox does; to let '{model.name}', "
                f"start it with --sandbox-grants={model.name}",
            )


def check_not_looser(model: Model, asker: ModelOptions) -> None:
    """A configuration that a model brings gives nothing that this model has not itself. Raises `ConfigError`."""
    options, source = model.options, model.config.source
    if LEVELS.index(options.sandbox) < LEVELS.index(asker.sandbox):
        what = f"a model in the sandbox '{asker.sandbox}' cannot load one in '{options.sandbox}'"
        raise source.error("parameters[MOONPOOL_SANDBOX]", what)
    if asker.sandbox in (BEST_EFFORT, STRICT):
        if options.execution_env_path is not None:
            what = (
                f"a model in the sandbox '{asker.sandbox}' cannot choose the interpreter of another"
            )
            raise source.error("parameters[EXECUTION_ENV_PATH]", what)
        for key, attribute in _GRANTS.items():
            value = getattr(options, attribute)
            if value not in (getattr(asker, attribute), getattr(type(options)(), attribute)):
                what = f"a model in the sandbox '{asker.sandbox}' cannot set this for another"
                raise source.error(f"parameters[{key}]", what)
    more = set(options.environment) - set(asker.environment)
    if more and asker.sandbox != OFF:
        what = f"a model cannot give another what it has not itself: {', '.join(sorted(more))}"
        raise source.error("parameters[MOONPOOL_ENVIRONMENT]", what)


_GRANTS = {
    "MOONPOOL_SANDBOX_PATHS": "sandbox_paths",
    "MOONPOOL_SANDBOX_PORTS": "sandbox_ports",
    "MOONPOOL_SANDBOX_SYSCALLS": "sandbox_syscalls",
    "MOONPOOL_SANDBOX_MODELS": "sandbox_models",
    "MOONPOOL_ENVIRONMENT": "environment",
    "MOONPOOL_PREFORK": "prefork",
    # Limits that `strict` sets by itself.
    "MOONPOOL_MEMORY_LIMIT_BYTES": "memory_limit_bytes",
    "MOONPOOL_REGION_LIMIT_BYTES": "region_limit_bytes",
    "MOONPOOL_TASK_LIMIT": "task_limit",
    "MOONPOOL_OPEN_FILES": "open_files",
    "MOONPOOL_SCRATCH_BYTES": "scratch_bytes",
    "MOONPOOL_CPU_WEIGHT": "cpu_weight",
}
