"""The confinement of the process of an instance, as it was confirmed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moonpool.ipc.policy import BEST_EFFORT, is_contained


@dataclass(frozen=True, slots=True)
class Confinement:
    """The layers of a process. Immutable. `layers` are in the order in which they were put on; `left_out` are
    sentences.
    """

    level: str
    layers: tuple[str, ...]
    left_out: tuple[str, ...]
    # Grants beyond the level, such as `read /data` or `connect to port 443`.
    granted: tuple[str, ...]
    user: int | None

    @property
    def log_level(self) -> int:
        """The level of the log line: a warning if `best-effort` left layers out, so that it is not overlooked."""
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
