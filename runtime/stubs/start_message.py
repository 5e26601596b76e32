"""Makes the object in START, which describes a model to its stub, and completes a configuration by the model's
answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moonpool.ipc.messages import NO_DEVICE
from moonpool.runtime.model import budgets
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ConfigError, ModelConfig
from moonpool.runtime.model.config.options import CHAT_TEMPLATE, is_compiled, look_us
from moonpool.runtime.observe.log_settings import LogSettings

# The fields that a model may complete. The number of its processes, for example, is not among them.
COMPLETABLE = ("max_batch_size", "input", "output", "model_transaction_policy")
# A model may also give one of these, if the configuration has none.
SCHEDULERS = ("dynamic_batching", "sequence_batching")


def start_of(
    model: Model, instance: str, kind: str, device_id: int, mode: str, *, backend_dir: str, log: LogSettings
) -> dict[str, Any]:
    """Make the object in START, as `stub/handshake.py` describes it.

    Models may import from `backend_dir` beside their own folders.
    """
    config, source = model.config, model.source
    sequences = config.sequence_batching
    # The requests of a sequence have to be executed one after the other, coroutines included.
    in_turn = sequences is not None and not config.decoupled
    most = 1 if in_turn else model.options.concurrent_batches
    return {
        "mode": mode,
        # The GPU of this instance, as its process numbers them.
        "device": device_id if kind == "GPU" else NO_DEVICE,
        "brief_errors": model.options.logs_errors_briefly,
        "copies_gpu_to_numpy": model.options.copies_gpu_to_numpy,
        "instance": instance,
        "kind": source.kind,
        "file": str(source.file),
        "class_name": source.class_name,
        "version_dir": str(source.version_directory),
        "model_dir": str(source.model_directory),
        "backend_dir": backend_dir,
        "chat_template": _chat_template(model),
        # In the order of their numbers.
        "inputs": input_names(config),
        "outputs": output_names(config),
        "decoupled": config.decoupled,
        "reschedules": sequences is not None and sequences.is_iterative,
        "concurrent_batches": most,
        "objects": model.options.instances_per_process,
        "compiled": is_compiled(model.options),
        "look_us": look_us(),
        "keep_ms": [budgets.KEEP_FIRST_MS, budgets.KEEP_MS],
        "config": config.raw,
        "log": log.levels,
        "args": {
            "model_config": config.json,
            "model_instance_kind": kind,
            "model_instance_name": instance,
            "model_instance_device_id": str(device_id),
            "model_repository": str(source.model_directory),
            "model_version": str(model.version),
            "model_name": model.name,
        },
    }


def _chat_template(model: Model) -> tuple[str, str] | None:
    """Return the text of the model's chat template, and that of the file with its tokens. Raises `ConfigError`."""
    path = model.options.chat_template
    if path is None or model.source.is_native:
        return None
    try:
        return model.source.read_chat_template(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise model.config.source.error(f"parameters[{CHAT_TEMPLATE}]", f"cannot read {path}: {why}") from None


def input_names(config: ModelConfig) -> list[str]:
    """Return the names of the inputs in the order of their numbers. Then come the controls of a sequence, then its
    states.
    """
    names = [tensor.name for tensor in config.inputs]
    if config.sequence_batching is not None:
        names += [each.name for each in config.sequence_batching.controls]
        names += [each.input_name for each in config.sequence_batching.states]
    return names


def output_names(config: ModelConfig) -> list[str]:
    """Return the names of the outputs in the order of their numbers. Then come states that are no outputs for
    clients.
    """
    names = [tensor.name for tensor in config.outputs]
    return names + [each.output_name for each in config.states if each.output_name not in names]


def _add_messages(changes: dict[str, Any], config: ModelConfig) -> None:
    """Add the input for chats to those of a model that makes a text of a text (`stub/openai/templates.py`)."""
    inputs: list[dict[str, Any]] = changes.get("input") or config.raw["input"] or []
    by_name = {each.get("name"): each for each in inputs}
    text = by_name.get("text_input")
    if text is not None and "messages" not in by_name:
        more = {"name": "messages", "data_type": "TYPE_STRING", "dims": [1] * len(text["dims"]), "optional": True}
        changes["input"] = [*inputs, more]


def completed(model: Model, answer: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration with what the model's auto_complete_config added.

    It passes all checks of a configuration that was written. Raises `ConfigError`.
    """
    config = model.config
    fields: tuple[str, ...] = COMPLETABLE
    if not any(scheduler in config.raw for scheduler in SCHEDULERS):
        fields += SCHEDULERS
    changes = {field: answer[field] for field in fields if field in answer}
    if model.options.chat_template is not None and not model.source.is_native:
        _add_messages(changes, config)
    try:
        model.limits.check(changes, config.source)
        made = ModelConfig.from_dict(
            {**config.raw, **changes},
            source=config.source,
            has_states=config.has_states_elsewhere,
            # Agents were checked when the model was loaded, or a tritonserver runs them.
            has_agents=True,
        )
        model.check(made)
    except ConfigError as error:
        (top,) = re.findall(r"^\w*", error.field)
        if error.line is not None or top not in changes or changes[top] == config.raw.get(top):
            raise
        # The mistake is not in the file, but in what the model added.
        what = f"{error.what} (said by auto_complete_config)"
        raise ConfigError(what, field=error.field) from error
    return made
