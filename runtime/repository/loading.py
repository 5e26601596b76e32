"""Turns what a caller names (a repository's model, a directory, a file, a class, a function, files in memory) into
models ready to be hosted.

Several people have a say in a model's options, and they are trusted differently. The operator set `HostingRules` at the
start. The repository has what its owners put there, which may change at any time. A client or a model that loads
another one may bring a configuration, or files, or both. So options are merged in one order, the operator's over the
caller's over the directory's, and a level of the sandbox is only ever raised by the less trusted. Under a level that
the operator set, everything that a configuration would give its model must have been granted (`grants`), and files that
a load brings have no grants at all: the operator meant other code.

Files that a caller brings are written into a private directory, in which no path may lead out of it, and the directory
goes with the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime.errors import InvalidRequest, LoadFailed, ModelNotFound
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.ensembles import ENSEMBLE
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.live import fixed_options, fixed_part, with_count
from moonpool.runtime.model.config.model import PYTHON_BACKEND, ModelConfig, Raw, Source, minimal, name_problem
from moonpool.runtime.model.config.options import SANDBOX_KEY, HostPolicies, ModelOptions, OperatorOptions
from moonpool.runtime.model.config.schema import suggestion
from moonpool.runtime.model.config.source import part
from moonpool.runtime.model.gpus import placed
from moonpool.runtime.model.source import Definition, ModelSource, file_of, of_definition, of_file
from moonpool.runtime.process.files import DEEPEST, stamp_of
from moonpool.runtime.repository.cloud_address import is_address
from moonpool.runtime.repository.folder_cache import FolderLease
from moonpool.runtime.repository.grants import Grants, as_flag, check_not_looser, check_ungranted
from moonpool.runtime.repository.repository import (
    ModelDirectory,
    ModelRepositories,
    RepositoryError,
    configurations,
    is_version,
)
from moonpool.runtime.repository.session_source import source_of

_NO_SOURCE = "model '{}': a {} is not a source of a model: give a directory, an address, a file, a class or a function"
# Returns the file that serves all models of a backend; None if each model has its own.
Locate = Callable[[ModelConfig], Path | None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load as a caller asks for it.

    Without `source`, the model is the repository's. `files` are a whole directory, in place of the repository's.
    `config` replaces the directory's configuration field by field, with `is_whole` entirely. `asker` are the options of
    a model that asks for the load; its configuration may not give another model more than it has itself. `said` are
    parameters that the operator set, by key. They take precedence over all configurations.
    """

    name: str
    source: str | os.PathLike[str] | Definition | None = None
    instances: int | None = None
    config: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] | None = None
    is_whole: bool = False
    asker: ModelOptions | None = None
    said: Mapping[str, str] | None = None

    @property
    def brings(self) -> str:
        """Return what a client or a model brings for the load: "files" (and a configuration), "config" or ""."""
        if not self.is_whole:
            return ""
        return "config" if self.files is None else "files"


