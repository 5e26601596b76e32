"""Options of a deployment, and the defaults for a model without any, which follow from its configuration.

Nothing here imports Ray, starts a process or loads a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.repository.loading import Wanted, describe
from moonpool.runtime.runtime import Runtime

# Instances have their next batch while they execute one.
_BATCHES_AHEAD = 2
# The time for the requests of a replica that ends, for models that have no deadline for one execute.
_DRAIN_S = 30.0
# A replica holds the models of many callers, and its batches are moonpool's.
_LEAST_ONGOING = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one deployment. Everything that is None follows from the configuration of its models.

    Changing `instances`, `config`, `options` or `log` and deploying again changes the models inside the replicas that
    run. All others replace the replicas one after another.
    """

    replicas: int = 1
    """The number of replicas. `autoscaling` takes its place."""
    autoscaling: Mapping[str, Any] | None = None
    """Ray's `autoscaling_config`, such as `{"min_replicas": 1, "max_replicas": 8}`. Unless it names a `policy`,
    replicas follow the time that requests wait.
    """
    target_wait_ms: float = 50.0
    """The time that requests may wait for an instance before there are more replicas."""
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory_bytes: int | None = None
    """Resources of a replica, which Ray's scheduler counts."""
    max_ongoing_requests: int | None = None
    """The most requests that a replica has at once, those that wait in moonpool's queue included."""
    max_queued_requests: int | None = None
    """The most requests that wait for a replica in each process that sends them. The next one gets the error "Exceeds
    maximum queue size".
    """
    with_models: Sequence[str] = ()
    """Models that a replica loads, too: those which the model calls (BLS). The members of an ensemble come by
    themselves.
    """
    instances: int | None = None
    config: Mapping[str, Any] | None = None
    options: Mapping[str, str | float] | None = None
    """The arguments of the same names of `Runtime.load`."""
    log: Mapping[str, bool | int] = field(default_factory=dict)
    """Changes of `Runtime.log_settings`."""
    revision: str = ""
    """Any text. Another one replaces the replicas, such as after files of the model have changed."""
    deployment: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `Deployment.options`, such as `placement_group_bundles`. They take precedence over all
    others.
    """

    @property
    def live(self) -> dict[str, Any]:
        """Return what may change in a replica that runs, as values of Python that compare by their content."""
        return {
            "instances": self.instances,
            "config": None if self.config is None else dict(self.config),
            "options": None if self.options is None else dict(self.options),
        }


class Traits(NamedTuple):
    """The properties of a model that decide how requests reach its replicas."""

    deployment: str
    """The name of the deployment that has the model."""
    is_packed: bool = False
    """Its replicas have other models, too, and load this one when it is asked for."""
    has_sequences: bool = False
    """Requests with one correlation id go to one replica."""
    is_decoupled: bool = False
    """It gives any number of responses."""
    is_idempotent: bool = False
    """The model says MOONPOOL_RETRY: a request may be executed a second time."""


class Prepared(NamedTuple):
    """A model as it would be loaded: its configuration, its options and its number of processes."""

    config: ModelConfig
    options: Any
    members: Sequence[Prepared] = ()
    """The models that the same replica loads with it."""

    @property
    def all(self) -> Iterator[Prepared]:
        """Iterate over the model and everything that comes with it."""
        yield self
        for member in self.members:
            yield from member.all

    @property
    def instances(self) -> int:
        return sum(group.count * max(1, len(group.gpus)) for group in self.config.instance_groups)

    def traits(self, deployment: str, *, is_packed: bool = False) -> Traits:
        return Traits(
            deployment,
            is_packed,
            self.config.sequence_batching is not None,
            self.config.decoupled,
            all(each.options.retry for each in self.all),
        )


def prepare_model(runtime: Runtime, name: str, options: Options) -> Prepared:
    """Read a model of the runtime's repository. Raises `RepositoryError`, `ConfigError`, `ModelNotFound`."""
    return _prepared(
        runtime, Wanted(name, None, options.instances, options.config, said=_said(options)), options.with_models
    )


def _said(options: Options) -> dict[str, str] | None:
    return None if options.options is None else {k: str(v) for k, v in options.options.items()}


def _prepared(runtime: Runtime, wanted: Wanted, others: Iterable[str] = ()) -> Prepared:
    registry = runtime._models
    found = describe(wanted, registry.repositories, registry.backends.locate, registry.rules)
    try:
        model: Model = found.models[-1]
        members = [] if model.config.ensemble is None else model.config.ensemble.models
        names = dict.fromkeys([*members, *others])
        inside = [_prepared(runtime, Wanted(each)) for each in names if each != wanted.name]
        return Prepared(model.config, model.options, inside)
    finally:
        found.discard()


def deployment_options(models: Sequence[Prepared], options: Options) -> dict[str, Any]:
    """Return arguments of `Deployment.options` for replicas with these models, except for the policy of
    `autoscaling`.
    """
    inside = [each for model in models for each in model.all]
    actor: dict[str, Any] = {
        "num_cpus": _first(options.num_cpus, _cpus(inside), 1),
        "num_gpus": _first(options.num_gpus, _gpus(inside), 0),
    }
    memory_bytes = _first(options.memory_bytes, _memory_bytes(inside))
    if memory_bytes is not None:
        actor["memory"] = memory_bytes
    chosen: dict[str, Any] = {
        "max_ongoing_requests": _first(options.max_ongoing_requests, max(map(_ongoing, models))),
        "max_queued_requests": _first(options.max_queued_requests, max(map(_queued, models))),
        "graceful_shutdown_timeout_s": max(map(_drain_s, inside)),
        "ray_actor_options": actor,
    }
    if options.autoscaling is None:
        chosen["num_replicas"] = options.replicas
    given = dict(options.deployment)
    actor |= given.pop("ray_actor_options", {})
    return chosen | given


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ongoing(model: Prepared) -> int:
    """Return how many requests keep all instances of a model busy, and fill their next batches."""
    config = model.config
    batch = max(1, config.max_batch_size)
    if config.sequence_batching is not None:
        batch = max(batch, config.sequence_batching.slots)
    own = model.instances * batch * _BATCHES_AHEAD
    # An ensemble has no instances. Its requests are spread over those of its members.
    return max(own, _LEAST_ONGOING, *(_ongoing(each) for each in model.members), 0)


def _queued(model: Prepared) -> int:
    """Return the size of the model's queue; -1 for no limit, as Ray says it."""
    batching = model.config.dynamic_batching
    size = 0 if batching is None else batching.default_queue_policy.max_queue_size
    return size or -1


def _drain_s(model: Prepared) -> float:
    limit_s = model.options.execute_timeout_s
    return _DRAIN_S if limit_s is None else max(_DRAIN_S, limit_s + 10.0)


def _cpus(models: Sequence[Prepared]) -> int | None:
    """Return the number of processors that models name in MOONPOOL_CPUS; None if no model names any."""
    named = {number for model in models for number in model.options.cpus}
    return len(named) or None


def _gpus(models: Sequence[Prepared]) -> int | None:
    """Return the number of GPUs whose numbers instance groups name, or 1 if they name none."""
    groups = [group for model in models for group in model.config.instance_groups if group.kind == "GPU"]
    if not groups:
        return None
    return len({number for group in groups for number in group.gpus}) or 1


def _memory_bytes(models: Sequence[Prepared]) -> int | None:
    """Return the sum of the limits of all processes; None if a process has no limit."""
    total = 0
    for model in models:
        limit_bytes = model.options.memory_limit_bytes
        if model.instances and limit_bytes is None:
            return None
        total += model.instances * (limit_bytes or 0)
    return total or None
