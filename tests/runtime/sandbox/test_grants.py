"""What a configuration gives a model beyond its level, and who lets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.runtime.backend import Model
from moonpool.runtime.config import ConfigError, minimal
from moonpool.runtime.errors import NotGranted
from moonpool.runtime.loading import HostingRules, model_of
from moonpool.runtime.sandbox.grants import check_may_ask, granted
from moonpool.runtime.source import ModelSource

GRANTS = [
    ("SANDBOX_PATHS", "/data"),
    ("SANDBOX_PORTS", "443"),
    ("SANDBOX_SYSCALLS", "fork"),
    ("SANDBOX_MODELS", "*"),
    ("ENVIRONMENT", "SECRET"),
    ("PREFORK", "imports"),
    ("MEMORY_LIMIT_BYTES", "1T"),
    ("REGION_LIMIT_BYTES", "1T"),
    ("TASK_LIMIT", "100000"),
    ("OPEN_FILES", "100000"),
    ("SCRATCH_BYTES", "1T"),
    ("CPU_WEIGHT", "10000"),
    ("LOG_LINES_PER_S", "100000"),
]
TIGHTER = {
    "MEMORY_LIMIT_BYTES": "64M",
    "REGION_LIMIT_BYTES": "8M",
    "TASK_LIMIT": "8",
    "OPEN_FILES": "64",
    "SCRATCH_BYTES": "1M",
    "CPU_WEIGHT": "50",
    "LOG_LINES_PER_S": "1",
}


def model(**options: str) -> Model:
    raw = minimal("m")
    raw["parameters"] = {
        key if key == "EXECUTION_ENV_PATH" else f"MOONPOOL_{key}": {"string_value": value}
        for key, value in options.items()
    }
    here = Path("/models/m")
    return model_of(
        "m", ModelSource("triton", here / "model.py", None, here, here), raw, None, 1, {}
    )


@pytest.mark.parametrize(("key", "value"), GRANTS, ids=[key for key, _ in GRANTS])
@pytest.mark.parametrize("level", ["best-effort", "strict"])
def test_a_model_gives_itself_nothing_under_a_servers_level(
    key: str, value: str, level: str
) -> None:
    asking = model(**{key: value})

    with pytest.raises(ConfigError, match=f"MOONPOOL_{key}.*--sandbox-grants=m"):
        HostingRules(level).apply_to(asking)
    HostingRules(level, grants=frozenset(["m"])).apply_to(asking)
    HostingRules("standard").apply_to(asking)


def test_a_model_may_limit_itself_further() -> None:
    HostingRules("strict").apply_to(model(**TIGHTER))


def test_a_model_chooses_no_interpreter_of_its_own_under_a_servers_level() -> None:
    """What lies beside that one could be read, and beside /bin/python3 lies everything."""
    asking = model(EXECUTION_ENV_PATH="/")

    with pytest.raises(ConfigError, match=r"EXECUTION_ENV_PATH.*--sandbox-grants=m"):
        HostingRules("strict").apply_to(asking)


def test_a_level_is_raised_and_not_lowered() -> None:
    lower, higher = model(SANDBOX="off"), model(SANDBOX="strict")
    for each in (lower, higher):
        HostingRules("best-effort").apply_to(each)

    assert lower.options.sandbox == "best-effort"
    assert higher.options.sandbox == "strict"


def test_what_is_granted_is_said_in_words() -> None:
    options = model(
        SANDBOX="strict",
        EXECUTION_ENV_PATH="/environment",
        SANDBOX_PATHS="/data, rw:/out",
        SANDBOX_PORTS="443",
        SANDBOX_SYSCALLS="fork",
        SANDBOX_MODELS="a*",
        ENVIRONMENT="KEY",
    ).options

    assert granted(options) == (
        "run the interpreter of /environment",
        "read /data",
        "write /out",
        "connect to port 443",
        "call fork",
        "ask model a*",
        "see KEY of the environment",
    )
    assert granted(model(SANDBOX_PATHS="/data").options) == ()


def test_other_models_are_asked_where_they_are_named() -> None:
    check_may_ask(model(), "other")
    check_may_ask(model(SANDBOX="strict", SANDBOX_MODELS="ot*"), "other")

    with pytest.raises(NotGranted, match="MOONPOOL_SANDBOX_MODELS"):
        check_may_ask(model(SANDBOX="strict"), "other")
    with pytest.raises(NotGranted, match="MOONPOOL_SANDBOX_MODELS"):
        check_may_ask(model(SANDBOX="best-effort", SANDBOX_MODELS="another"), "other")
