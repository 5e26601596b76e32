"""What is said of a request beside its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    from collections.abc import Mapping

    Parameter = Union[bool, int, float, str]


class Details(NamedTuple):
    """What most requests leave at its default, and then have none of; in the order of the wire."""

    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    priority: int = 0
    parameters: Mapping[str, Parameter] | None = None
    # The numbers of those that are wanted; None for all.
    outputs: list[int] | None = None
    trace: str | None = None
    # Where outputs are wanted: one of the numbers in `ipc.messages`, and the device where it is one.
    memory: int = 0
    device: int = 0


NO_DETAILS = Details()
