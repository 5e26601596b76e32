"""Load a model for a test, from its directory, file or class."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import moonpool_pytest
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.hosting.backends import BackendDirectory
from moonpool.runtime.model.backend import Model as Description
from moonpool.runtime.model.config.model import PYTHON_BACKEND, ModelConfig, minimal
from moonpool.runtime.model.source import ModelSource, file_of_class
from moonpool.runtime.repository.loading import Wanted, model_of, prepare
from moonpool.runtime.runtime import Runtime
from moonpool.stub.loader import CLASS_NAME
from moonpool.testing.host import RecordingHost, Target
from moonpool.testing.in_process import InProcessModel
from moonpool.testing.in_stub import StubModel
from moonpool.testing.metrics import Metrics

Source = str | os.PathLike[str] | type


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
    loaded for tests, or the source of another one, which sees the same `models`. `backend_directory` is as in `Runtime`.
    `timeout_s` is the time to wait for responses after `execute` has returned. With `checks_outputs`, outputs of
    another name, datatype or shape than the configuration's raise `BadOutput`.

    Raises `LoadFailed` (caused by what the model raised), `ConfigError`, `RepositoryError`, `ModelNotFound`.
    """
    targets: dict[str, Target] = {}
    metrics = Metrics()
    backends = BackendDirectory(backend_directory)

    def in_process(source: Source, name: str, config: Mapping[str, Any]) -> InProcessModel:
        return InProcessModel(
            _description(source, name, config, backends),
            source if isinstance(source, type) else None,
            RecordingHost(targets, models or {}, metrics),
            timeout_s,
            backend_dir=backends.python_folder(),
            checks_outputs=checks_outputs,
        )

    with contextlib.ExitStack() as stack:
        for other, target in (models or {}).items():
            if isinstance(target, (str, os.PathLike)):
                target = in_process(target, other, {})
                stack.callback(target.close)
            targets[other] = target
        model = in_process(source, name or _name_of(source), _changes(config, version))
        model.on_close(stack.pop_all().close)
    return model


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
    runtime = Runtime(backend_directory=backend_directory)
    try:
        for other, target in (models or {}).items():
            if not isinstance(target, (str, os.PathLike)):
                raise LoadFailed(
                    f"model '{other}' is no directory or file, and a stub cannot reach what is in the "
                    "test's own process; `load` can",
                    stage="find",
                )
            runtime.load(other, target)
        chosen = name or _name_of(source)
        runtime.load(chosen, source, config=_changes(config, version))
        return StubModel(runtime, chosen, timeout_s, checks_outputs=checks_outputs)
    except BaseException:
        runtime.close()
        raise


def _name_of(source: Source) -> str:
    if isinstance(source, type):
        return source.__name__
    return Path(os.path.abspath(source)).stem


def _changes(config: Mapping[str, Any] | None, version: int | None) -> dict[str, Any]:
    changes = dict(config or {})
    if version is not None:
        changes["version_policy"] = {"specific": {"versions": [version]}}
    return changes


def _description(
    source: Source, name: str, config: Mapping[str, Any], backends: BackendDirectory
) -> Description:
    def locate(found: ModelConfig) -> Path | None:
        if found.backend == PYTHON_BACKEND:
            return None
        return backends.find(found.backend, found.raw["runtime"], [PYTHON_BACKEND])

    if isinstance(source, type):
        return _of_class(source, name, config)
    return prepare(Wanted(name, source, config=config), None, locate).models[-1]


def _of_class(model_class: type, name: str, config: Mapping[str, Any]) -> Description:
    """Describe any class. It is not imported again, so it may have been made in a function."""
    file = file_of_class(model_class) or Path(os.path.abspath(model_class.__name__))
    is_tritons = model_class.__name__ == CLASS_NAME or hasattr(model_class, "execute")
    kind = "triton" if is_tritons else "native"
    source = ModelSource(kind, file, model_class.__qualname__, file.parent, file.parent)
    return model_of(name, source, minimal(name), None, 1, config)


@contextlib.contextmanager
def utilities() -> Iterator[None]:
    """Let `import triton_python_backend_utils` and `import c_python_backend_utils` work inside.

    Use it in programs and in test frameworks other than pytest, for which a plug-in does this. If a module of one of these
    names can be imported anyway, as in Triton's own stub, that module is used. Afterwards the names are gone, but
    modules that were imported stay valid. Only one thread at a time may use it.
    """
    uninstall = moonpool_pytest.install()
    try:
        yield
    finally:
        uninstall()