@dataclass(frozen=True, slots=True)
class HostingRules:
    """The operator's rules for all models of a runtime.

    `sandbox` is the least level of their processes, and the level of models that name none; None leaves it to the
    models. From `best-effort` on, models cannot give themselves more than the level does, except for `grants`.
    `options` are the operator's options by the names of models. They take precedence over the models' own, and
    MOONPOOL_SANDBOX among them takes the place of `sandbox`. Without `completes`, models are not asked to complete
    their configuration. `limits` are for all configurations.
    """

    sandbox: str | None = None
    completes: bool = True
    grants: Grants = field(default_factory=Grants)
    # Writes a grant in the form in which this program takes it.
    grant_form: Callable[[str], str] = as_flag
    # The sentence that says how this program gets a response cache.
    cache_advice: str = ""
    options: OperatorOptions = field(default_factory=OperatorOptions)
    limits: ConfigLimits = field(default_factory=ConfigLimits)
    # On which processors instances run, by the policy of their groups.
    host_policies: HostPolicies = field(default_factory=dict)
    # True if instances of all models share the resources that their configurations name.
    limits_rate: bool = False

    def said_of(self, wanted: Wanted) -> dict[str, str]:
        """Return the options that the operator set for a model, by its name or in the load itself. The load goes
        first.
        """
        return self.options.of(wanted.name) | dict(wanted.said or {})

    def about_none_of(self, names: Collection[str]) -> list[str]:
        """Warn of options and grants that fit none of these models, as their names may be misspelt."""
        return [
            *(
                f"options are set for model '{pattern}', and no repository has such a model{suggestion(pattern, names)}"
                for pattern in self.options.unused(names)
            ),
            *(
                f"model '{name}' is granted something, and no repository has such a model{suggestion(name, names)}"
                for name in self.grants.names()
                if name not in names
            ),
        ]

    def apply_to(self, model: Model, wanted: Wanted | None = None) -> None:
        """Apply the rules to a model that is not loaded yet. Raises `ConfigError`."""
        wanted = wanted or Wanted(model.name)
        said = self.said_of(wanted)
        model.options = replace(model.options, sandbox=self.level_of(model.config, model.options, said, wanted.brings))
        model.completes = self.completes
        model.limits = self.limits
        model.cache_advice = self.cache_advice
        model.host_policies = self.host_policies
        model.is_rate_limited = self.limits_rate
        check = partial(self._check, copy(model), said, wanted.brings, wanted.asker)
        check(model.config)
        # Links are checked at every start of an instance, as the owner of the files could change one meanwhile.
        is_free = model.name in self.grants.whole and not wanted.brings
        model.stays_inside = self._is_strange(said, wanted.brings) and not is_free
        model.check = check

    def _check(
        self, described: Model, said: Mapping[str, str], brings: str, asker: ModelOptions | None, config: ModelConfig
    ) -> None:
        """Check a configuration of a model: the one that was written, and the one that the model makes of it.

        The options are those that were `described`. Those of a model that is loaded have limits that nobody asked for.
        Raises `ConfigError`.
        """
        model = copy(described)
        model.config = config
        model.options.check(config)
        if asker is not None:
            check_not_looser(model, asker)
        if self._is_strange(said, brings):
            check_ungranted(model, self.grants, self.grant_form, said=said, brings=brings)

    def _is_strange(self, said: Mapping[str, str], brings: str) -> bool:
        """Return True if a configuration needs grants: the operator set a level that contains the model."""
        return is_contained(self.floor_of(said, brings) or "off")

    def floor_of(self, said: Mapping[str, str], brings: str = "") -> str | None:
        """Return the least level of a model with these options of the operator; None if the operator set none.

        A level below that of all models is for what the repository has. Otherwise a client that loads its own files
        under such a name, or chooses an interpreter, would run programs outside of any sandbox.
        """
        said_level = said.get(SANDBOX_KEY, self.sandbox)
        if said_level is None or self.sandbox is None or not brings:
            return said_level
        return max(said_level, self.sandbox, key=LEVELS.index)

    def level_of(self, config: ModelConfig, options: ModelOptions, said: Mapping[str, str], brings: str = "") -> str:
        """Return the level of a model's sandbox. `brings` is that of `Wanted`."""
        floor = self.floor_of(said, brings)
        if floor is None:
            return options.sandbox
        own = options.sandbox if SANDBOX_KEY in config.parameters else floor
        return max(floor, own, key=LEVELS.index)


class FixedPart(NamedTuple):
    """The part of a prepared version that its processes depend on. `files` identifies their content."""

    files: object
    options: ModelOptions
    config: Raw


