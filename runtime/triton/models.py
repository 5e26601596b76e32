"""A model as tritonserver describes it, as one of moonpool's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.ipc.texts import beginning
from moonpool.runtime.backend import Model
from moonpool.runtime.config import ConfigError, ModelConfig, Source
from moonpool.runtime.config_defaults import MODEL_FILENAME
from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.config_schema import MESSAGES
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.loading import HostingRules
from moonpool.runtime.output import Budget, harmless, one_line
from moonpool.runtime.public_text import scrubbed
from moonpool.runtime.repository_files import check_no_loop
from moonpool.runtime.source import ModelSource, of_file
from moonpool.runtime.start import input_names, output_names
from moonpool.runtime.triton.notes import AS_IT_IS, MAX_BYTES

if TYPE_CHECKING:
    from moonpool.ipc.errors import MoonpoolError

_log = logging.getLogger("moonpool")
# What a model may complete.
_COMPLETED = (
    "max_batch_size",
    "input",
    "output",
    "model_transaction_policy",
    "dynamic_batching",
    "sequence_batching",
)
# Of an error that is logged, and of each of its lines.
_MOST_LINES, _MOST_CHARACTERS = 100, 8192
# Options that the server itself would have to act on: of all models, and of those that keep something from one
# request of a sequence to the next.
_WITHOUT_EFFECT = ("retry",)
_WITHOUT_EFFECT_IN_SEQUENCES = ("recycle_requests", "recycle_rss_bytes")


def rules_of(backend: str, backend_config: str) -> HostingRules:
    """What `--backend-config=python,sandbox=strict` and its like say. Raises `ConfigError`.

    `backend_config` is the JSON text of TRITONBACKEND_BackendConfig; what it says besides is for others.
    """
    options = _object(backend_config, "the configuration of the backend").get("cmdline", {})
    level = options.get("sandbox")
    if level is not None and level not in LEVELS:
        raise ConfigError(
            f"must be one of {', '.join(LEVELS)}, not {level!r:.80}",
            field="--backend-config sandbox",
        )
    names = str(options.get("sandbox-grants", "")).split(",")
    usual = ConfigLimits(option=f"--backend-config={backend},config-limits={{}}")
    try:
        raised = str(options.get("config-limits", "")).split(",")
        limits = usual.raised(filter(None, raised))
    except ValueError as error:
        raise ConfigError(str(error), field="--backend-config config-limits") from error
    return HostingRules(
        sandbox=level,
        grants=frozenset(filter(None, names)),
        grant_option=f"--backend-config={backend},sandbox-grants=",
        limits=limits,
    )


class ServedModel:
    """A version of a model, and its configuration as the server has it."""

    def __init__(
        self,
        name: str,
        version: int,
        directory: str,
        config: str,
        backend_directory: str,
        limits: ConfigLimits,
    ) -> None:
        """`config` is the JSON text of TRITONBACKEND_ModelConfig. Raises `ConfigError`, `LoadFailed`, `RepositoryError`."""
        limits.check_size(len(config))
        self._given = _object(config, f"the configuration of model '{name}'")
        limits.check(self._given, Source())
        known = _known("ModelConfig", self._given, "")
        checked = ModelConfig.from_dict(
            {**known, "name": name}, partial=True, has_states=True, has_agents=True
        )
        source = _source(checked, Path(directory), version, Path(backend_directory))
        self.model = Model(checked, ModelOptions.from_parameters(checked), version, source)
        self._before = checked.raw
        self._budget = Budget(self.model.options.log_lines_per_s)

    def scrubbed(self, text: str) -> str:
        """What clients are told of an error in the model's own words; the log has what they are not told.

        A model that says too much is logged in part, as ever. For one thread.
        """
        told = scrubbed(text)
        if told == text:
            return told
        lines, dropped = text.splitlines()[:_MOST_LINES], self._budget.dropped
        if self._budget.spend(len(lines)):
            if dropped:
                self._budget.dropped = 0
                _log.warning("model '%s': %d errors were left out here", self.model.name, dropped)
            for line in lines:
                _log.error("model '%s': %s", self.model.name, harmless(line[:_MOST_CHARACTERS]))
        return told

    def completed(self) -> str | None:
        """The configuration with what the model has completed, for TRITONBACKEND_ModelSetConfig; None if it is as it was."""
        after = self.model.config.raw
        changes = {
            name: after[name] for name in _COMPLETED if after.get(name) != self._before.get(name)
        }
        if not changes:
            return None
        return json.dumps({**self._given, **changes}, ensure_ascii=False)

    def facts(self) -> tuple[Any, ...]:
        """The fields of MODEL_READY, after the number."""
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
        )

    def warn(self) -> None:
        """Log which of the model's options nobody acts on here."""
        usual = ModelOptions()
        has_sequences = self.model.config.sequence_batching is not None
        for attribute in _WITHOUT_EFFECT + _WITHOUT_EFFECT_IN_SEQUENCES * has_sequences:
            if getattr(self.model.options, attribute) != getattr(usual, attribute):
                option = f"MOONPOOL_{attribute.upper()}"
                _log.warning("model '%s': %s has no effect in Triton", self.model.name, option)


def refusal(failure: MoonpoolError, subject: str, model: Model | None) -> str:
    """Log the traceback of a load that failed, and return the error for the server, which logs it.

    Triton's own backend gives all lines of an error, and so does this for a model that is not contained. A contained model
    could forge lines of the server's log so, and gets one line; so does a model of which nothing is known yet (None).
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
        # A backend that is a Python file, which serves all models that name it.
        file = backend / runtime
        if not file.is_file():
            raise LoadFailed(f"Python backend file not found in '{file}'", stage="find")
        return ModelSource("triton", file, None, directory, folder, is_directory=True)
    file = folder / (config.default_model_filename or MODEL_FILENAME)
    return ModelSource(of_file(file).kind, file, None, directory, folder, is_directory=True)


def _object(text: str, subject: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise LoadFailed(f"{subject} is no JSON: {error}", stage="config") from error
    if not isinstance(value, dict):
        raise LoadFailed(f"{subject} is no JSON object", stage="config")
    return value


def _known(kind: str, message: Any, path: str) -> Any:
    """Without fields that only a newer server knows; those that are set are said in the log."""
    if not isinstance(message, dict):
        return message  # which the check of the configuration refuses
    schema = MESSAGES[kind]
    known: dict[str, Any] = {}
    for name, value in message.items():
        if name not in schema:
            if value:
                _log.warning(
                    "moonpool does not know %s%s in the configuration of a model", path, name
                )
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
