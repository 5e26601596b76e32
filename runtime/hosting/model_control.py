"""The requests of models and clients about other models: load, unload, readiness, with Triton's rules and texts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.ensemble.graph import Unfit
from moonpool.runtime.errors import InvalidRequest, LoadFailed, ModelNotFound, ModelUnavailable, RuntimeClosed
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.model_statuses import with_code
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import ConfigError, ModelConfig
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.process.files import parsed_json
from moonpool.runtime.repository.grants import check_may_ask
from moonpool.runtime.repository.loading import HostingRules, Wanted
from moonpool.runtime.repository.repository import NoVersion, RepositoryError
from moonpool.runtime.residency.residents import Residency

# Triton's words, which it has for a server that polls and for one that changes no models.
POLLED = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"


class Registry(Protocol):
    """The registry of models, which makes a `ModelControl` for each model."""

    rules: HostingRules
    residency: Residency

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """Return a model version."""

    def check_controllable(self) -> None:
        """Raise `ModelUnavailable` if models may not load and unload."""

    def load(self, wanted: Wanted, asker: str | None = None, *, may: Callable[[str], object]) -> None:
        """Load or reload a model, and others with it for which `may` does not raise."""

    def begin_unload(self, name: str, *, may: Callable[[str], object], with_members: bool = False) -> None:
        """Unload a model in the background, and others with it for which `may` does not raise."""


class ModelControl:
    """The other models of a runtime, as far as one model may use them. Any thread may call any method; only `load`
    waits.
    """

    def __init__(self, registry: Registry, asker: Model) -> None:
        self._registry = registry
        self.asker = asker
        # The models that it has asked. What it may ask for never changes.
        self._asked: set[str] = set()

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """Return a model version, the latest by default. Raises `ModelNotFound`, `ModelUnavailable`, `NotGranted`."""
        if name in self._asked:
            return self._registry.find(name, version)
        check_may_ask(self.asker, name)
        found = self._registry.find(name, version)
        # Only of models that there are, as a model may ask for names without end.
        self._registry.residency.asks(self.asker.name, name)
        self._asked.add(name)
        return found

    def check_may_load(self, name: str) -> None:
        """Raise the `MoonpoolError` of `load` if the model may not load `name` at all, whatever it brings."""
        self._registry.check_controllable()
        check_may_ask(self.asker, name)

    def load(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Load or reload a model, and return when it is ready.

        `config` is a whole configuration in JSON; "" stands for the one in the repository. `files` has contents by
        `file:<path>`, which then make the model's directory. Raises `MoonpoolError` with Triton's texts.
        """
        self.check_may_load(name)
        with loading(name):
            limits = self._registry.rules.limits
            wanted = wanted_of(name, config, files, self.asker.options, limits)
            # An ensemble asks the models of its steps, and must not ask more for this model than it may ask itself.
            for member in _members_of(wanted):
                check_may_ask(self.asker, member)
            self._registry.load(wanted, self.asker.name, may=self._check_may_change)

    def begin_unload(self, name: str, *, with_members: bool = False) -> None:
        """Unload a model in the background, which may be the asking one. A model that is not loaded is no error.

        `with_members` is as in `ModelRegistry`.
        """
        self._registry.check_controllable()
        self._check_may_change(name)
        self._registry.begin_unload(name, may=self._check_may_change, with_members=with_members)

    def _check_may_change(self, name: str) -> None:
        """Raise `NotGranted` unless the model may unload another one, or load it because of a third one. It may unload
        itself.
        """
        if name != self.asker.name:
            check_may_ask(self.asker, name)

    def ask_ready(self, name: str, version: str, answer: Callable[[bool], object]) -> None:
        """Ask whether a request to a model could run now, and the model itself says that it is ready.

        `answer` is called once, within seconds, on any thread, and must not block. It gets False for models that are
        not loaded. An empty version is the latest. Raises `InvalidRequest` for a text that is no version.
        """
        number = version_of(version)
        check_may_ask(self.asker, name)
        try:
            hosted = self._registry.find(name, number)
        except MoonpoolError:
            answer(False)
        else:
            hosted.ask_ready(lambda reason: answer(reason is None))


