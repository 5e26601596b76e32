"""From what a caller names (a repository's model, a directory, a file, a class) to models ready to be hosted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime import model_files
from moonpool.runtime.backend import Model
from moonpool.runtime.config import ModelConfig, Source, minimal
from moonpool.runtime.config_checks import name_problem
from moonpool.runtime.config_defaults import PYTHON_BACKEND
from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.errors import ModelNotFound
from moonpool.runtime.gpus import placed
from moonpool.runtime.repository import ModelDirectory, RepositoryError, is_version
from moonpool.runtime.repository_files import stamp_of
from moonpool.runtime.sandbox.grants import check_not_looser, check_ungranted
from moonpool.runtime.session_source import source_of
from moonpool.runtime.source import ModelSource, file_of_class, of_class, of_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from moonpool.runtime.config import Raw
    from moonpool.runtime.repositories import ModelRepositories

    # The file that serves all models of a backend; None where each has its own.
    Locate = Callable[[ModelConfig], Path | None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model as a caller asks for it.

    Without `source` it is the repository's. `files` are a whole directory, in place of the repository's.
    `config` goes field by field before what the directory says; `is_whole`: instead of it. `asker` is for the
    configuration of a model, which may not give another more than it has.
    """

    name: str
    source: str | os.PathLike[str] | type | None = None
    instances: int | None = None
    config: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] | None = None
    is_whole: bool = False
    asker: ModelOptions | None = None


@dataclass(frozen=True, slots=True)
class HostingRules:
    """What holds for all models of a runtime.

    `sandbox` is the least level of their processes, and what those have that say nothing; None leaves it to the models.
    From `best-effort` on, models cannot give themselves more than it does, but for those in `grants`.
    Without `completes`, models are not asked to complete their configuration. `limits` are for all configurations.
    """

    sandbox: str | None = None
    completes: bool = True
    grants: frozenset[str] = frozenset()
    # How it is said on the command line that a model is one of these.
    grant_option: str = "--sandbox-grants="
    limits: ConfigLimits = field(default_factory=ConfigLimits)

    def apply_to(self, model: Model) -> None:
        """Have a model that is not loaded yet keep them."""
        level = self.level_of(model.config, model.options)
        model.options = replace(model.options, sandbox=level)
        if (
            self.sandbox is not None
            and is_contained(self.sandbox)
            and model.name not in self.grants
        ):
            check_ungranted(model, self.grant_option)
        model.completes = self.completes
        model.limits = self.limits

    def level_of(self, config: ModelConfig, options: ModelOptions) -> str:
        """The level of a model's sandbox."""
        if self.sandbox is None:
            return options.sandbox
        says_nothing = "MOONPOOL_SANDBOX" not in config.parameters
        own = self.sandbox if says_nothing else options.sandbox
        return max(self.sandbox, own, key=LEVELS.index)


class Prepared:
    """The versions of a model that are to be loaded, ascending; at least one.

    `stamp` is equal for two that would be the same processes. `discard` must be called when nobody needs the
    files any more.
    """

    def __init__(self, models: list[Model], digest: object, made: Path | None = None) -> None:
        self.models = models
        self._made = made
        paths = {m.source.file for m in models}
        if digest is None:
            paths |= {m.source.model_directory for m in models if m.source.is_directory}
        self.stamp = (
            digest,
            [(m.version, m.source.class_name, m.config.raw) for m in models],
            [stamp_of(path, is_version) for path in sorted(paths) if not self._is_made(path)],
        )

    def _is_made(self, path: Path) -> bool:
        return self._made is not None and path.is_relative_to(self._made)

    def discard(self) -> None:
        """Remove the directory that was made for this model alone, if one was."""
        if self._made is not None:
            model_files.remove(self._made)


def prepare(
    wanted: Wanted,
    repository: ModelRepositories | None,
    locate: Locate,
    rules: HostingRules | None = None,
) -> Prepared:
    """Find and read what is wanted; starts nothing.

    Raises `ModelNotFound`, `RepositoryError`, `ConfigError`, `LoadFailed`.
    """
    rules = rules or HostingRules()
    prepared = _prepare(wanted, repository, locate, rules.limits)
    try:
        for model in prepared.models:
            rules.apply_to(model)
            model.config = placed(model)
        config = prepared.models[0].config
        rules.limits.check_instances(config.instance_groups, len(prepared.models), config.source)
    except BaseException:
        prepared.discard()
        raise
    return prepared


