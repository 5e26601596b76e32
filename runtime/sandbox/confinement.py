"""How an instance is confined: what its process said of itself, and what was seen from outside."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.ipc.policy import BEST_EFFORT, is_contained
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.sandbox.inspection import differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.ipc.policy import Policy


@dataclass(frozen=True, slots=True)
class Confinement:
    """Immutable. `layers` are in the order in which they were put on; `left_out` are sentences."""

    level: str
    layers: tuple[str, ...]
    left_out: tuple[str, ...]
    # What the model may do beyond what its level lets it: `read /data`, `connect to port 443`.
    granted: tuple[str, ...]
    user: int | None

    @property
    def log_level(self) -> int:
        """How loudly it is said: what somebody went without on purpose is not to be overlooked."""
        if self.level == BEST_EFFORT and self.left_out:
            return logging.WARNING
        return logging.INFO if is_contained(self.level) else logging.DEBUG

    def as_dict(self) -> dict[str, object]:
        return {
            "level": self.level,
            "layers": list(self.layers),
            "left_out": list(self.left_out),
            "granted": list(self.granted),
            "user": self.user,
        }

    def __str__(self) -> str:
        text = f"{self.level} ({', '.join(self.layers)})"
        if self.left_out:
            text += f", left out: {'; '.join(self.left_out)}"
        if self.granted:
            text += f", granted: {', '.join(self.granted)}"
        return text


def confirmed(
    name: str,
    pid: int,
    policy: Policy,
    granted: Sequence[str],
    layers: Sequence[str],
    left_out: Sequence[str],
) -> Confinement:
    """What a stub says that it has put on, once it was seen to be true as far as that can be seen.

    Raises `LoadFailed`.
    """
    wrong = differences(pid, policy, layers)
    if wrong:
        raise LoadFailed(
            f"Stub process '{name}' is not confined as it says and was ended: {'; '.join(wrong)}",
            stage="sandbox",
        )
    return Confinement(policy.level, tuple(layers), tuple(left_out), tuple(granted), policy.user)