class PreparedModel:
    """The versions of a model that a load starts, ascending; at least one.

    Two with equal stamps would start the same processes. Where only the fixed parts are equal (`fixed`), the processes
    of the one can go on as those of the other. Call `discard` when nobody needs the files any more.
    """

    def __init__(
        self, models: list[Model], digest: object, made: Path | None = None, lease: FolderLease | None = None
    ) -> None:
        self.models = models
        self._made, self._lease = made, lease
        self._digest = digest
        self.stamp: bytes | None = None
        # By version.
        self.fixed: dict[int, FixedPart] = {}

    def seal(self) -> None:
        """Compute the stamps, now that the models have their final options and places. They change later, as they
        load.
        """
        folders = {m.source.model_directory for m in self.models if m.source.is_directory}
        common = self._digest, self._stamps(folders if self._digest is None else ())
        for model in self.models:
            source, options = model.source, fixed_options(model.options)
            files = common, source.class_name, self._stamps([source.file])
            self.fixed[model.version] = FixedPart(files, options, fixed_part(model.config.raw))
        models = [(model.version, model.config.raw, model.options) for model in self.models]
        self.stamp = _stamp((list(self.fixed.items()), models))

    def _stamps(self, paths: Iterable[Path]) -> list[bytes]:
        return [
            # The configuration counts by its content, which is in the stamp anyway.
            stamp_of(path, is_version, without=configurations(path))
            for path in sorted(paths)
            if not self._is_made(path)
        ]

    @property
    def is_made(self) -> bool:
        """True if a directory was made for this model alone."""
        return self._made is not None

    def _is_made(self, path: Path) -> bool:
        return self._made is not None and path.is_relative_to(self._made)

    def discard(self) -> None:
        """Remove the directory that was made for this model alone, if one was, or allow the cache to remove its
        copy.
        """
        if self._made is not None:
            _remove(self._made)
        if self._lease is not None:
            self._lease.release()


def _stamp(value: object) -> bytes:
    """Return a digest, which is kept of each model that was ever loaded. Two values that are equal have equal ones."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def prepare(
    wanted: Wanted, repository: ModelRepositories, locate: Locate, rules: HostingRules | None = None
) -> PreparedModel:
    """Find and read a model. Starts nothing.

    Raises `ModelNotFound`, `RepositoryError`, `ConfigError`, `LoadFailed`.
    """
    rules = rules or HostingRules()
    prepared = describe(wanted, repository, locate, rules)
    try:
        place(prepared.models, rules)
        prepared.seal()
    except BaseException:
        prepared.discard()
        raise
    return prepared


def place(models: Sequence[Model], rules: HostingRules) -> None:
    """Place the instances of the versions of a model on this machine. Raises `ConfigError`."""
    for model in models:
        model.config = _scaled(placed(model), model.options, rules.limits, len(models))
    config = models[0].config
    rules.limits.check_instances(config.instance_groups, len(models), config.source)


def describe(wanted: Wanted, repository: ModelRepositories, locate: Locate, rules: HostingRules) -> PreparedModel:
    """Find and read a model that another machine may load: its instances have no places on this one's GPUs yet.

    Raises as `prepare`.
    """
    wanted = replace(wanted, said=rules.said_of(wanted))
    prepared = _prepare(wanted, repository, locate, rules.limits)
    try:
        for model in prepared.models:
            rules.apply_to(model, wanted)
            model.withheld = repository.secrets
    except BaseException:
        prepared.discard()
        raise
    return prepared


def _scaled(config: ModelConfig, options: ModelOptions, limits: ConfigLimits, versions: int) -> ModelConfig:
    """Return the configuration with the least number of instances, if that follows the load. Raises `ConfigError`."""
    if options.instances is None:
        return config
    least, most = options.instances
    try:
        limits.check_instances(with_count(config, most).instance_groups, versions, config.source)
        return with_count(config, least)
    except InvalidRequest as error:
        raise config.source.error("parameters[MOONPOOL_INSTANCES]", str(error)) from None


def _prepare(wanted: Wanted, repository: ModelRepositories, locate: Locate, limits: ConfigLimits) -> PreparedModel:
    name, source = wanted.name, wanted.source
    if source is not None and wanted.files is not None:
        raise RepositoryError(f"model '{name}': give a source or files, not both")
    changes = _changes(wanted)
    if wanted.instances is not None:
        changes["instance_group"] = [{"kind": "KIND_AUTO", "count": wanted.instances}]
    if wanted.files is not None:
        return _brought(
            name, wanted.files, lambda folder: _versions(wanted, ModelDirectory(folder), changes, locate, limits)
        )
    if isinstance(source, str) and is_address(source):
        directory = repository.find_at(source, wanted.said)
    elif source is not None and not isinstance(source, str | os.PathLike | Definition):
        raise LoadFailed(_NO_SOURCE.format(name, type(source).__name__), stage="find")
    elif isinstance(source, Definition) or (source is not None and not Path(source).is_dir()):
        limits.check(changes, Source())
        if not isinstance(source, Definition):
            where = of_file(source)
        elif (file := file_of(source)) is not None:
            where = of_definition(source, file)
        else:
            return _of_session(name, source, changes)
        return PreparedModel([model_of(name, where, minimal(name), None, 1, changes)], None)
    elif source is not None:
        directory = ModelDirectory(source)
    elif not repository:
        raise ModelNotFound(f"model '{name}': the runtime has no repository; give a directory, address, file or class")
    else:
        directory = repository.find(name, wanted.said)
    models = _versions(wanted, directory, changes, locate, limits)
    return PreparedModel(models, None, lease=directory.lease)


def _changes(wanted: Wanted) -> dict[str, Any]:
    """Return the changes to the directory's configuration: those of the caller, and over them those of the operator."""
    changes = dict(wanted.config or {})
    parameters = changes.get("parameters")
    if isinstance(parameters, Mapping) and not wanted.is_whole:
        changes["parameters"] = {key: _wrapped(value) for key, value in parameters.items()}
    # The level is the least that the model may have, and not what it asks for: `HostingRules.level_of`.
    said = {key: _wrapped(text) for key, text in (wanted.said or {}).items() if key != SANDBOX_KEY}
    if said and (parameters is None or isinstance(parameters, Mapping)):
        changes["parameters"] = {**(changes.get("parameters") or {}), **said}
    return changes


