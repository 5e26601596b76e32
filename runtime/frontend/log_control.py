"""What is logged, as clients see and change it: Triton's logging extension."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from moonpool.runtime.frontend.setting_values import BadSetting, boolean, text, unsigned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.log_settings import LogSettings

_BOOLEANS = ("log_info", "log_warning", "log_error")
_FORMATS = ("default", "ISO8601", "json")
_MOST_VERBOSE = 2**32 - 1


class Log(Protocol):
    """The log of a server, with its settings as attributes of `options`."""

    @property
    def options(self) -> object:
        """A dataclass with `log_file`, `log_format` and so on."""

    def update(self, **changes: str | bool | int) -> object:
        """Log otherwise from now on."""


class LogControl:
    """The settings of the server's log and of what models say. Any thread may call any method."""

    def __init__(
        self, change_models: Callable[[Mapping[str, object]], LogSettings], log: Log | None = None
    ) -> None:
        """`change_models` is `Stubs.change_log`; without a `log` there is only what models say."""
        self._change_models = change_models
        self._log = log
        self._lock = threading.Lock()

    def settings(self, changes: Mapping[str, object] | None = None) -> dict[str, str | bool | int]:
        """What is set after the changes, in the protocol's JSON form.

        As in Triton, what is None and what no setting is called changes nothing. Raises `BadSetting`,
        and then nothing is changed.
        """
        checked = _checked(changes or {})
        with self._lock:
            if checked and self._log is not None:
                self._log.update(**checked)
            of_models = {name: value for name, value in checked.items() if name != "log_format"}
            said = self._change_models(of_models).as_dict()
        shown: dict[str, str | bool | int] = {"log_file": "", **said, "log_format": "default"}
        if self._log is not None:
            shown |= asdict(self._log.options)  # type: ignore[call-overload]
        return shown


def _checked(changes: Mapping[str, object]) -> dict[str, str | bool | int]:
    checked: dict[str, str | bool | int] = {}
    for name, value in changes.items():
        if value is None:
            continue
        if name in _BOOLEANS:
            checked[name] = boolean(value)
        elif name == "log_verbose_level":
            checked[name] = min(unsigned(value), _MOST_VERBOSE)
        elif name == "log_format":
            checked[name] = text(value)
            if value not in _FORMATS:
                raise BadSetting(
                    f"invalid argument for --log_format, got: {value!s:.80}", "UNAVAILABLE"
                )
        elif name == "log_file":
            raise BadSetting(
                "log file location can not be updated through network protocol", "UNSUPPORTED"
            )
    return checked


def check_parameters(settings: Mapping[str, object]) -> dict[str, object]:
    """The changes of a gRPC request, by name, refused in the words of Triton's gRPC frontend.

    A value that the message leaves open is None. Raises `BadSetting`.
    """
    for name, value in settings.items():
        if name in _BOOLEANS and not isinstance(value, bool):
            raise BadSetting(f"expect boolean for '{name}'")
        if name == "log_verbose_level" and type(value) is not int:
            raise BadSetting(f"expect int32 for '{name}'")
        if name == "log_format":
            if not isinstance(value, str):
                raise BadSetting(f"expect string for '{name}'")
            if value not in _FORMATS:
                raise BadSetting(f"invalid argument for {name}, got: {value:.80}")
    return dict(settings)
