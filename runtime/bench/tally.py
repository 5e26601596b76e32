"""What one process of the generator saw in a window."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Tally:
    """Times in nanoseconds. All lists but `errors` grow with the requests."""

    latencies_ns: array[int] = field(default_factory=_numbers)
    # How much later than planned a request was sent.
    late_ns: array[int] = field(default_factory=_numbers)
    # Streams: until the first response of a request, and from one response to the next.
    first_ns: array[int] = field(default_factory=_numbers)
    between_ns: array[int] = field(default_factory=_numbers)
    # Requests that failed, by the text of the error.
    errors: Counter[str] = field(default_factory=Counter)
    # Planned, and not sent when the time was over.
    unsent: int = 0
    seconds: float = 0.0
    # Time of the processor that this process took.
    busy_s: float = 0.0
