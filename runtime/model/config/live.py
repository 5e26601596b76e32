"""Says which parts of a configuration may change while a model serves, and what they change.

All other parts shape what the processes of a model are, so a change of them needs new processes. Live parts are those
that the runtime alone reads:

- `instance_group` and `version_policy`: instances and versions come and go, and the others stay;
- the delay and the queue policies of `dynamic_batching`: they hold for the requests that wait already, too;
- moonpool's options for deadlines.

A model may read its configuration in `initialize`. An instance that stays goes on with what it has read, as in Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.runtime.arguments import OF_REQUEST
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig, Raw
from moonpool.runtime.model.config.options import ModelOptions

_FIELDS = ("instance_group", "version_policy")
_BATCHING = "dynamic_batching"
_DEADLINES = {
    "MOONPOOL_LOAD_TIMEOUT_S": "load_timeout_s",
    "MOONPOOL_EXECUTE_TIMEOUT_S": "execute_timeout_s",
    "MOONPOOL_FINALIZE_TIMEOUT_S": "finalize_timeout_s",
    "MOONPOOL_SLEEP_TIMEOUT_S": "sleep_timeout_s",
    "MOONPOOL_WAKE_TIMEOUT_S": "wake_timeout_s",
}
_BATCHING_FIELDS = ("max_queue_delay_microseconds", "default_queue_policy", "priority_queue_policy")


def fixed_part(raw: Raw) -> Raw:
    """Return the parts of a configuration that cannot change without new processes."""
    fixed = {name: value for name, value in raw.items() if name not in _FIELDS}
    if _BATCHING in fixed:
        batching = fixed[_BATCHING]
        fixed[_BATCHING] = {k: v for k, v in batching.items() if k not in _BATCHING_FIELDS}
    parameters: Mapping[str, Any] = fixed.get("parameters") or {}
    fixed["parameters"] = {k: v for k, v in parameters.items() if k not in _DEADLINES}
    return fixed


def fixed_options(options: ModelOptions) -> ModelOptions:
    """Return the options without those that may change while the model serves."""
    return with_live_options(options, ModelOptions())


def with_live_parts(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """Return a configuration with the live parts of another one, whose fixed part is the same."""
    names = [*_FIELDS, "parameters"]
    batching = config.dynamic_batching
    if _BATCHING in other.raw:
        names.append(_BATCHING)
        batching = other.dynamic_batching
    return replace(
        config,
        instance_groups=other.instance_groups,
        version_policy=other.version_policy,
        dynamic_batching=batching,
        parameters=other.parameters,
        raw={**config.raw, **{name: other.raw[name] for name in names}},
    )


def with_live_options(options: ModelOptions, other: ModelOptions) -> ModelOptions:
    """Return options with the deadlines of other ones."""
    return replace(options, **{name: getattr(other, name) for name in _DEADLINES.values()})


def with_count(config: ModelConfig, count: int) -> ModelConfig:
    """Return a configuration with this count in its only group of instances. Raises `InvalidRequest`."""
    OF_REQUEST.whole("instances", count, 1)
    if config.ensemble is not None:
        members = ", ".join(config.ensemble.models)
        raise InvalidRequest(
            f"model '{config.name}' is an ensemble, which has no instances; scale the models of its steps: {members}"
        )
    if len(config.instance_groups) != 1:
        raise InvalidRequest(
            f"model '{config.name}' has {len(config.instance_groups)} groups of instances; load it with a "
            "configuration that says how many each has"
        )
    (group,), (raw,) = config.instance_groups, config.raw["instance_group"]
    return replace(
        config,
        instance_groups=(replace(group, count=count),),
        raw={**config.raw, "instance_group": [{**raw, "count": count}]},
    )
