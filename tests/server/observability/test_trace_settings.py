"""Trace settings: the values that they accept, and the texts that refuse others."""

from __future__ import annotations

import re

import pytest

from moonpool.runtime.server.setting_values import BadSetting
from moonpool.runtime.server.tracing.settings import changes_of_lists, trace_options
from moonpool.runtime.server.tracing.traces import Traces

pytestmark = pytest.mark.promise(
    "Watching a server",
    "Trace settings are those of Triton, for all models and for one. Wrong ones are "
    "refused with its texts.",
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


def test_unknown_settings_change_nothing() -> None:
    all_of = traces(FILE, "level=TENSORS")
    before = all_of.settings()

    given: list[dict[str, object]] = [
        {"nonsense": 5, "trace_mode": "opentelemetry"},
        {"trace_level": ["MIN", "timestamps"]},
        {"trace_level": []},
        {},
    ]
    for changes in given:
        assert all_of.settings("", changes) == before


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"trace_rate": 5}, "INTERNAL", "attempt to access JSON non-string as string"),
        ({"trace_level": "OFF"}, "INTERNAL", "attempt to access JSON non-array as array"),
        ({"trace_level": [5]}, "INTERNAL", "attempt to access JSON non-string as string"),
        ({"trace_rate": "abc"}, "INVALID_ARG", "Unable to parse 'trace_rate', got: abc"),
        (
            {"trace_rate": "0"},
            "INVALID_ARG",
            "Attempting to set invalid trace setting :sample rate must be non-zero",
        ),
        ({"trace_count": "0"}, "INVALID_ARG", "Attempting to set invalid trace setting :"),
        (
            {"trace_rate": "99999999999999999999999"},
            "INVALID_ARG",
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: "
            "99999999999999999999999",
        ),
        (
            {"trace_count": "-2"},
            "INVALID_ARG",
            "Unable to parse 'trace_count'. Expecting value >= -1, got: -2",
        ),
        (
            {"trace_level": ["OFF", "TENSORS"]},
            "INVALID_ARG",
            "Expect only one trace level 'OFF' is specified",
        ),
        (
            {"trace_file": "x"},
            "UNSUPPORTED",
            "trace file location can not be updated through network protocol",
        ),
    ],
)
def test_wrong_settings_are_refused_in_tritons_words(
    changes: dict[str, object], code: str, text: str
) -> None:
    all_of = traces(FILE, "level=TIMESTAMPS")
    before = all_of.settings()

    for model in ("", "add"):
        with pytest.raises(BadSetting, match=f"^{re.escape(text)}$") as caught:
            all_of.settings(model, changes)
        assert caught.value.code == code
    assert all_of.settings() == all_of.settings("add") == before


def test_a_model_that_is_not_there_has_no_settings() -> None:
    with pytest.raises(BadSetting, match=r"^Request for unknown model : nope$"):
        traces().settings("nope")


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


def test_values_of_grpc_are_lists() -> None:
    given = {"trace_level": ["TENSORS"], "trace_rate": ["7"], "trace_count": []}

    assert changes_of_lists(given) == {
        "trace_level": ["TENSORS"],
        "trace_rate": "7",
        "trace_count": None,
    }
    assert changes_of_lists({"trace_level": []}) == {"trace_level": None}
    with pytest.raises(BadSetting, match=r"^expect only 1 value for 'trace_rate'$"):
        changes_of_lists({"trace_rate": ["7", "8"]})


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
