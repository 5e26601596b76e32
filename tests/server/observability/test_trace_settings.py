"""Trace settings: the values that they accept, and the texts that refuse others."""

from __future__ import annotations

import pytest

from moonpool.runtime.server.setting_values import BadSetting
from moonpool.runtime.server.tracing.settings import trace_options
from moonpool.runtime.server.tracing.traces import Traces

pytestmark = pytest.mark.promise(
    "Watching a server",
    "Trace settings are those of Triton, for all models and for one. Wrong ones are refused with its texts.",
)

FILE = "triton,file=/dev/null"


def traces(*flags: str) -> Traces:
    return Traces(trace_options(flags), lambda name: name in ("add", "other"))


def test_settings_are_shown_as_triton_shows_them() -> None:
    flags = (FILE, "level=TIMESTAMPS", "rate=5", "count=7", "triton,log-frequency=2")

    assert list(traces(*flags).settings().items()) == [
        ("trace_level", ["TIMESTAMPS"]),
        ("trace_rate", "5"),
        ("trace_count", "7"),
        ("log_frequency", "2"),
        ("trace_file", "/dev/null"),
        ("trace_mode", "triton"),
    ]
    assert traces().settings()["trace_level"] == ["OFF"]


def test_a_model_has_what_all_have_until_it_has_its_own() -> None:
    all_of = traces(FILE, "level=TIMESTAMPS")

    assert all_of.settings("add", {"trace_rate": "9"})["trace_rate"] == "9"
    assert all_of.settings("", {"trace_rate": "6", "trace_count": "3"})["trace_rate"] == "6"
    assert all_of.settings("add")["trace_rate"] == "9"
    assert all_of.settings("add")["trace_count"] == "3"
    assert all_of.settings("other")["trace_rate"] == "6"
    assert all_of.settings("add", {"trace_rate": None})["trace_rate"] == "6"
    assert all_of.settings("", {"trace_rate": None, "trace_count": None})["trace_rate"] == "1000"


def test_nothing_is_traced_without_a_file() -> None:
    nowhere = traces()

    with pytest.raises(BadSetting, match="trace file name is not given"):
        nowhere.settings("", {"trace_level": ["TIMESTAMPS"]})
    assert nowhere.settings("", {"trace_rate": "0"})["trace_rate"] == "0"
    assert not nowhere.is_on


def test_tracing_is_on_while_one_model_is_traced() -> None:
    all_of = traces(FILE)

    assert not all_of.is_on
    all_of.settings("add", {"trace_level": ["TIMESTAMPS"]})
    assert all_of.is_on
    all_of.settings("add", {"trace_level": None})
    assert not all_of.is_on


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("x", "option format is"),
        ("mode=x", "--trace-config mode is triton or opentelemetry, not x"),
        ("level=x", "OFF, TIMESTAMPS or TENSORS, not x"),
        ("rate=x", "Unable to parse 'trace_rate', got: x"),
        ("triton,x=1", "knows no setting triton,x"),
        ("nonsense=1", "knows no setting nonsense"),
        ("opentelemetry,bsp_schedule_delay=soon", "Unable to parse"),
        ("level=TIMESTAMPS", "trace file name is not given"),
    ],
)
def test_flags_that_say_nothing_are_refused(flag: str, text: str) -> None:
    with pytest.raises(BadSetting, match=text):
        trace_options([flag])


def test_a_path_may_have_commas_and_equal_signs() -> None:
    assert trace_options(["triton,file=/tmp/a,b=c.json"]).file == "/tmp/a,b=c.json"
    resource = trace_options(["opentelemetry,resource=team=a,b"]).resource
    assert resource == {"service.name": "moonpool", "team": "a,b"}