def _prepare(
    wanted: Wanted, repository: ModelRepositories | None, locate: Locate, limits: ConfigLimits
) -> Prepared:
    name, source = wanted.name, wanted.source
    if source is not None and wanted.files is not None:
        raise RepositoryError(f"model '{name}': give a source or files, not both")
    changes = dict(wanted.config or {})
    if wanted.instances is not None:
        changes["instance_group"] = [{"kind": "KIND_AUTO", "count": wanted.instances}]
    if wanted.files is not None:
        return _of_files(wanted, changes, locate, limits)
    if isinstance(source, type) or (source is not None and not Path(source).is_dir()):
        limits.check(changes, Source())
        if not isinstance(source, type):
            where = of_file(source)
        elif (file := file_of_class(source)) is not None:
            where = of_class(source, file)
        else:
            return _of_session(name, source, changes)
        return Prepared([model_of(name, where, minimal(name), None, 1, changes)], None)
    if source is not None:
        directory = ModelDirectory(source)
    elif repository is None:
        raise ModelNotFound(
            f"model '{name}': the runtime has no repository; give a directory, file or class"
        )
    else:
        directory = repository.find(name)
    return Prepared(_versions(wanted, directory, changes, locate, limits), None)


def _of_session(name: str, model_class: type, changes: Mapping[str, Any]) -> Prepared:
    """Write a class of a session into a file, with everything that it uses from the session."""
    if problem := name_problem(name):
        raise RepositoryError(problem)
    content = source_of(model_class).encode()
    file_name = f"{model_class.__name__}.py"
    made = model_files.write_directory(name, {file_name: content})
    try:
        where = of_class(model_class, made / name / file_name)
        model = model_of(name, replace(where, is_directory=True), minimal(name), None, 1, changes)
    except BaseException:
        model_files.remove(made)
        raise
    return Prepared([model], hashlib.sha256(content).digest(), made)


def _of_files(
    wanted: Wanted, changes: Mapping[str, Any], locate: Locate, limits: ConfigLimits
) -> Prepared:
    if problem := name_problem(wanted.name):
        raise RepositoryError(problem)
    files = dict(wanted.files or {})
    made = model_files.write_directory(wanted.name, files)
    try:
        models = _versions(wanted, ModelDirectory(made / wanted.name), changes, locate, limits)
    except BaseException:
        model_files.remove(made)
        raise
    digest = {name: hashlib.sha256(content).digest() for name, content in files.items()}
    return Prepared(models, digest, made)


def _versions(
    wanted: Wanted,
    directory: ModelDirectory,
    changes: Mapping[str, Any],
    locate: Locate,
    limits: ConfigLimits,
) -> list[Model]:
    limits.check(changes, Source())
    raw, source = _read(wanted, directory, changes, limits)
    config = ModelConfig.from_dict(_merged(wanted.name, raw, changes), source=source, partial=True)
    shared = locate(config)
    if shared is not None:
        # As Triton does; models can see it in their configuration.
        changes = {**changes, "runtime": shared.name}
    models = []
    versions = directory.chosen_versions(config)
    limits.check_versions(len(versions), config.source)
    for version in versions:
        folder = directory.version_directory(version)
        if config.backend == PYTHON_BACKEND:
            file = directory.model_file(version, config.default_model_filename)
            kind = of_file(file).kind
        else:
            # What else a version must have, its backend knows.
            file, kind = shared or folder / config.default_model_filename, "triton"
        where = ModelSource(kind, file, None, directory.path, folder, is_directory=True)
        models.append(model_of(wanted.name, where, raw, source, version, changes))
        if wanted.asker is not None:
            check_not_looser(models[-1], wanted.asker)
    return models


def _read(
    wanted: Wanted, directory: ModelDirectory, changes: Mapping[str, Any], limits: ConfigLimits
) -> tuple[Raw, Source | None]:
    """The configuration before the changes, and where its lines are."""
    if wanted.is_whole:
        backend = changes.get("backend") or directory.implied_backend() or PYTHON_BACKEND
        return minimal(wanted.name, str(backend)), None
    return directory.read_config(limits)


def model_of(
    name: str,
    where: ModelSource,
    raw: Mapping[str, Any],
    source: Source | None,
    version: int,
    changes: Mapping[str, Any],
) -> Model:
    """One version of a model. Raises `ConfigError`."""
    config = ModelConfig.from_dict(_merged(name, raw, changes), source=source, partial=True)
    return Model(config, ModelOptions.from_parameters(config), version, where)


def _merged(name: str, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**raw, **changes, "name": name}
    batching = merged.get("dynamic_batching")
    if batching and batching.get("preferred_batch_size") == [raw["max_batch_size"]]:
        # No more than what the directory's own maximum implied; another maximum implies another.
        merged["dynamic_batching"] = {**batching, "preferred_batch_size": []}
    return merged