def _members_of(wanted: Wanted) -> list[str]:
    """Return the models in the steps of an ensemble whose configuration comes with the load."""
    if not wanted.config or "ensemble_scheduling" not in wanted.config:
        return []
    ensemble = ModelConfig.from_dict({**wanted.config, "name": wanted.name}).ensemble
    return [] if ensemble is None else ensemble.models


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn errors of a load inside into `LoadFailed`, with Triton's texts and codes."""
    try:
        yield
    except (RuntimeClosed, ModelUnavailable):
        raise
    except MoonpoolError as error:
        failure = LoadFailed(_of_load(name, error, str(error)))
        is_of_files = isinstance(error, _OF_FILES) and not isinstance(error, NoVersion)
        failure.is_confined = getattr(error, "is_confined", True)
        failure.code = "INTERNAL" if is_of_files else "INVALID_ARG"
        if error.public_message is not None:
            failure.public_message = _of_load(name, error, error.public_message)
        raise failure from error


# Errors that Triton has before it begins to load.
_OF_FILES = (RepositoryError, ConfigError, ModelNotFound)


def _of_load(name: str, error: MoonpoolError, text: str) -> str:
    """Return Triton's text for a load that ended with an error of this text."""
    if isinstance(error, NoVersion | Unfit):
        return f"load failed for model '{name}': {text}\n"
    if isinstance(error, _OF_FILES):
        return f"failed to load '{name}', failed to poll from model repository: {text}"
    version = getattr(error, "version", None)
    where = "" if version is None else f"version {version} is at UNAVAILABLE state: "
    return f"load failed for model '{name}': {where}{with_code(error, text)};\n"


def wanted_of(
    name: str,
    config: str,
    files: Mapping[str, bytes] | None,
    asker: ModelOptions | None = None,
    limits: ConfigLimits | None = None,
) -> Wanted:
    """Describe the load that a model or a client asks for with `load_model`.

    `config` is a whole configuration in JSON, `files` are contents by `file:<path>`, `asker` is as in `Wanted`. Raises
    `RepositoryError` if they do not fit together, and `ConfigError`, before it is parsed, for a configuration beyond
    `limits` (the usual ones if not given).
    """
    if not config:
        if files:
            raise RepositoryError("Load parameter 'config' must be specified for model file override")
        return Wanted(name)
    (limits or ConfigLimits()).check_size(len(config.encode(errors="replace")))
    try:
        parsed = parsed_json(config)
    except ValueError as error:
        raise RepositoryError(f"Invalid config override: {error}") from error
    if not isinstance(parsed, dict):
        raise RepositoryError("Invalid config override: it is not a JSON object")
    own_name = parsed.get("name") or name
    if own_name != name:
        what = f"unexpected directory name '{name}' for model '{own_name!s:.80}'"
        raise RepositoryError(f"{what}, directory name must equal model name")
    # Without files, the directory is the repository's, and not an empty one.
    by_path = _by_path(files or {}) or None
    return Wanted(name, None, None, parsed, by_path, is_whole=True, asker=asker)


def _by_path(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files by their paths in the model's directory."""
    by_path: dict[str, bytes] = {}
    for key, content in files.items():
        if not key.startswith(_FILE):
            raise RepositoryError(f"Invalid file parameter '{key[:200]}' must be 'file:<path>'.")
        # As in Triton, a path that begins with a slash is one in the model's directory, too.
        path = key.removeprefix(_FILE).lstrip("/")
        if path in by_path:
            raise RepositoryError(f"Invalid file parameter '{key[:200]}': the file '{path[:200]}' is there twice.")
        by_path[path] = content
    return by_path


def version_of(text: str) -> int | None:
    """Parse a version as Triton does with C's `stol`. Returns None for the latest. Raises `InvalidRequest`."""
    if not text:
        return None
    match = re.match(r"\s*([+-]?[0-9]+)", text)
    number = 0 if match is None else int(match.group(1)[:20])
    if match is None or not -(2**63) <= number < 2**63:
        details = " (details: stol)"
    elif number < 0:
        details = ""
    else:
        return number
    raise InvalidRequest(
        f"failed to get model version from specified version string '{text}'{details}, version "
        "should be an integral value > 0"
    )
