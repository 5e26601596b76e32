"""What a model may ask of the runtime about other models, with Triton's rules and texts."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.config import ConfigError
from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.errors import (
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ModelUnavailable,
    RuntimeClosed,
)
from moonpool.runtime.loading import Wanted
from moonpool.runtime.model_statuses import with_code
from moonpool.runtime.repository import NoVersion, RepositoryError
from moonpool.runtime.sandbox.grants import check_may_ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from moonpool.runtime.backend import Model
    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.model_registry import ModelRegistry

_FILE = "file:"


class ModelControl:
    """The runtime as one model sees it. Any thread may call any method; only `load` waits."""

    def __init__(self, registry: ModelRegistry, asker: Model) -> None:
        self._registry = registry
        self.asker = asker

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """A model version, the latest by default. Raises `ModelNotFound`, `ModelUnavailable`, `NotGranted`."""
        check_may_ask(self.asker, name)
        return self._registry.find(name, version)

    def check_may_load(self, name: str) -> None:
        """Raise the `MoonpoolError` of `load` if the model may not load `name` at all, whatever it brings."""
        self._registry.check_controllable()
        check_may_ask(self.asker, name)

    def load(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Load or reload a model, and return when it is ready.

        `config` is a whole configuration in JSON, "" the one in the repository. `files` has contents by
        `file:<path>`, and they are the model's directory then. Raises `MoonpoolError` in Triton's words.
        """
        self.check_may_load(name)
        with loading(name):
            limits = self._registry.rules.limits
            wanted = wanted_of(name, config, files, self.asker.options, limits)
            self._registry.load(wanted, self.asker.name)

    def begin_unload(self, name: str) -> None:
        """Unload a model in the background, also the one that asks. A model that is not loaded is no error."""
        self._registry.check_controllable()
        if name != self.asker.name:
            check_may_ask(self.asker, name)
        self._registry.begin_unload(name)

    def ask_ready(self, name: str, version: str, answer: Callable[[bool], object]) -> None:
        """Tell whether a request to this model could run now, and it says itself that it is ready.

        `answer` is called once, within seconds, on any thread, and must not block; with False for models that
        are not loaded. An empty version is the latest. Raises `InvalidRequest` for one that is none.
        """
        number = version_of(version)
        check_may_ask(self.asker, name)
        try:
            hosted = self._registry.find(name, number)
        except MoonpoolError:
            answer(False)
        else:
            hosted.ask_ready(lambda reason: answer(reason is None))


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Inside, errors of a load become `LoadFailed` in Triton's words, and with its codes."""
    try:
        yield
    except (RuntimeClosed, ModelUnavailable):
        raise
    except MoonpoolError as error:
        code = "INVALID_ARG"
        if isinstance(error, NoVersion):
            what = f"load failed for model '{name}': {error}\n"
        elif isinstance(error, RepositoryError | ConfigError | ModelNotFound):
            what = f"failed to load '{name}', failed to poll from model repository: {error}"
            code = "INTERNAL"
        else:
            version = getattr(error, "version", None)
            where = "" if version is None else f"version {version} is at UNAVAILABLE state: "
            what = f"load failed for model '{name}': {where}{with_code(error)};\n"
        failure = LoadFailed(what)
        failure.code = code
        raise failure from error


def wanted_of(
    name: str,
    config: str,
    files: Mapping[str, bytes] | None,
    asker: ModelOptions | None = None,
    limits: ConfigLimits | None = None,
) -> Wanted:
    """What is asked for with `load_model`, by a model or a client. Raises `RepositoryError` for what makes no sense.

    `config` is a whole configuration in JSON, `files` are contents by `file:<path>`, `asker` as in `Wanted`. A
    configuration beyond `limits`, the usual ones if not given, is not parsed: `ConfigError`.
    """
    if not config:
        if files:
            raise RepositoryError(
                "Load parameter 'config' must be specified for model file override"
            )
        return Wanted(name)
    (limits or ConfigLimits()).check_size(len(config.encode(errors="replace")))
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise RepositoryError(f"Invalid config override: {error}") from error
    if not isinstance(parsed, dict):
        raise RepositoryError("Invalid config override: it is no JSON object")
    own_name = parsed.get("name") or name
    if own_name != name:
        what = f"unexpected directory name '{name}' for model '{own_name!s:.80}'"
        raise RepositoryError(f"{what}, directory name must equal model name")
    # No files are not a directory without any.
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
            raise RepositoryError(
                f"Invalid file parameter '{key[:200]}': the file '{path[:200]}' is there twice."
            )
        by_path[path] = content
    return by_path


def version_of(text: str) -> int | None:
    """What C's `stol` makes of a version, as Triton reads it; None for the latest. Raises `InvalidRequest`."""
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
