"""Grants: what a configuration may give a model beyond its level."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.server.repositories import write

import moonpool
from moonpool.runtime.errors import NotGranted
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import ConfigError, Source, minimal
from moonpool.runtime.model.config.options import OPTIONS, ModelOptions, OperatorOptions, hardened, listed
from moonpool.runtime.model.config.schema import MESSAGES
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.repository.grants import (
    HARMLESS,
    Grants,
    as_argument,
    as_flag,
    check_may_ask,
    check_ungranted,
    granted,
)
from moonpool.runtime.repository.loading import HostingRules, Wanted, model_of
from moonpool.runtime.stubs.start_message import COMPLETABLE, SCHEDULERS, completed

ALL = listed(sorted(os.sched_getaffinity(0))).replace(" ", "")

GRANTS = [
    ("SANDBOX_PATHS", "/data"),
    ("SANDBOX_PORTS", "443"),
    ("SANDBOX_SYSCALLS", "fork"),
    ("REMOTE_CODE", "a" * 40),
    ("PICKLED_WEIGHTS", "a" * 40),
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
    ("COMPILE_CACHE", "yes"),
    ("REGION_BYTES", "1T"),
    ("STATE_LIMIT_BYTES", "1025M"),
    ("BACKLOG_BYTES", "65M"),
    ("PIN", "yes"),
    ("MAX_RESTARTS", "6"),
    ("RESTART_WINDOW_S", "59"),
    ("RESTART_BACKOFF_S", "0"),
    ("RESTART_BACKOFF_MAX_S", "1"),
    ("RECYCLE_REQUESTS", "999"),
    ("RECYCLE_RSS_BYTES", "1G"),
    ("IDLE_S", "59"),
    ("CONCURRENT_BATCHES", "65"),
    ("EXECUTE_TIMEOUT_S", "0.09"),
    ("CPUS", "0-9999"),
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
    "REGION_BYTES": "4K",
    "STATE_LIMIT_BYTES": "1024M",
    "BACKLOG_BYTES": "64M",
    "PIN": "no",
    "MAX_RESTARTS": "0",
    "RESTART_WINDOW_S": "61",
    "RESTART_BACKOFF_S": "60",
    "RESTART_BACKOFF_MAX_S": "600",
    "RECYCLE_REQUESTS": "1000",
    "RECYCLE_RSS_BYTES": "none",
    "IDLE_S": "60",
    "CONCURRENT_BATCHES": "1",
    "EXECUTE_TIMEOUT_S": "0.1",
    "CPUS": "0",
}
# What the operator gives all instances.
POLICIES = {"cpu": (0, 1)}


# Options with names of Triton's.
OTHERS = {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}


def model(**options: str) -> Model:
    raw = minimal("m")
    raw["parameters"] = {
        key if key in OTHERS else f"MOONPOOL_{key}": {"string_value": value} for key, value in options.items()
    }
    here = Path("/models/m")
    return model_of("m", ModelSource("triton", here / "model.py", None, here, here), raw, None, 1, {})


@pytest.mark.parametrize(("key", "value"), GRANTS, ids=["-".join(each) for each in GRANTS])
@pytest.mark.parametrize("level", ["best-effort", "strict"])
def test_a_model_gives_itself_nothing_under_a_servers_level(key: str, value: str, level: str) -> None:
    asking = model(**{key: value})

    with pytest.raises(ConfigError, match=f"MOONPOOL_{key}.*--sandbox-grants=m"):
        HostingRules(level, host_policies=POLICIES).apply_to(asking)
    whole = Grants(["m"])
    HostingRules(level, grants=whole, host_policies=POLICIES).apply_to(asking)
    HostingRules("standard", host_policies=POLICIES).apply_to(asking)


@pytest.mark.parametrize("value", ["no", "blank"])
@pytest.mark.parametrize("level", ["best-effort", "strict"])
def test_a_template_that_knows_no_model_is_nothing_to_grant(value: str, level: str) -> None:
    asking = model(PREFORK=value)
    HostingRules(level).apply_to(asking)
    assert granted(asking.options) == ()


# A value for each option that needs no grant, as large as it may be.
FREELY = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "MOONPOOL_SANDBOX": "off",
    "MOONPOOL_RETRY": "yes",
    "MOONPOOL_LOG_ERRORS": "full",
    "MOONPOOL_THREADS": "999999999",
    "MOONPOOL_INSTANCES_PER_PROCESS": "999999999",
    "MOONPOOL_STATE_SURVIVES": "yes",
    "MOONPOOL_GPU_AS_NUMPY": "copy",
    "MOONPOOL_AS_CPU": "yes",
    "MOONPOOL_INSTANCES": "1..999999",
    "MOONPOOL_WAIT_TARGET_MS": "0.000001",
    "MOONPOOL_CHAT_TEMPLATE": "chat_template.jinja",
    "MOONPOOL_TASK": "text-generation",
}


@pytest.mark.promise(
    "The sandbox: grants",
    "Where the operator set `strict` or `best-effort`, a model that grants itself anything, or "
    "sets itself a limit above the usual one, is not loaded, unless the operator granted it. "
    "Each option needs a grant, unless it is known to be harmless.",
)
@pytest.mark.promise(
    "Hostile models",
    "Where the operator set a level, each option of a model needs a grant, unless it is in a list of harmless ones.",
)
def test_an_option_needs_a_grant_unless_it_is_harmless() -> None:
    """A new option is refused until somebody has thought about it, and has put a value of it into a table here."""
    of_table = {f"MOONPOOL_{key}" for key, _ in GRANTS} | {"EXECUTION_ENV_PATH"}
    assert set(FREELY) == set(HARMLESS)
    assert of_table | set(FREELY) == {option.key for option in OPTIONS}
    assert not of_table & set(FREELY)
    for key, value in FREELY.items():
        HostingRules("strict").apply_to(model(**{key.removeprefix("MOONPOOL_"): value}))


def test_what_is_kept_for_a_model_follows_the_memory_that_the_operator_gave_it() -> None:
    said = {"MOONPOOL_MEMORY_LIMIT_BYTES": "256M"}
    for key in ("REGION_BYTES", "REGION_LIMIT_BYTES", "STATE_LIMIT_BYTES"):
        for value, is_too_much in (("256M", False), ("257M", True)):
            # The operator's value has taken the place of the configuration's.
            asking = model(SANDBOX="strict", MEMORY_LIMIT_BYTES="256M", **{key: value})
            refused = pytest.raises(ConfigError, match=f"MOONPOOL_{key}.*more than {256 << 20}")
            with refused if is_too_much else nullcontext():
                check_ungranted(asking, Grants(), as_flag, said=said)
    limited = hardened(model(SANDBOX="strict", MEMORY_LIMIT_BYTES="256M").options)
    assert limited.region_limit_bytes == limited.state_limit_bytes == 256 << 20


def sequences(idle_us: int) -> Model:
    raw = minimal("m") | {"sequence_batching": {"max_sequence_idle_microseconds": idle_us}}
    here = Path("/models/m")
    return model_of("m", ModelSource("triton", here / "model.py", None, here, here), raw, None, 1, {})


def test_a_sequence_that_is_idle_for_long_needs_a_grant() -> None:
    """It keeps the model awake as `MOONPOOL_PIN` does."""
    HostingRules("strict").apply_to(sequences(600_000_000))
    with pytest.raises(ConfigError, match=r"max_sequence_idle.*SEQUENCE_IDLE_US=600000001"):
        HostingRules("strict").apply_to(sequences(600_000_001))
    rules = HostingRules("strict", grants=Grants(["m:SEQUENCE_IDLE_US=3600000000"]))
    rules.apply_to(sequences(3_600_000_000))
    with pytest.raises(ConfigError, match="max_sequence_idle"):
        rules.apply_to(sequences(3_600_000_001))


def grouped(*groups: dict[str, Any], **options: str) -> Model:
    asking = model(**options)
    raw = {**asking.config.raw, "instance_group": list(groups)}
    return model_of("m", asking.source, raw, None, 1, {})


CPU, NAMED = {"kind": "KIND_CPU"}, {"kind": "KIND_CPU", "host_policy": "far"}


@pytest.mark.promise(
    "Hostile models",
    "Where the operator set a level, instances leave the processors that `--host-policy` gives those of their kind "
    "only by a grant.",
)
@pytest.mark.parametrize(
    ("policies", "groups", "cpus", "asked"),
    [
        ({"cpu": (0, 1)}, [CPU], "", ""),
        ({"cpu": (0, 1)}, [CPU], "1", ""),
        ({"cpu": (0, 1)}, [CPU], "1-2", "1-2"),
        ({"cpu": (0, 1), "far": (1,)}, [NAMED], "", ""),
        ({"cpu": (0, 1), "far": (2, 3)}, [CPU, NAMED], "", "2-3"),
        # A policy that nobody has given is for all processors.
        ({"cpu": (9998, 9999)}, [NAMED], "", ALL),
        ({"cpu": (9998, 9999)}, [{"kind": "KIND_MODEL"}], "", ALL),
        ({"cpu": (9998, 9999), "model": (0,)}, [{"kind": "KIND_MODEL"}], "", ""),
        ({"cpu": (9998, 9999)}, [{"kind": "KIND_AUTO", "host_policy": "x"}], "", ALL),
        # The processors of a kind that has no policy are all.
        ({"far": (2, 3)}, [CPU, NAMED], "7", ""),
        ({}, [NAMED], "0-9999", ""),
    ],
)
def test_a_model_leaves_no_processors_that_a_host_policy_gives_it(
    policies: dict[str, tuple[int, ...]], groups: list[dict[str, Any]], cpus: str, asked: str
) -> None:
    asking = grouped(*groups, **({"CPUS": cpus} if cpus else {}))
    rules = HostingRules("strict", host_policies=policies)
    if not asked:
        rules.apply_to(asking)
        return
    with pytest.raises(ConfigError, match=f"--sandbox-grants=m:'?MOONPOOL_CPUS={asked}'?$"):
        rules.apply_to(asking)
    replace(rules, grants=Grants([f"m:MOONPOOL_CPUS={asked}"])).apply_to(asking)
    # The operator's own value is granted.
    said = OperatorOptions.by_model({"m": {"MOONPOOL_CPUS": "0-9999"}})
    replace(rules, options=said).apply_to(grouped(*groups, CPUS="0-9999"))


def test_a_group_of_any_kind_takes_no_more_gpus_than_were_granted() -> None:
    """Beside a group of the kind GPU, one of the kind AUTO is placed on GPUs."""
    gpu = {"kind": "KIND_GPU", "gpus": [0]}
    one = HostingRules("strict", grants=Grants(["m:GPUS=0"]))
    one.apply_to(grouped(gpu))
    for auto, what in (({"kind": "KIND_AUTO"}, "all"), ({"kind": "KIND_AUTO", "gpus": [1]}, "0,1")):
        with pytest.raises(ConfigError, match=f"GPUS={what}"):
            one.apply_to(grouped(gpu, auto))
        HostingRules("strict", grants=Grants([f"m:GPUS={what}"])).apply_to(grouped(gpu, auto))


def limited(*resources: tuple[str, int, bool]) -> Model:
    named = [{"name": n, "count": count, "global": kind} for n, count, kind in resources]
    return grouped({"kind": "KIND_CPU", "rate_limiter": {"resources": named}})


@pytest.mark.promise(
    "Hostile models",
    "Where the operator set a level and a rate limiter, a model needs a grant for resources that others would wait "
    "for.",
)
def test_resources_that_other_models_wait_for_need_a_grant() -> None:
    rules = HostingRules("strict", limits_rate=True)
    asking = limited(("R1", 4, False), ("disk", 1, True))
    grant = "m:RESOURCES=R1:4,disk:1:global"
    with pytest.raises(ConfigError, match=rf"other models then wait.*--sandbox-grants={grant}$"):
        rules.apply_to(asking)
    granted = replace(rules, grants=Grants([grant]))
    granted.apply_to(asking)
    granted.apply_to(limited(("R1", 3, False)))
    for beyond in (("R1", 5, False), ("R1", 1, True), ("R2", 1, False)):
        with pytest.raises(ConfigError, match="resources that other models"):
            granted.apply_to(limited(beyond))
    # A name that would read as something else is granted with the whole configuration.
    strange = limited(("a,b:1", 1, False))
    with pytest.raises(ConfigError, match=r"now and later, start it with --sandbox-grants=m$"):
        rules.apply_to(strange)
    replace(rules, grants=Grants(["m"])).apply_to(strange)
    # Without a rate limiter they have no effect.
    HostingRules("strict").apply_to(asking)
    with pytest.raises(ValueError, match="must be NAME:COUNT"):
        Grants(["m:RESOURCES=R1"])


@pytest.mark.parametrize("given", [[], ["R1:4"]])
def test_a_runtime_with_a_rate_limiter_asks_for_the_grant(tmp_path: Path, given: list[str]) -> None:
    write(tmp_path, "m")
    group = {"kind": "KIND_CPU", "rate_limiter": {"resources": [{"name": "R1", "count": 4}]}}
    with (
        moonpool.Runtime(tmp_path, models=(), sandbox="strict", rate_limit=given) as runtime,
        pytest.raises(ConfigError, match=r"Runtime\(sandbox_grants=\[\"m:RESOURCES=R1:4\"\]\)$"),
    ):
        runtime.load("m", config={"instance_group": [group]})


def test_a_granted_deadline_is_for_that_long() -> None:
    grants = Grants(["m:MOONPOOL_LOAD_TIMEOUT_S=600", "all:MOONPOOL_LOAD_TIMEOUT_S=none"])

    HostingRules("strict", grants=grants).apply_to(model(LOAD_TIMEOUT_S="600"))
    with pytest.raises(ConfigError, match=r"MOONPOOL_LOAD_TIMEOUT_S.*more than 120"):
        HostingRules("strict", grants=grants).apply_to(model(LOAD_TIMEOUT_S="none"))
    endless = Grants(["m:MOONPOOL_LOAD_TIMEOUT_S=none"])
    HostingRules("strict", grants=endless).apply_to(model(LOAD_TIMEOUT_S="none"))


@pytest.mark.promise("The sandbox: grants", "Where the operator …")
def test_a_model_may_limit_itself_further() -> None:
    HostingRules("strict", host_policies=POLICIES).apply_to(model(**TIGHTER))


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
    ("MOONPOOL_CPUS", "1-3", ["2,3", "0,1"], ["0,3"]),
    ("MOONPOOL_MAX_RESTARTS", "9", ["9", "3"], ["10"]),
    ("MOONPOOL_PIN", "yes", ["yes"], []),
]
# Of these, a smaller value is more.
FLOORS = [
    ("MOONPOOL_RESTART_WINDOW_S", "5", ["5", "30"], ["4.9"]),
    ("MOONPOOL_RECYCLE_REQUESTS", "10", ["10", "2000"], ["9"]),
    ("MOONPOOL_EXECUTE_TIMEOUT_S", "0.01", ["0.01", "2"], ["0.009"]),
]


def named(key: str) -> str:
    return key.removeprefix("MOONPOOL_")


@pytest.mark.promise(
    "The sandbox: grants",
    "A grant of a value is for that value, or for less, of one option of one model. A new "
    "version that asks for more is not loaded by a poll, a client or a restart of the server; "
    "the old version serves on.",
)
@pytest.mark.parametrize(("key", "value", "within", "beyond"), VALUES + FLOORS)
def test_a_grant_is_for_its_value_and_for_no_more(key: str, value: str, within: list[str], beyond: list[str]) -> None:
    grants = Grants([f"m:{key}={value}"])
    rules = HostingRules("strict", grants=grants, host_policies=POLICIES)

    for asked in within:
        rules.apply_to(model(**{named(key): asked}))
    for asked in beyond:
        with pytest.raises(ConfigError, match=r"cannot give it (more|less|other)"):
            rules.apply_to(model(**{named(key): asked}))


@pytest.mark.promise("The sandbox: grants", "A grant of …")
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

    for form, shown in ((as_flag, "--sandbox-grants=m:{}"), (as_argument, 'Runtime(sandbox_grants=["m:{}"])')):
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


@pytest.mark.promise(
    "The sandbox: grants", "A grant that would read as something else where it is pasted is not printed."
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
        ("m:MOONPOOL_SANDBOX=off", "'MOONPOOL_SANDBOX' cannot be granted"),
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


@pytest.mark.promise("The sandbox: grants", "An environment or …")
def test_links_lead_a_granted_path_in_the_model_s_own_directory_nowhere(tmp_path: Path) -> None:
    """The author of the next version could put a link in place of the environment."""
    folder, other = tmp_path / "m", tmp_path / "other"
    for path in (folder / "1", other):
        path.mkdir(parents=True)
    (folder / "1" / "model.py").write_text("")
    source = ModelSource("triton", folder / "1" / "model.py", None, folder, folder / "1", is_directory=True)
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


# Configurations that models complete

# All that a model may change, as large as it may be. What needs a grant is in NUMBERS.
TENSOR = {"data_type": "TYPE_FP32", "dims": [4]}
TENSORS = {"input": [{"name": "X", **TENSOR}], "output": [{"name": "Y", **TENSOR}]}
# A model with sequences has as many of them in an instance, of which ConfigLimits allows no more.
MOST_ROWS = ConfigLimits().sequences
COMPLETED: dict[str, object] = {
    "max_batch_size": MOST_ROWS,
    **TENSORS,
    "model_transaction_policy": {"decoupled": True},
    "dynamic_batching": {"max_queue_delay_microseconds": 2**64 - 1, "preferred_batch_size": [8]},
    "sequence_batching": {"max_sequence_idle_microseconds": 600_000_000},
}
# What no model may complete. Each is as a model would give itself more with it.
WRITTEN: dict[str, object] = {
    "parameters": {f"MOONPOOL_{key}": {"string_value": value} for key, value in GRANTS},
    "instance_group": [{"kind": "KIND_GPU", "count": 1000, "host_policy": "far"}],
}


@pytest.mark.promise("The sandbox: grants", "A configuration that a model …")
@pytest.mark.promise(
    "Hostile models", "A configuration that a model completes needs the grants of one that was written."
)
def test_a_model_gets_no_more_by_completing_its_configuration() -> None:
    assert set(COMPLETED) == {*COMPLETABLE, *SCHEDULERS}
    asking = model()
    HostingRules("strict", limits_rate=True, host_policies=POLICIES).apply_to(asking)
    before = asking.config.raw
    for scheduler in SCHEDULERS:
        without = {name for name in SCHEDULERS if name != scheduler}
        answer = {name: value for name, value in COMPLETED.items() if name not in without}
        # Every other field of the schema stays as it is.
        others = {name: WRITTEN.get(name, before.get(name)) for name in MESSAGES["ModelConfig"]}
        raw = completed(asking, {**others, **answer}).raw
        assert {name: raw.get(name) for name in others if name not in COMPLETED} == {
            name: before.get(name) for name in others if name not in COMPLETED
        }
        assert raw["max_batch_size"] == MOST_ROWS

    beyond = {**TENSORS, "sequence_batching": {"max_sequence_idle_microseconds": 10**15}}
    asked = f"SEQUENCE_IDLE_US={10**15}"
    what = rf"cannot give it more than 600000000.*=m:{asked} \(said by auto_complete_config\)$"
    with pytest.raises(ConfigError, match=what):
        completed(asking, beyond)
    assert asking.config.sequence_batching is None
    for grant in (f"m:{asked}", "m"):
        HostingRules("strict", grants=Grants([grant])).apply_to(asking)
        completed(asking, beyond)
    HostingRules("standard").apply_to(asking)
    completed(asking, beyond)
    # A model that asks for the load gives no more in this way, either.
    brought = model(SANDBOX="strict")
    wanted = Wanted("m", is_whole=True, asker=ModelOptions(sandbox="strict"))
    HostingRules().apply_to(brought, wanted)
    with pytest.raises(ConfigError, match="cannot set this for another"):
        completed(brought, beyond)


def test_limits_of_a_loaded_model_are_nothing_that_it_asked_for() -> None:
    """A model that was granted more memory than is usual has larger regions, too, once it is loaded."""
    asking = model(MEMORY_LIMIT_BYTES="1T")
    rules = HostingRules("strict", grants=Grants(["m:MOONPOOL_MEMORY_LIMIT_BYTES=1T"]))
    rules.apply_to(asking)
    asking.options = hardened(asking.options)
    completed(asking, TENSORS)


def test_options_that_do_not_fit_what_a_model_completes_are_refused() -> None:
    asking = model(INSTANCES_PER_PROCESS="2")
    HostingRules().apply_to(asking)
    with pytest.raises(ConfigError, match="sequences belong to one instance each"):
        completed(asking, {**TENSORS, "sequence_batching": {}})


# Fields of a configuration

# All numbers that a configuration may have, each with what bounds the memory and the time that it costs the runtime.
# Lists and maps have limits of their own (`ConfigLimits`), and texts those of the whole.
GRANT, LIMIT, OWN, UNUSED = "needs a grant", "has a limit", "is the model's own", "has no effect"
NUMBERS = {
    "ModelConfig.max_batch_size": OWN,
    "ModelVersionPolicy.Latest.num_versions": LIMIT,
    "ModelOptimizationPolicy.gather_kernel_buffer_threshold": UNUSED,
    "ModelOptimizationPolicy.Graph.level": UNUSED,
    "ModelOptimizationPolicy.Cuda.GraphSpec.batch_size": UNUSED,
    "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound.batch_size": UNUSED,
    # Requests wait longer, and their callers leave when they like.
    "ModelDynamicBatching.max_queue_delay_microseconds": OWN,
    "ModelDynamicBatching.priority_levels": LIMIT,
    "ModelDynamicBatching.default_priority_level": OWN,
    "ModelQueuePolicy.default_timeout_microseconds": OWN,
    "ModelQueuePolicy.max_queue_size": OWN,
    "ModelSequenceBatching.max_sequence_idle_microseconds": GRANT,
    "ModelSequenceBatching.StrategyDirect.max_queue_delay_microseconds": OWN,
    "ModelSequenceBatching.StrategyDirect.minimum_slot_utilization": OWN,
    # A slot takes memory once a client has begun a sequence.
    "ModelSequenceBatching.StrategyOldest.max_candidate_sequences": OWN,
    "ModelSequenceBatching.StrategyOldest.max_queue_delay_microseconds": OWN,
    "ModelEnsembling.max_inflight_requests": OWN,
    "ModelEnsembling.Step.model_version": OWN,
    "ModelInstanceGroup.count": LIMIT,
    "ModelInstanceGroup.SecondaryDevice.device_id": UNUSED,
    "ModelRateLimiter.priority": OWN,
    # Under the operator's rate limiter, where others would wait for it.
    "ModelRateLimiter.Resource.count": GRANT,
    # So have the strings of its samples, each of which the runtime counts.
    "ModelWarmup.batch_size": LIMIT,
    # The deadline of the load.
    "ModelWarmup.count": LIMIT,
}


def test_each_number_of_a_configuration_has_something_that_bounds_its_cost() -> None:
    """A new field fails here until somebody has said what bounds it."""
    kinds = ("int32", "int64", "uint32", "uint64", "float", "double")
    found = {
        f"{message}.{field}"
        for message, fields in MESSAGES.items()
        for field, kind in fields.items()
        if kind.rstrip("?") in kinds
    }
    assert found == set(NUMBERS)


_MANY = {"data_type": "TYPE_STRING", "dims": [(1 << 19) + 1], "zero_data": True}
STRINGS = {"name": "s", "batch_size": 1, "inputs": {"T": _MANY}}


def checked(raw: dict[str, Any]) -> None:
    """Check a stranger's configuration as a load does."""
    here = Path("/models/m")
    ConfigLimits().check(raw, Source())
    source = ModelSource("triton", here / "model.py", None, here, here)
    asking = model_of("m", source, minimal("m") | raw, None, 1, {})
    ConfigLimits().check_instances(asking.config.instance_groups, 1, asking.config.source)
    HostingRules("strict").apply_to(asking)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ({"instance_group": [{"kind": "KIND_CPU", "count": 1 << 30}]}, r"instance_group.*count"),
        ({"dynamic_batching": {"priority_levels": 1 << 40}}, "priority_levels"),
        ({"model_warmup": [{"name": "s", "batch_size": 1 << 30}]}, "batch_size"),
        ({"model_warmup": [STRINGS, STRINGS]}, "more than 1048576 strings"),
        ({"instance_group": [{"kind": "KIND_GPU"}]}, "GPUS=all"),
        ({"input": [{"name": "X"}] * 5000}, "input"),
        ({"parameters": {f"p{i}": {"string_value": ""} for i in range(5000)}}, "parameters"),
    ],
)
def test_numbers_and_lists_that_are_too_large_are_refused(raw: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        checked(raw)
