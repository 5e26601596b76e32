"""The requests of one priority level, and what the batcher reads of a request."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

    from moonpool.runtime.config import QueuePolicy


class Request(Protocol):
    """What the batcher reads of a request; it must not change while the request waits."""

    @property
    def batch_size(self) -> int:
        """Rows: 1 to max_batch_size, or 1 for a model that does not batch.  Checked by the caller."""

    @property
    def priority(self) -> int:
        """1 is the highest level, 0 the model's default; beyond the last level is the default too."""

    @property
    def timeout_us(self) -> int:
        """0 is none.  Counts only where the policy allows it, and only if below its default."""

    @property
    def signature(self) -> Hashable:
        """What must be equal within a batch: the shapes without the first dimension, leaving out
        inputs that may be ragged."""


R = TypeVar("R", bound=Request)

# (request, rows, signature, arrived_ns, deadline_ns); no deadline is 0.
Entry: TypeAlias = "tuple[R, int, Hashable, int, int]"
Lane: TypeAlias = "OrderedDict[int, Entry[R]]"


class Level(Generic[R]):
    """The requests of one priority level and their policy."""

    __slots__ = (
        "late",
        "limit",
        "may_override",
        "number",
        "timeout_us",
        "to_instance_ns",
        "waiting",
    )

    def __init__(self, number: int, policy: QueuePolicy | None, to_instance_ns: int = 0) -> None:
        self.number = number
        self.to_instance_ns = to_instance_ns
        self.limit = policy.max_queue_size if policy else 0
        self.timeout_us = policy.default_timeout_us if policy else 0
        self.may_override = policy.allow_timeout_override if policy else False
        self.waiting: Lane[R] = OrderedDict()
        delays = policy is not None and self.timeout_us > 0 and policy.timeout_action == "DELAY"
        self.late: Lane[R] | None = OrderedDict() if delays else None

    def size(self) -> int:
        return len(self.waiting) + (len(self.late) if self.late else 0)

    def lanes(self) -> list[Lane[R]]:
        return [self.waiting] if self.late is None else [self.waiting, self.late]

    def deadline_ns(self, request: R, now_ns: int) -> int:
        """Return the time by which a request that arrives now must leave the queue, to reach an instance in time.

        As in Triton an override can only shorten the default, so where there is no default timeout
        it has no effect at all.
        """
        timeout_us = self.timeout_us
        if self.may_override and 0 < request.timeout_us < timeout_us:
            timeout_us = request.timeout_us
        return now_ns + max(0, timeout_us * 1000 - self.to_instance_ns)
