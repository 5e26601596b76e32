"""Which messages of models reach the log, in the words of Triton's logging extension."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from moonpool.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class LogSettings:
    """What models say with `Logger` and `logging`; what they print is always logged."""

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    # Verbose messages, and DEBUG records, are wanted from 1 on.
    log_verbose_level: int = 0

    def changed(self, changes: Mapping[str, object]) -> LogSettings:
        """The settings with these values. Raises `InvalidRequest` for what is no setting."""
        known = self.as_dict()
        for name, value in changes.items():
            if name not in known:
                raise InvalidRequest(f"no setting is called {name!r:.80}; there are {list(known)}")
            expected = type(known[name])
            if type(value) is not expected or (expected is int and value < 0):
                wanted = "true or false" if expected is bool else "a whole number from 0 on"
                raise InvalidRequest(f"{name} must be {wanted}, not {value!r:.80}")
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def levels(self) -> tuple[bool, bool, bool, bool]:
        """Whether information, warnings, errors and verbose messages are wanted."""
        return self.log_info, self.log_warning, self.log_error, self.log_verbose_level > 0

    def as_dict(self) -> dict[str, bool | int]:
        """By name, ready for JSON."""
        return asdict(self)