def _wrapped(value: object) -> object:
    """Return a parameter in the JSON form of a configuration. Programs may give plain texts."""
    return {"string_value": value} if isinstance(value, str) else value


def _of_session(name: str, definition: Definition, changes: Mapping[str, Any]) -> PreparedModel:
    """Prepare a class or function of a session from a file, with everything that it uses from the session."""
    file_name = f"{definition.__name__}.py"

    def describe(folder: Path) -> list[Model]:
        where = replace(of_definition(definition, folder / file_name), is_directory=True)
        return [model_of(name, where, minimal(name), None, 1, changes)]

    return _brought(name, {file_name: source_of(definition).encode()}, describe)


def _brought(name: str, files: Mapping[str, bytes], describe: Callable[[Path], list[Model]]) -> PreparedModel:
    """Prepare the models that `describe` makes of files, which are written into a directory of their own.

    No other user may look into it. Raises `RepositoryError` for a path that leads out of it, and for too many files.
    """
    if problem := name_problem(name):
        raise RepositoryError(problem)
    if len(files) > _MOST_FILES:
        raise RepositoryError(f"a load has {_MOST_FILES} files at most, not {len(files)}")
    for path in files:
        _check_path(path)
    made = Path(tempfile.mkdtemp(prefix="moonpool-model-"))
    try:
        _write(made / name, files)
        models = describe(made / name)
    except BaseException:
        _remove(made)
        raise
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    content = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    for model in models:
        model.source = replace(model.source, content=content)
    return PreparedModel(models, digests, made)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    try:
        folder.mkdir()
        for path, content in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    except (OSError, ValueError) as error:
        raise RepositoryError(f"cannot write the model's files: {error}") from error


