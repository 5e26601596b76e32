"""From what a caller names (a repository's model, a directory, a file, a class) to models ready to be hosted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.runtime.backend import Model
from moonpool.runtime.config import ModelConfig, Source, minimal
from moonpool.runtime.config_defaults import PYTHON_BACKEND
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.errors import ModelNotFound
from moonpool.runtime.repository import ModelDirectory
from moonpool.runtime.source import ModelSource, of_class, of_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.repository import ModelRepository


def models_of(
    name: str,
    source: str | os.PathLike[str] | type | None,
    repository: ModelRepository | None,
    instances: int | None,
    override: Mapping[str, Any] | None,
    locate: Callable[[ModelConfig], Path | None],
) -> list[Model]:
    """The versions of a model that are to be loaded, ascending; at least one.

    `locate` gives the file that serves all models of a backend; None where each has its own.

    Raises `ModelNotFound`, `RepositoryError`, `ConfigError`, `LoadFailed`.
    """
    changes = dict(override or {})
    if instances is not None:
        changes["instance_group"] = [{"kind": "KIND_AUTO", "count": instances}]
    if isinstance(source, type):
        return [_model(name, of_class(source), minimal(name), None, 1, changes)]
    if source is not None and not Path(source).is_dir():
        return [_model(name, of_file(source), minimal(name), None, 1, changes)]
    if source is not None:
        return _versions(name, ModelDirectory(source), changes, locate)
    if repository is None:
        raise ModelNotFound(
            f"model '{name}': the runtime has no repository; give a directory, file or class"
        )
    return _versions(name, repository.find(name), changes, locate)


def _versions(
    name: str,
    directory: ModelDirectory,
    changes: Mapping[str, Any],
    locate: Callable[[ModelConfig], Path | None],
) -> list[Model]:
    raw, source = directory.read_config()
    config = ModelConfig.from_dict(_merged(name, raw, changes), source=source, partial=True)
    shared = locate(config)
    if shared is not None:
        # As Triton does; models can see it in their configuration.
        changes = {**changes, "runtime": shared.name}
    models = []
    for version in directory.chosen_versions(config):
        folder = directory.version_directory(version)
        if config.backend == PYTHON_BACKEND:
            file = directory.model_file(version, config.default_model_filename)
            kind = of_file(file).kind
        else:
            # What else a version must have, its backend knows.
            file, kind = shared or folder / config.default_model_filename, "triton"
        where = ModelSource(kind, file, None, directory.path, folder)
        models.append(_model(name, where, raw, source, version, changes))
    return models


def _model(
    name: str,
    where: ModelSource,
    raw: Mapping[str, Any],
    source: Source | None,
    version: int,
    changes: Mapping[str, Any],
) -> Model:
    # There is no support for GPUs yet; AUTO is CPU.
    config = ModelConfig.from_dict(_merged(name, raw, changes), source=source, partial=True)
    config = config.placed(())
    return Model(config, ModelOptions.from_parameters(config), version, where)


def _merged(name: str, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**raw, **changes, "name": name}
    batching = merged.get("dynamic_batching")
    if batching and batching.get("preferred_batch_size") == [raw["max_batch_size"]]:
        # No more than what the directory's own maximum implied; another maximum implies another.
        merged["dynamic_batching"] = {**batching, "preferred_batch_size": []}
    return merged
