"""Makes a model of moonpool's from tritonserver's description of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.messages import beginning
from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation.public_text import scrubbed
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import MODEL_FILENAME, ModelConfig, Source
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.config.schema import MESSAGES
from moonpool.runtime.model.config.source import ConfigError
from moonpool.runtime.model.source import ModelSource, of_file
from moonpool.runtime.process.files import check_no_loop, parsed_object
from moonpool.runtime.process.terminal import harmless, one_line
from moonpool.runtime.repository.grants import Grants, quoted
from moonpool.runtime.repository.loading import HostingRules
from moonpool.runtime.stubs.output import Budget
from moonpool.runtime.stubs.start_message import COMPLETABLE, SCHEDULERS, input_names, output_names
from moonpool.runtime.triton.notes import AS_IT_IS, MAX_BYTES

_log = RuntimeLog("moonpool")
# The most lines of an error that is logged, and the most characters of each.
_MOST_LINES, _MOST_CHARACTERS = 100, 8192
# Options without effect, because only the server could act on them: of all models, and of those that keep state
# between the requests of a sequence.
_WITHOUT_EFFECT = ("retry", "as_cpu")
_WITHOUT_EFFECT_IN_SEQUENCES = ("recycle_requests", "recycle_rss_bytes")


def rules_of(backend: str, backend_config: str) -> HostingRules:
    """Read options such as `--backend-config=python,sandbox=strict`. Raises `ConfigError`.

    `backend_config` is the JSON text of TRITONBACKEND_BackendConfig. Its other options are ignored.
    """
    options = _object(backend_config, "the configuration of the backend").get("cmdline", {})
    level = options.get("sandbox")
    if level is not None and level not in LEVELS:
        raise ConfigError(f"must be one of {', '.join(LEVELS)}, not {level!r:.80}", field="--backend-config sandbox")
    granted = str(options.get("sandbox-grants", ""))
    # The values of single grants have commas.
    texts = granted.split(";" if ":" in granted else ",")
    usual = ConfigLimits(option=f"--backend-config={backend},config-limits={{}}")
    try:
        raised = str(options.get("config-limits", "")).split(",")
        limits = usual.raised(filter(None, raised))
    except ValueError as error:
        raise ConfigError(str(error), field="--backend-config config-limits") from error
    try:
        grants = Grants(filter(None, texts))
    except ValueError as error:
        raise ConfigError(str(error), field="--backend-config sandbox-grants") from error
    return HostingRules(
        sandbox=level,
        grants=grants,
        grant_form=lambda text: f"--backend-config={backend},sandbox-grants={quoted(text)}",
        limits=limits,
    )


class ServedModel:
    """A version of a model, and the server's configuration of it."""

    def __init__(
        self, name: str, version: int, directory: str, config: str, backend_directory: str, limits: ConfigLimits
    ) -> None:
        """`config` is the JSON text of TRITONBACKEND_ModelConfig. Raises `ConfigError`, `LoadFailed`,
        `RepositoryError`.
        """
        limits.check_size(len(config))
        self._given = _object(config, f"the configuration of model '{name}'")
        limits.check(self._given, Source())
        known = _known("ModelConfig", self._given, "")
        checked = ModelConfig.from_dict({**known, "name": name}, partial=True, has_states=True, has_agents=True)
        source = _source(checked, Path(directory), version, Path(backend_directory))
        self.model = Model(checked, ModelOptions.from_parameters(checked), version, source)
        self._before = checked.raw
        self._budget = Budget(self.model.options.log_lines_per_s)

    def scrubbed(self, text: str) -> str:
        """Return the part of a model's error text that clients may see. If that is not all, log the whole text.

        The budget of lines for the log holds here, too. For one thread.
        """
        public = scrubbed(text)
        if public == text:
            return public
        lines, dropped = text.splitlines()[:_MOST_LINES], self._budget.dropped
        if self._budget.spend(len(lines)):
            if dropped:
                self._budget.dropped = 0
                _log.warning("model '%s': %d errors were left out here", self.model.name, dropped)
            for line in lines:
                _log.error("model '%s': %s", self.model.name, harmless(line[:_MOST_CHARACTERS]))
        return public

    def completed(self) -> str | None:
        """Return the completed configuration for TRITONBACKEND_ModelSetConfig; None if nothing has changed."""
        after = self.model.config.raw
        changes = {
            name: after[name] for name in (*COMPLETABLE, *SCHEDULERS) if after.get(name) != self._before.get(name)
        }
        if not changes:
            return None
        return json.dumps({**self._given, **changes}, ensure_ascii=False)

    def facts(self) -> tuple[Any, ...]:
        """Return the fields of MODEL_READY after the number."""
        config, options = self.model.config, self.model.options
        sequences = config.sequence_batching
        is_private = is_contained(options.sandbox)
        return (
            self.completed(),
            sequences is not None and sequences.is_iterative,
            config.max_batch_size,
            input_names(config),
            output_names(config),
            _milliseconds(options.execute_timeout_s),
            is_private,
            options.log_lines_per_s,
            None if sequences is not None else options.recycle_requests,
            list(options.sandbox_models) if is_private else None,
            config.decoupled,
        )

    def warn(self) -> None:
        """Log the model's options that have no effect here."""
        usual = ModelOptions()
        has_sequences = self.model.config.sequence_batching is not None
        for attribute in _WITHOUT_EFFECT + _WITHOUT_EFFECT_IN_SEQUENCES * has_sequences:
            if getattr(self.model.options, attribute) != getattr(usual, attribute):
                option = f"MOONPOOL_{attribute.upper()}"
                _log.warning("model '%s': %s has no effect in Triton", self.model.name, option)