def _versions(
    wanted: Wanted, directory: ModelDirectory, changes: Mapping[str, Any], locate: Locate, limits: ConfigLimits
) -> list[Model]:
    limits.check(changes, Source())
    raw, source = _read(wanted, directory, changes, limits)
    config = ModelConfig.from_dict(_merged(wanted.name, raw, changes), source=source, partial=True)
    shared = None
    if config.backend:
        with part():
            shared = locate(config)
    if shared is not None:
        # Triton sets it, and models can see it in their configuration.
        changes = {**changes, "runtime": shared.name}
    models = []
    versions = []
    with part():
        versions = directory.chosen_versions(config)
    limits.check_versions(len(versions), config.source)
    # Where all mistakes are collected, the rest of the configuration is read also without a version.
    for version in versions or [1]:
        folder = directory.version_directory(version)
        # The backend knows which files a version must have.
        file = shared or folder / config.default_model_filename
        where = ModelSource("triton", file, None, folder, folder) if shared is None else of_file(shared)
        if config.backend == PYTHON_BACKEND and versions:
            with part():
                where = of_file(directory.model_file(version, config.default_model_filename))
        where = where.within(directory.path, folder)
        models.append(model_of(wanted.name, where, raw, source, version, changes))
    return models


def _read(
    wanted: Wanted, directory: ModelDirectory, changes: Mapping[str, Any], limits: ConfigLimits
) -> tuple[Raw, Source | None]:
    """Return the configuration before the changes, and its source."""
    if wanted.is_whole:
        backend = changes.get("backend") or directory.implied_backend() or PYTHON_BACKEND
        if changes.get("platform") == ENSEMBLE:
            backend = ""
        raw = minimal(wanted.name, str(backend))
        if not backend:
            del raw["optimization"]  # a default of all other models, which an ensemble may not have
        if wanted.files is None and directory.has_config:
            # A client that brings a configuration must not get the files of the repository served unchecked.
            own, _ = directory.read_config(limits)
            raw |= {k: v for k, v in own.items() if k == "model_repository_agents"}
        return raw, None
    return directory.read_config(limits)


def model_of(
    name: str,
    where: ModelSource,
    raw: Mapping[str, Any],
    source: Source | None,
    version: int,
    changes: Mapping[str, Any],
) -> Model:
    """Make one version of a model. Raises `ConfigError`."""
    config = ModelConfig.from_dict(_merged(name, raw, changes), source=source, partial=True)
    _check_labels(config, where)
    options = ModelOptions.from_parameters(config)
    return Model(config.without_gpus() if options.as_cpu else config, options, version, where)


def _check_labels(config: ModelConfig, where: ModelSource) -> None:
    """Read all files with labels, so that a load and not a classification fails for want of one. Raises
    `ConfigError`.
    """
    for index, output in enumerate(config.raw["output"]):
        if filename := output["label_filename"]:
            try:
                where.read_labels(filename)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                what = f"failed to open text file for read {where.model_directory / filename}: {why}"
                config.source.mistake(f"output[{index}].label_filename", what)


def _merged(name: str, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**raw, **changes, "name": name}
    own, changed = raw.get("parameters"), changes.get("parameters")
    if isinstance(own, Mapping) and isinstance(changed, Mapping):
        merged["parameters"] = {**own, **changed}
    own, changed = (each.get("model_repository_agents") for each in (raw, changes))
    if isinstance(own, Mapping) and isinstance(changed, Mapping):
        agents = [*(own.get("agents") or ()), *(changed.get("agents") or ())]
        merged["model_repository_agents"] = {"agents": agents}
    batching = merged.get("dynamic_batching")
    if batching and batching.get("preferred_batch_size") == [raw["max_batch_size"]]:
        # The size was only implied by the directory's own maximum. Another maximum implies another size.
        merged["dynamic_batching"] = {**batching, "preferred_batch_size": []}
    return merged


# The most bytes in a path, and the most files, that a caller may bring for a model.
_LONGEST_PATH = 1024
_MOST_FILES = 10_000


def _check_path(path: str) -> None:
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise RepositoryError(f"Invalid file parameter 'file:{path[:_LONGEST_PATH]}' must stay within model directory.")
    # Functions that make and remove directories recurse.
    if len(path.encode(errors="replace")) > _LONGEST_PATH or path.count("/") > DEEPEST:
        raise RepositoryError(
            f"Invalid file parameter 'file:{path[:80]}...': a path has {_LONGEST_PATH} bytes and {DEEPEST} folders "
            "at most"
        )


def _remove(folder: Path) -> None:
    """Remove a directory with all its contents. A missing one is no error."""
    shutil.rmtree(folder, ignore_errors=True)
