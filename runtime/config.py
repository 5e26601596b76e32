"""The configuration of a model, checked: what the rest of the runtime reads.

`config.pbtxt`, a dict from Python and what a model completes itself all become the same raw form
(`normalise`, Triton's JSON), and the raw form becomes a `ModelConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from moonpool.runtime import config_checks
from moonpool.runtime.config_defaults import minimal, normalise, unused_fields
from moonpool.runtime.config_sequences import sequence_batching
from moonpool.runtime.config_shape import Raw
from moonpool.runtime.config_source import ConfigError, Source
from moonpool.runtime.config_types import (
    DynamicBatching,
    InstanceGroup,
    QueuePolicy,
    SequenceBatching,
    SequenceControl,
    TensorConfig,
    VersionPolicy,
)

__all__ = [
    "ConfigError",
    "DynamicBatching",
    "InstanceGroup",
    "ModelConfig",
    "QueuePolicy",
    "Raw",
    "SequenceBatching",
    "SequenceControl",
    "Source",
    "TensorConfig",
    "VersionPolicy",
    "minimal",
    "normalise",
    "unused_fields",
]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration after every check; never changes.

    `raw` is Triton's JSON form with all defaults; do not write to it.
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    instance_groups: tuple[InstanceGroup, ...]
    dynamic_batching: DynamicBatching | None
    sequence_batching: SequenceBatching | None
    version_policy: VersionPolicy
    default_model_filename: str
    parameters: Mapping[str, str]
    decoupled: bool
    raw: Raw
    source: Source = field(default_factory=Source, compare=False, repr=False)

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, object],
        *,
        source: Source | None = None,
        partial: bool = False,
        has_states: bool = False,
        has_agents: bool = False,
    ) -> ModelConfig:
        """Check a raw configuration; ConfigError names file, line and field of the first mistake.

        `partial` is for a configuration that the model has yet to complete: tensors, their
        datatypes and their dims may be missing. `has_states`: whoever schedules keeps states of sequences, and gives
        them to the model as inputs. `has_agents`: the server has repository agents, and they have done their work.
        """
        source = source or Source()
        full = normalise(raw, source)
        config_checks.check_names(full, source)
        if not has_agents:
            config_checks.check_no_agents(full, source)
        groups = config_checks.instance_groups(full, source)
        policy = full.get("model_transaction_policy", {})
        return cls(
            name=full["name"],
            backend=full["backend"],
            max_batch_size=config_checks.max_batch_size(full, source),
            inputs=config_checks.tensors(full, "input", source, partial=partial),
            outputs=config_checks.tensors(full, "output", source, partial=partial),
            instance_groups=groups,
            dynamic_batching=config_checks.dynamic_batching(full, source, partial=partial),
            sequence_batching=sequence_batching(
                full, source, partial=partial, has_states=has_states
            ),
            version_policy=config_checks.version_policy(full, source),
            default_model_filename=full["default_model_filename"],
            parameters=MappingProxyType(
                {key: value["string_value"] for key, value in full["parameters"].items()}
            ),
            decoupled=policy.get("decoupled", False),
            raw=config_checks.with_groups(full, groups),
            source=source,
        )

    @property
    def uses_gpu(self) -> bool:
        """Whether any of its instances is on a GPU."""
        return any(group.kind == "GPU" for group in self.instance_groups)

    @property
    def json(self) -> str:
        """The text that models get as `model_config`."""
        return json.dumps(self.raw, separators=(",", ":"), ensure_ascii=False)

    def placed(self, available_gpus: Iterable[int], why_none: str = "") -> ModelConfig:
        """The configuration with its instance groups placed as Triton does.

        AUTO becomes GPU where there are GPUs and the group's are among them, else CPU; a GPU group
        that names none gets all.  Raises ConfigError for a GPU that is not there, with `why_none` where there
        are none at all.
        """
        present = sorted(set(available_gpus))
        groups = tuple(
            config_checks.placed(group, index, present, self.name, self.source, why_none=why_none)
            for index, group in enumerate(self.instance_groups)
        )
        return replace(
            self, instance_groups=groups, raw=config_checks.with_groups(self.raw, groups)
        )
