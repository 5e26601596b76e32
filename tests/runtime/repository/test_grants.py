"""Grants: what a configuration may give a model beyond its level."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moonpool.runtime.errors import NotGranted
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ConfigError, minimal
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.repository.grants import Grants, as_argument, as_flag, check_may_ask, granted
from moonpool.runtime.repository.loading import HostingRules, model_of

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
    ("LOAD_TIMEOUT_S", "121"),
    ("LOAD_TIMEOUT_S", "none"),
    ("FINALIZE_TIMEOUT_S", "none"),
    ("SLEEP_TIMEOUT_S", "31"),
    ("WAKE_TIMEOUT_S", "none"),
]
TIGHTER = {
    "MEMORY_LIMIT_BYTES": "64M",
    "REGION_LIMIT_BYTES": "8M",
    "TASK_LIMIT": "8",
    "OPEN_FILES": "64",
    "SCRATCH_BYTES": "1M",
    "CPU_WEIGHT": "50",
    "LOG_LINES_PER_S": "1",
    "LOAD_TIMEOUT_S": "2",
    "FINALIZE_TIMEOUT_S": "30",
    "SLEEP_TIMEOUT_S": "30",
    "WAKE_TIMEOUT_S": "1",
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


@pytest.mark.parametrize(("key", "value"), GRANTS, ids=["-".join(each) for each in GRANTS])
@pytest.mark.parametrize("level", ["best-effort", "strict"])
def test_a_model_gives_itself_nothing_under_a_servers_level(
    key: str, value: str, level: str
) -> None:
    asking = model(**{key: value})

    with pytest.raises(ConfigError, match=f"MOONPOOL_{key}.*--sandbox-grants=m"):
        HostingRules(level).apply_to(asking)
    HostingRules(level, grants=Grants(["m"])).apply_to(asking)
    HostingRules("standard").apply_to(asking)


@pytest.mark.parametrize("value", ["no", "blank"])
@pytest.mark.parametrize("level", ["best-effort", "strict"])
def test_a_template_that_knows_no_model_is_nothing_to_grant(value: str, level: str) -> None:
    asking = model(PREFORK=value)
    HostingRules(level).apply_to(asking)
    assert granted(asking.options) == ()


def test_a_granted_deadline_is_for_that_long() -> None:
    grants = Grants(["m:MOONPOOL_LOAD_TIMEOUT_S=600", "all:MOONPOOL_LOAD_TIMEOUT_S=none"])

    HostingRules("strict", grants=grants).apply_to(model(LOAD_TIMEOUT_S="600"))
    with pytest.raises(ConfigError, match=r"MOONPOOL_LOAD_TIMEOUT_S.*more than 120"):
        HostingRules("strict", grants=grants).apply_to(model(LOAD_TIMEOUT_S="none"))
    endless = Grants(["m:MOONPOOL_LOAD_TIMEOUT_S=none"])
    HostingRules("strict", grants=endless).apply_to(model(LOAD_TIMEOUT_S="none"))


def test_a_model_may_limit_itself_further() -> None:
    HostingRules("strict").apply_to(model(**TIGHTER))


def test_a_model_chooses_no_interpreter_of_its_own_under_a_servers_level() -> None:
    """The model could read all files beside the interpreter, and everything lies beside /bin/python3."""
    asking = model(EXECUTION_ENV_PATH="/")

    with pytest.raises(ConfigError, match=r"EXECUTION_ENV_PATH.*--sandbox-grants=m"):
        HostingRules("strict").apply_to(asking)


def test_a_level_is_raised_and_not_lowered() -> None:
    lower, higher = model(SANDBOX="off"), model(SANDBOX="strict")
    for each in (lower, higher):
        HostingRules("best-effort").apply_to(each)

    assert lower.options.sandbox == "best-effort"
    assert higher.options.sandbox == "strict"


def test_grants_are_described_in_words() -> None:
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


# Grants one by one

# Each option has a granted value, values within it, and values beyond it.
VALUES = [
    ("MOONPOOL_SANDBOX_PATHS", "/a, rw:/b", ["/a", "/b", "rw:/b, /a"], ["/a/c", "rw:/a", "/"]),
    ("MOONPOOL_SANDBOX_PORTS", "443,53", ["53"], ["80", "443,80"]),
    ("MOONPOOL_SANDBOX_SYSCALLS", "fork", ["fork"], ["execve", "fork,execve"]),
    ("MOONPOOL_SANDBOX_MODELS", "a*", ["a*"], ["*", "a", "a*,b"]),
    ("MOONPOOL_ENVIRONMENT", "KEY", ["KEY"], ["KEY*", "*"]),
    ("MOONPOOL_PREFORK", "imports", ["imports"], ["initialize"]),
    ("EXECUTION_ENV_PATH", "/env", ["/env"], ["/env/..", "/", "/env2"]),
    ("MOONPOOL_MEMORY_LIMIT_BYTES", "2T", ["1T", "2T"], ["3T"]),
    ("MOONPOOL_CPU_WEIGHT", "200", ["150", "200"], ["201"]),
]


def named(key: str) -> str:
    return key.removeprefix("MOONPOOL_")


@pytest.mark.parametrize(("key", "value", "within", "beyond"), VALUES)
def test_a_grant_is_for_its_value_and_for_no_more(
    key: str, value: str, within: list[str], beyond: list[str]
) -> None:
    rules = HostingRules("strict", grants=Grants([f"m:{key}={value}"]))

    for asked in within:
        rules.apply_to(model(**{named(key): asked}))
    for asked in beyond:
        with pytest.raises(ConfigError, match="cannot give it more"):
            rules.apply_to(model(**{named(key): asked}))


def test_a_grant_is_for_one_model_and_one_option() -> None:
    rules = HostingRules("strict", grants=Grants(["m:MOONPOOL_SANDBOX_PORTS=443", "other"]))

    with pytest.raises(ConfigError, match="MOONPOOL_SANDBOX_PATHS"):
        rules.apply_to(model(SANDBOX_PORTS="443", SANDBOX_PATHS="/data"))
    with pytest.raises(ConfigError, match="MOONPOOL_SANDBOX_SYSCALLS"):
        rules.apply_to(model(SANDBOX_SYSCALLS="fork"))


def test_several_grants_add_up_in_one_text_and_in_several() -> None:
    asking = model(SANDBOX_PATHS="/a, rw:/b", SANDBOX_PORTS="443", EXECUTION_ENV_PATH="/env")
    one = "m:MOONPOOL_SANDBOX_PATHS=/a,rw:/b,EXECUTION_ENV_PATH=/env,MOONPOOL_SANDBOX_PORTS=443"
    several = [
        "m:MOONPOOL_SANDBOX_PATHS=/a",
        "m:MOONPOOL_SANDBOX_PATHS=rw:/b",
        "m:EXECUTION_ENV_PATH=/env,MOONPOOL_SANDBOX_PORTS=443",
    ]

    HostingRules("strict", grants=Grants([one])).apply_to(asking)
    HostingRules("strict", grants=Grants(several)).apply_to(asking)


def test_the_error_has_the_grant_of_everything_that_was_asked_for() -> None:
    asking = model(SANDBOX_PATHS="/a, rw:/b", SANDBOX_PORTS="443")

    for form, shown in (
        (as_flag, "--sandbox-grants=m:{}"),
        (as_argument, 'Runtime(sandbox_grants=["m:{}"])'),
    ):
        with pytest.raises(ConfigError) as caught:
            HostingRules("strict", grant_form=form).apply_to(asking)
        values = "MOONPOOL_SANDBOX_PATHS=/a,rw:/b,MOONPOOL_SANDBOX_PORTS=443"
        assert str(caught.value).endswith(f"start it with {shown.format(values)}")
    HostingRules("strict", grants=Grants([f"m:{values}"])).apply_to(asking)


def test_a_value_that_a_shell_would_change_is_quoted() -> None:
    assert as_flag("m") == "--sandbox-grants=m"
    assert as_flag("m:EXECUTION_ENV_PATH=$$TRITON_MODEL_DIRECTORY/env") == (
        "--sandbox-grants=m:'EXECUTION_ENV_PATH=$$TRITON_MODEL_DIRECTORY/env'"
    )


@pytest.mark.parametrize(
    "value",
    [
        "/env,MOONPOOL_SANDBOX_PATHS=rw:/",
        "/env;other:MOONPOOL_SANDBOX_PATHS=rw:/",
        "/env' --sandbox-grants='m",
        '/env", "m',
        "/env\nm",
        "/env`id`",
        "/env\u202e",
    ],
)
def test_a_value_that_would_paste_as_something_else_is_offered_to_nobody(value: str) -> None:
    asking = model(EXECUTION_ENV_PATH=value)

    with pytest.raises(ConfigError) as caught:
        HostingRules("strict").apply_to(asking)
    assert str(caught.value).endswith(
        "have whatever its configuration says, now and later, start it with --sandbox-grants=m"
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("m:EXECUTION_ENV_PATH,MOONPOOL_SANDBOX_PATHS", "which value of EXECUTION_ENV_PATH"),
        ("m:MOONPOOL_SANDBOX_PATHS=/a,MOONPOOL_SANDBOX_PORTS", "which value of MOONPOOL_SANDBOX_P"),
        ("m:MOONPOOL_SANDBOX_PATH=/a", 'did you mean "MOONPOOL_SANDBOX_PATHS"'),
        ("m:MOONPOOL_SANDBOX=off", "must name an option that can be granted"),
        ("m:MOONPOOL_SANDBOX_PATHS=a", "must be absolute paths"),
        ("m:GPUS=first", "numbers of GPUs"),
        ("*:MOONPOOL_SANDBOX_PATHS=/a", "must be MODEL"),
        ("*", "must be MODEL"),
        ("", "must be MODEL"),
    ],
)
def test_a_grant_that_cannot_be_meant_is_an_error(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        Grants([text])


def test_links_lead_a_granted_path_in_the_model_s_own_directory_nowhere(tmp_path: Path) -> None:
    """The author of the next version could put a link in place of the environment."""
    folder, other = tmp_path / "m", tmp_path / "other"
    for path in (folder / "1", other):
        path.mkdir(parents=True)
    (folder / "1" / "model.py").write_text("")
    source = ModelSource(
        "triton", folder / "1" / "model.py", None, folder, folder / "1", is_directory=True
    )
    raw = minimal("m")
    value = "$$TRITON_MODEL_DIRECTORY/env"
    raw["parameters"] = {"EXECUTION_ENV_PATH": {"string_value": value}}
    asking = model_of("m", source, raw, None, 1, {})
    rules = HostingRules("strict", grants=Grants([f"m:EXECUTION_ENV_PATH={value}"]))

    (folder / "env").mkdir()
    rules.apply_to(asking)
    (folder / "env").rmdir()
    (folder / "env").symlink_to(other)
    with pytest.raises(ConfigError, match="the files at the end of the link"):
        rules.apply_to(asking)
