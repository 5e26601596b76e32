"""Load a model for a test, from its directory, file or class."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import moonpool_pytest
from moonpool.runtime.arguments import check_timeout
from moonpool.runtime.ensemble.graph import Unfit
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.hosting.backends import BackendDirectory
from moonpool.runtime.hosting.ensembles import scheduling_of
from moonpool.runtime.model.backend import Model as Description
from moonpool.runtime.model.config.ensembles import EnsembleStep
from moonpool.runtime.model.config.model import PYTHON_BACKEND, ModelConfig, minimal, name_problem
from moonpool.runtime.model.config.options import OF_LOAD
from moonpool.runtime.model.source import Definition, ModelSource, file_of
from moonpool.runtime.repository.loading import Wanted, model_of, prepare
from moonpool.runtime.repository.repository import ModelRepositories
from moonpool.runtime.runtime import Runtime
from moonpool.stub.loader import CLASS_NAME
from moonpool.testing.ensemble import EnsembleModel
from moonpool.testing.host import RecordingHost, Target
from moonpool.testing.in_process import InProcessModel
from moonpool.testing.in_stub import StubModel
from moonpool.testing.metrics import Metrics
from moonpool.testing.model import LoadedModel

Source = str | os.PathLike[str] | Definition


def load(
    source: Source,
    *,
    name: str | None = None,
    version: int | None = None,
    config: Mapping[str, Any] | None = None,
    models: Mapping[str, Target | str | os.PathLike[str]] | None = None,
    backend_directory: str | os.PathLike[str] | None = None,
    timeout_s: float | None = 30.0,
    checks_outputs: bool = True,
) -> InProcessModel:
    """Load a model in this process; use it in a `with` statement.

    `source` is the model's directory, one Python file, or a class. From a directory it loads the latest version, or
    `version`. `config`, in the JSON form of `config.pbtxt`, overrides the configuration of the directory. The model is
    imported in this interpreter, whatever environment its configuration names.

    The model may send requests to `models`. Each is a function, as `RecordingHost` describes it, a model that was
    loaded for tests, or the source of another one, which sees the same `models`. `backend_directory` is as in
    `Runtime`. `timeout_s` is the time to wait for responses after `execute` has returned. With `checks_outputs`,
    outputs of another name, datatype or shape than the configuration's raise `BadOutput`.

    Raises `LoadFailed` (caused by what the model raised), `ConfigError`, `RepositoryError`, `ModelNotFound`.
    """
    model = load_any(
        source,
        name=name,
        version=version,
        config=config,
        models=models,
        backend_directory=backend_directory,
        timeout_s=timeout_s,
        checks_outputs=checks_outputs,
    )
    if isinstance(model, InProcessModel):
        return model
    model.close()
    raise LoadFailed(
        f"'{model.name}' is an ensemble: testing.load_ensemble loads it with the models of its steps", stage="find"
    )


def load_ensemble(
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    version: int | None = None,
    config: Mapping[str, Any] | None = None,
    models: Mapping[str, Target | str | os.PathLike[str]] | None = None,
    backend_directory: str | os.PathLike[str] | None = None,
    timeout_s: float | None = 30.0,
    checks_outputs: bool = True,
) -> EnsembleModel:
    """Load an ensemble in this process, with the models of its steps; use it in a `with` statement.

    `source` is its directory. The models of its steps are the directories beside it, unless `models` has others under
    their names: models that were loaded for tests, or sources. The other arguments are those of `load`.

    Raises `LoadFailed` with Triton's texts if the models do not fit together, and what `load` raises.
    """
    model = load_any(
        source,
        name=name,
        version=version,
        config=config,
        models=models,
        backend_directory=backend_directory,
        timeout_s=timeout_s,
        checks_outputs=checks_outputs,
    )
    if isinstance(model, EnsembleModel):
        return model
    model.close()
    raise LoadFailed(f"'{model.name}' is not an ensemble: testing.load loads it", stage="find")


def load_any(
    source: Source,
    *,
    name: str | None = None,
    version: int | None = None,
    config: Mapping[str, Any] | None = None,
    models: Mapping[str, Target | str | os.PathLike[str]] | None = None,
    backend_directory: str | os.PathLike[str] | None = None,
    timeout_s: float | None = 30.0,
    checks_outputs: bool = True,
) -> InProcessModel | EnsembleModel:
    """Load a model as `load` does, or an ensemble as `load_ensemble` does."""
    _check_arguments(version, config, models, timeout_s, checks_outputs)
    targets: dict[str, Target] = {}
    metrics = Metrics()
    backends = BackendDirectory(backend_directory)

    def loaded(
        source: Source, name: str, config: Mapping[str, Any], within: Sequence[str] = ()
    ) -> InProcessModel | EnsembleModel:
        description = _description(source, name, config, backends)
        if description.config.ensemble is not None and not isinstance(source, Definition):
            return ensemble(description, Path(source), (*within, name))
        return InProcessModel(
            description,
            source if isinstance(source, Definition) else None,
            RecordingHost(targets, models or {}, metrics),
            timeout_s,
            backend_dir=backends.python_folder(),
            checks_outputs=checks_outputs,
        )

    def ensemble(description: Description, folder: Path, within: Sequence[str]) -> EnsembleModel:
        found: dict[tuple[str, int | None], LoadedModel] = {}
        with contextlib.ExitStack() as stack:
            for step in scheduling_of(description.config).steps:
                if (step.model, step.version) not in found:
                    member = _given(targets, step, description.name)
                    if member is None:
                        beside = _beside(folder, step.model, within)
                        member = loaded(beside, step.model, _changes(None, step.version), within)
                        stack.callback(member.close)
                    found[step.model, step.version] = member
            made = EnsembleModel(description.config, description.version, found, checks_outputs=checks_outputs)
            made.on_close(stack.pop_all().close)
        return made

    with contextlib.ExitStack() as stack:
        for other, target in (models or {}).items():
            if isinstance(target, (str, os.PathLike)):
                target = loaded(target, other, {})
                stack.callback(target.close)
            targets[other] = target
        model = loaded(source, name or _name_of(source), _changes(config, version))
        model.on_close(stack.pop_all().close)
    return model


def _check_arguments(
    version: int | None,
    config: Mapping[str, Any] | None,
    models: Mapping[str, Any] | None,
    timeout_s: float | None,
    checks_outputs: bool,
) -> None:
    """Raise `ConfigError` or `InvalidRequest` for an argument of a wrong type or value."""
    if version is not None:
        OF_LOAD.whole("version", version, 0, also=", or None for the latest")
    if config is not None:
        OF_LOAD.map("config", config, "a map with the fields of config.pbtxt")
    if models is not None:
        for name, target in OF_LOAD.map("models", models, "a map of names to models").items():
            if not callable(target) and not isinstance(target, str | os.PathLike | LoadedModel):
                wanted = "a function, a loaded model or the source of one"
                OF_LOAD.refuse(f"models[{name}]", wanted, target)
    check_timeout(timeout_s)
    OF_LOAD.boolean("checks_outputs", checks_outputs)


def _given(targets: Mapping[str, Target], step: EnsembleStep, ensemble: str) -> LoadedModel | None:
    """Return the model that the test has for a step, None if it has none. Raises `LoadFailed` for one that cannot be a
    step.
    """
    target = targets.get(step.model)
    if target is None or isinstance(target, LoadedModel):
        if target is not None and step.version not in (None, target.version):
            raise Unfit(
                f"ensemble '{ensemble}' depends on '{step.model}' whose required version {step.version} is not loaded."
            )
        return target
    raise LoadFailed(
        f"model '{step.model}' is a step of ensemble '{ensemble}', which is checked against its configuration, and a "
        "function has none: give a class, testing.load(Class, config=...)",
        stage="find",
    )


def _beside(folder: Path, name: str, within: Sequence[str]) -> Path:
    """Return the directory of a step's model. Raises `Unfit` with Triton's texts."""
    if name in within:
        first, last = within[0], within[-1]
        raise Unfit(f"circular dependency between ensembles: {first} -> ... -> {last} -> {name}")
    if name_problem(name) or not (path := folder.absolute().parent / name).is_dir():
        raise Unfit(f"ensemble {within[-1]} contains models that are not available or ambiguous: {name}")
    return path


def load_in_stub(
    source: Source,
    *,
    name: str | None = None,
    version: int | None = None,
    config: Mapping[str, Any] | None = None,
    models: Mapping[str, str | os.PathLike[str]] | None = None,
    backend_directory: str | os.PathLike[str] | None = None,
    timeout_s: float | None = 30.0,
    checks_outputs: bool = True,
) -> StubModel:
    """Load a model like `load`, but in a stub of a runtime of its own, in the model's own environment, as it is served.

    All of `models` are sources, because a stub cannot call functions of the test. A class must be one that
    `Runtime.load` takes.
    """
    _check_arguments(version, config, models, timeout_s, checks_outputs)
    runtime = Runtime(backend_directory=backend_directory)
    try:
        for other, target in (models or {}).items():
            if not isinstance(target, (str, os.PathLike)):
                raise LoadFailed(
                    f"model '{other}' is not a directory or file, and a stub cannot reach what is in the "
                    "test's own process; `load` can",
                    stage="find",
                )
            runtime.load(other, target)
        chosen = name or _name_of(source)
        if not isinstance(source, Definition):
            backends = BackendDirectory(backend_directory)
            _load_members(runtime, source, _changes(config, version), backends, [chosen])
        runtime.load(chosen, source, config=_changes(config, version))
        return StubModel(runtime, chosen, timeout_s, checks_outputs=checks_outputs)
    except BaseException:
        runtime.close()
        raise


def _load_members(
    runtime: Runtime,
    source: str | os.PathLike[str],
    config: Mapping[str, Any],
    backends: BackendDirectory,
    within: list[str],
) -> None:
    """Load the models of an ensemble's steps that are not loaded yet; nothing for other models."""
    description = _description(source, within[-1], config, backends)
    steps = () if description.config.ensemble is None else description.config.ensemble.steps
    for step in steps:
        if step.model not in runtime.models():
            beside = _beside(Path(source), step.model, within)
            # Some steps may want the latest version, and others a certain one.
            has_wishes = any(each.version for each in steps if each.model == step.model)
            policy: dict[str, Any] = {"version_policy": {"all": {}}} if has_wishes else {}
            _load_members(runtime, beside, policy, backends, [*within, step.model])
            runtime.load(step.model, beside, config=policy)