def refusal(failure: MoonpoolError, subject: str, model: Model | None) -> str:
    """Log the traceback of a load that failed, and return the error for the server, which logs it.

    Triton's own backend logs all lines of an error, and so does this for a model that is not contained. A contained
    model could forge lines of the server's log that way, so it gets one line. So does a model that is not known yet
    (None).
    """
    is_trusted = model is not None and not is_contained(model.options.sandbox)
    if isinstance(failure, LoadFailed) and failure.traceback:
        extra = AS_IT_IS if is_trusted else None
        _log.error("%s %s\n%s", subject, failure, failure.traceback, extra=extra)
    return str(failure) if is_trusted else beginning(one_line(str(failure)), MAX_BYTES)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, int(seconds * 1000))


def _source(config: ModelConfig, directory: Path, version: int, backend: Path) -> ModelSource:
    folder = directory / str(version)
    for each in (directory, folder):
        check_no_loop(each, f"model '{config.name}'")
    runtime = config.raw["runtime"]
    if runtime.endswith(".py"):
        # The backend is a Python file, which serves all models that name it.
        file = backend / runtime
        if not file.is_file():
            raise LoadFailed(f"Python backend file not found in '{file}'", stage="find")
        return ModelSource("triton", file, None, directory, folder, is_directory=True)
    file = folder / (config.default_model_filename or MODEL_FILENAME)
    return of_file(file).within(directory, folder)


def _object(text: str, subject: str) -> dict[str, Any]:
    try:
        return parsed_object(text or "{}", subject)
    except ValueError as error:
        raise LoadFailed(str(error), stage="config") from error


def _known(kind: str, message: Any, path: str) -> Any:
    """Leave out fields that only a newer server knows, and log those that are set."""
    if not isinstance(message, dict):
        return message  # the check of the configuration will refuse it
    schema = MESSAGES[kind]
    known: dict[str, Any] = {}
    for name, value in message.items():
        if name not in schema:
            if value:
                _log.warning("moonpool does not know %s%s in the configuration of a model", path, name)
            continue
        known[name] = _known_items(schema[name], value, f"{path}{name}.")
    return known


def _known_items(type_: str, value: Any, path: str) -> Any:
    inner = type_.rpartition("}")[2].rstrip("*?")
    if inner not in MESSAGES:
        return value
    if isinstance(value, list):
        return [_known(inner, item, path) for item in value]
    if type_.startswith("{") and isinstance(value, dict):
        return {key: _known(inner, item, path) for key, item in value.items()}
    return _known(inner, value, path)
