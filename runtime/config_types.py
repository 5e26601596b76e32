"""The parts of a model's configuration, as the rest of the runtime reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or an output: `datatype` is the wire name, -1 in `dims` is any size.

    `dims` leaves out the batch dimension of models with a maximum batch size.  Until the model has
    completed its configuration, `datatype` and `dims` may be empty.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of one kind: CPU, GPU, MODEL or AUTO; for GPU, `count` of them on each of `gpus`."""

    name: str
    kind: str
    count: int = 1
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and how many requests may wait; a timeout or size of 0 is none."""

    timeout_action: str = "REJECT"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """How requests are joined into batches; 0 priority levels is no priorities."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: Mapping[int, QueuePolicy] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def queue_policy(self, priority_level: int) -> QueuePolicy:
        return self.priority_queue_policies.get(priority_level, self.default_queue_policy)

    @property
    def rejects_late(self) -> bool:
        """True if a request may be rejected because it has waited too long."""
        policies = (self.default_queue_policy, *self.priority_queue_policies.values())
        return any(each.default_timeout_us and each.timeout_action == "REJECT" for each in policies)


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """An input that tells the model where in a sequence a request is: START, END, READY or CORRID.

    `values` are what stands for false and for true; CORRID has none.
    """

    name: str
    kind: str
    datatype: str
    values: tuple[float, float] = (0, 0)


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """How the requests of a sequence are kept together on one instance.

    `slots` is how many sequences an instance has at a time. Direct: a slot is a place in the batch.
    Else batches are made, as by `DynamicBatching`, of the oldest requests of these sequences.
    """

    is_direct: bool = True
    slots: int = 1
    max_idle_us: int = 1_000_000
    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0
    preferred_batch_sizes: tuple[int, ...] = ()
    preserve_ordering: bool = False
    is_iterative: bool = False
    controls: tuple[SequenceControl, ...] = ()
    # The inputs of states that a server keeps, where there is one that does.
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions are loaded: the `count` latest, all, or the specific `versions`."""

    kind: str = "latest"
    count: int = 1
    versions: tuple[int, ...] = ()

    def choose(self, available: Iterable[int]) -> list[int]:
        """The versions to load out of those that are there, ascending; may be empty."""
        present = sorted(set(available))
        if self.kind == "specific":
            return [version for version in present if version in self.versions]
        return present if self.kind == "all" else present[-self.count :]
