"""Log settings: the values that they accept, and the texts that refuse others."""

from __future__ import annotations

import io
import logging
import re

import pytest

import moonpool
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.server.log import LogControl, ServerLog, check_parameters, logged
from moonpool.runtime.server.setting_values import BadSetting

pytestmark = pytest.mark.promise(
    "Watching a server",
    "Log settings are those of Triton, for the server's log and the loggers of models.",
)

SHOWN = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def of_models(changes: object) -> LogSettings:
    return LogSettings().changed(changes)  # type: ignore[arg-type]


def test_settings_are_shown_as_triton_shows_them() -> None:
    shown = LogControl(of_models, ServerLog(stream=io.StringIO())).settings()

    assert list(shown.items()) == list(SHOWN.items())
    assert LogControl(of_models).settings() == shown


def test_a_change_is_for_the_servers_log_and_for_models() -> None:
    stream = io.StringIO()
    with moonpool.Runtime() as runtime, logged(ServerLog(stream=stream)) as log:
        control = LogControl(runtime._models.stubs.change_log, log)
        say = logging.getLogger("moonpool").info
        say("first")
        changed = control.settings(
            {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
        )
        say("second")

        assert changed == {
            **SHOWN,
            "log_info": False,
            "log_verbose_level": 2,
            "log_format": "ISO8601",
        }
        assert runtime.log_settings()["log_info"] is False
        assert runtime.log_settings()["log_verbose_level"] == 2
    assert "first" in stream.getvalue()
    assert "second" not in stream.getvalue()


def test_unknown_settings_change_nothing() -> None:
    control = LogControl(of_models, ServerLog(stream=io.StringIO()))

    for changes in ({"nonsense": 1}, {"log_info": None}, {}):
        assert control.settings(changes) == SHOWN


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"log_info": 1}, "INTERNAL", "attempt to access JSON non-boolean as boolean"),
        (
            {"log_verbose_level": "1"},
            "INTERNAL",
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"log_verbose_level": -1},
            "INTERNAL",
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ({"log_format": 5}, "INTERNAL", "attempt to access JSON non-string as string"),
        (
            {"log_format": "iso8601"},
            "UNAVAILABLE",
            "invalid argument for --log_format, got: iso8601",
        ),
        (
            {"log_file": "x"},
            "UNSUPPORTED",
            "log file location can not be updated through network protocol",
        ),
    ],
)
def test_wrong_settings_are_refused_in_tritons_words(
    changes: dict[str, object], code: str, text: str
) -> None:
    control = LogControl(of_models, ServerLog(stream=io.StringIO()))

    with pytest.raises(BadSetting, match=f"^{re.escape(text)}$") as caught:
        control.settings({"log_warning": False, **changes})
    assert caught.value.code == code
    assert control.settings() == SHOWN


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_info", 1, "expect boolean for 'log_info'"),
        ("log_error", None, "expect boolean for 'log_error'"),
        ("log_verbose_level", True, "expect int32 for 'log_verbose_level'"),
        ("log_format", True, "expect string for 'log_format'"),
        ("log_format", "x", "invalid argument for log_format, got: x"),
    ],
)
def test_grpc_has_words_of_its_own(name: str, value: object, text: str) -> None:
    assert check_parameters({"log_info": False}) == {"log_info": False}
    with pytest.raises(BadSetting, match=f"^{re.escape(text)}$"):
        check_parameters({name: value})