def _name_of(source: Source) -> str:
    if isinstance(source, Definition):
        return source.__name__
    if not isinstance(source, str | os.PathLike):
        OF_LOAD.refuse("source", "a directory, a file, a class or a function", source)
    return Path(os.path.abspath(source)).stem


def _changes(config: Mapping[str, Any] | None, version: int | None) -> dict[str, Any]:
    changes = dict(config or {})
    if version is not None:
        changes["version_policy"] = {"specific": {"versions": [version]}}
    return changes


def _description(source: Source, name: str, config: Mapping[str, Any], backends: BackendDirectory) -> Description:
    def locate(found: ModelConfig) -> Path | None:
        if found.backend == PYTHON_BACKEND or found.ensemble is not None:
            return None
        return backends.find(found.backend, found.raw["runtime"], [PYTHON_BACKEND])

    if isinstance(source, Definition):
        return _of_definition(source, name, config)
    return prepare(Wanted(name, source, config=config), ModelRepositories(()), locate).models[-1]


def _of_definition(definition: Definition, name: str, config: Mapping[str, Any]) -> Description:
    """Describe any class or function. It is not imported again, so it may have been made in a function."""
    file = file_of(definition) or Path(os.path.abspath(definition.__name__))
    is_tritons = definition.__name__ == CLASS_NAME or hasattr(definition, "execute")
    kind = "triton" if is_tritons else "native"
    source = ModelSource(kind, file, definition.__qualname__, file.parent, file.parent)
    return model_of(name, source, minimal(name), None, 1, config)


@contextlib.contextmanager
def utilities() -> Iterator[None]:
    """Let `import triton_python_backend_utils` and `import c_python_backend_utils` work inside.

    Use it in programs and in test frameworks other than pytest, for which a plug-in does this. If a module of one of
    these names can be imported anyway, as in Triton's own stub, that module is used. Afterwards the names are gone, but
    modules that were imported stay valid. Only one thread at a time may use it.
    """
    uninstall = moonpool_pytest.install()
    try:
        yield
    finally:
        uninstall()
