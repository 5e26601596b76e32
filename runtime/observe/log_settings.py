"""The settings that decide which messages of models are logged, with the names of Triton's logging extension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from moonpool.runtime.errors import InvalidRequest


@dataclass(frozen=True)
class LogSettings:
    """Settings for messages that models log with `Logger` and `logging`. Output that they print is always logged."""

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    # From 1 on, verbose messages and DEBUG records are logged.
    log_verbose_level: int = 0

    def changed(self, changes: Mapping[str, object]) -> LogSettings:
        """Return the settings with other values. Raises `InvalidRequest` for unknown names and wrong types."""
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
        """True for each of information, warnings, errors and verbose messages that is logged."""
        return self.log_info, self.log_warning, self.log_error, self.log_verbose_level > 0

    def as_dict(self) -> dict[str, bool | int]:
        """Return the settings by name, ready for JSON."""
        return asdict(self)
