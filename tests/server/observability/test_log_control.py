"""Log settings: the values that they accept, and the texts that refuse others."""

from __future__ import annotations

import io
import logging

import pytest
from tests.inside import registry_of

import moonpool
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.server.log import LogControl, ServerLog, logged

pytestmark = pytest.mark.promise(
    "Watching a server", "Log settings are those of Triton, for the server's log and the loggers of models."
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
        control = LogControl(registry_of(runtime).stubs.change_log, log)
        say = logging.getLogger("moonpool").info
        say("first")
        changed = control.settings({"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"})
        say("second")

        assert changed == {**SHOWN, "log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
        assert runtime.log_settings()["log_info"] is False
        assert runtime.log_settings()["log_verbose_level"] == 2
    assert "first" in stream.getvalue()
    assert "second" not in stream.getvalue()
