"""What a model may do beyond its level, as its configuration says."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime.errors import NotGranted
from moonpool.runtime.repository_files import is_within
from moonpool.runtime.sandbox.defaults import hardened

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moonpool.runtime.backend import Model
    from moonpool.runtime.config import ConfigError
    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.source import ModelSource


def granted(options: ModelOptions, gpus: Sequence[int] = ()) -> tuple[str, ...]:
    """In words, for the log and for those who look at the instance. `gpus` are those that it gets."""
    if not is_contained(options.sandbox):
        return ()
    paths = [f"{'write' if writes else 'read'} {path}" for path, writes in options.sandbox_paths]
    interpreter = options.execution_env_path
    return (
        *([f"run the interpreter of {interpreter}"] if interpreter is not None else []),
        *paths,
        *(f"use GPU {gpu}" for gpu in gpus),
        *(f"connect to port {port}" for port in options.sandbox_ports),
        *(f"call {name}" for name in options.sandbox_syscalls),
        *(f"ask model {pattern}" for pattern in options.sandbox_models),
        *(f"see {pattern} of the environment" for pattern in options.environment),
        *(["share a template with its other instances"] if options.prefork != "no" else []),
    )


def check_may_ask(asker: Model, name: str) -> None:
    """Raises `NotGranted` where the sandbox of a model does not let it ask another one, load it or unload it."""
    options = asker.options
    if not is_contained(options.sandbox):
        return
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.sandbox_models):
        raise NotGranted(
            f"the sandbox of model '{asker.name}' does not let it ask for model '{name}'; "
            "MOONPOOL_SANDBOX_MODELS in its configuration names those that it may"
        )


def check_ungranted(model: Model, option: str) -> None:
    """Raises `ConfigError` where the configuration gives the model more than its level does.

    Under a level that holds for a whole server, a model is not to open its own door. `option` of the server, with the
    model's name at its end, lets it.
    """
    options = model.options
    usual = hardened(replace(type(options)(), sandbox=options.sandbox))
    _check_links(model, option)
    for key, attribute in _GRANTS.items():
        if getattr(options, attribute) != getattr(usual, attribute):
            raise _ungranted(model, option, f"parameters[{key}]", "more than its sandbox does")
    if model.config.uses_gpu:
        raise _ungranted(model, option, "instance_group", "a GPU")
    for key, (attribute, bound) in _LIMITS.items():
        most = getattr(usual, bound)
        if _exceeds(getattr(options, attribute), most):
            raise _ungranted(model, option, f"parameters[{key}]", f"more than {most}")


def _check_links(model: Model, option: str) -> None:
    """Refuse links below the model's directory that lead out of it, since the model could read the files at their end."""
    source = model.source
    if not source.is_directory:
        return
    folder = os.path.realpath(source.model_directory)
    # The file of a Python-based backend is the server's own.
    own = [path for path in (source.version_directory, source.file) if _is_below(path, source)]
    for path in own:
        real = os.path.realpath(path)
        if not is_within(real, folder):
            more = f"the files at the end of the link {path}, which is {real}"
            raise _ungranted(model, option, "", more)


def _is_below(path: Path, source: ModelSource) -> bool:
    return path.is_relative_to(source.model_directory)


def _ungranted(model: Model, option: str, field: str, more: str) -> ConfigError:
    return model.config.source.error(
        field,
        f"this server lets no model give itself {more}; to let '{model.name}', start it with "
        f"{option}{model.name}",
    )


def _exceeds(value: int | None, most: int | None) -> bool:
    """Whether a limit is looser than another one; None sets none, and leaves it to others."""
    return value is not None and most is not None and value > most


def check_not_looser(model: Model, asker: ModelOptions) -> None:
    """A configuration that a model brings gives nothing that this model has not itself. Raises `ConfigError`."""
    options, source = model.options, model.config.source
    if LEVELS.index(options.sandbox) < LEVELS.index(asker.sandbox):
        what = f"a model in the sandbox '{asker.sandbox}' cannot load one in '{options.sandbox}'"
        raise source.error("parameters[MOONPOOL_SANDBOX]", what)
    if is_contained(asker.sandbox):
        subject = f"a model in the sandbox '{asker.sandbox}' cannot"
        if options.execution_env_path is not None:
            what = f"{subject} choose the interpreter of another"
            raise source.error("parameters[EXECUTION_ENV_PATH]", what)
        if model.config.uses_gpu:
            raise source.error("instance_group", f"{subject} give another a GPU")
        what = f"a model in the sandbox '{asker.sandbox}' cannot set this for another"
        for key, attribute in _GRANTS.items():
            value = getattr(options, attribute)
            if value not in (getattr(asker, attribute), getattr(type(options)(), attribute)):
                raise source.error(f"parameters[{key}]", what)
        for key, (attribute, bound) in _LIMITS.items():
            if _exceeds(getattr(options, attribute), getattr(asker, bound)):
                raise source.error(f"parameters[{key}]", what)


_GRANTS = {
    # Its interpreter is confined, but whatever lies beside that can be read.
    "EXECUTION_ENV_PATH": "execution_env_path",
    "MOONPOOL_SANDBOX_PATHS": "sandbox_paths",
    "MOONPOOL_SANDBOX_PORTS": "sandbox_ports",
    "MOONPOOL_SANDBOX_SYSCALLS": "sandbox_syscalls",
    "MOONPOOL_SANDBOX_MODELS": "sandbox_models",
    "MOONPOOL_ENVIRONMENT": "environment",
    "MOONPOOL_PREFORK": "prefork",
}
# Each with what it may not exceed; tighter ones harm nobody.
_LIMITS = {
    "MOONPOOL_MEMORY_LIMIT_BYTES": ("memory_limit_bytes", "memory_limit_bytes"),
    "MOONPOOL_REGION_BYTES": ("region_bytes", "region_limit_bytes"),
    "MOONPOOL_REGION_LIMIT_BYTES": ("region_limit_bytes", "region_limit_bytes"),
    "MOONPOOL_TASK_LIMIT": ("task_limit", "task_limit"),
    "MOONPOOL_OPEN_FILES": ("open_files", "open_files"),
    "MOONPOOL_SCRATCH_BYTES": ("scratch_bytes", "scratch_bytes"),
    "MOONPOOL_CPU_WEIGHT": ("cpu_weight", "cpu_weight"),
    "MOONPOOL_LOG_LINES_PER_S": ("log_lines_per_s", "log_lines_per_s"),
}
