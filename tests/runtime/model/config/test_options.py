"""Options of a model: every one is read, every bad value refused, the documented table current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import ConfigError, ModelConfig, minimal
from moonpool.runtime.model.config.options import OPTIONS, ModelOptions, options_table, parse_size


def _load(text: str) -> ModelConfig:
    raw, source = pbtxt.parse(text + ' backend: "python"', "config.pbtxt")
    return ModelConfig.from_dict(raw, source=source, partial=True)


def options(**parameters: str) -> ModelOptions:
    raw = minimal("m")
    raw["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
    return ModelOptions.from_parameters(ModelConfig.from_dict(raw, partial=True))


def test_a_model_that_says_nothing_has_the_defaults() -> None:
    assert options(MINE="anything") == ModelOptions()
    assert ModelOptions().load_timeout_s == 120
    assert ModelOptions().execute_timeout_s is None


def test_every_option_is_read() -> None:
    given = options(
        EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env",
        FORCE_CPU_ONLY_INPUT_TENSORS="no",
        MOONPOOL_LOAD_TIMEOUT_S="none",
        MOONPOOL_EXECUTE_TIMEOUT_S="0.25",
        MOONPOOL_FINALIZE_TIMEOUT_S=" 5 ",
        MOONPOOL_SLEEP_TIMEOUT_S="2",
        MOONPOOL_WAKE_TIMEOUT_S="none",
        MOONPOOL_SANDBOX="strict",
        MOONPOOL_SANDBOX_PATHS="/data, rw:/out",
        MOONPOOL_SANDBOX_PORTS="443, 53",
        MOONPOOL_SANDBOX_SYSCALLS="fork",
        MOONPOOL_SANDBOX_MODELS="a*, b",
        MOONPOOL_MAX_RESTARTS="0",
        MOONPOOL_RESTART_WINDOW_S="1e3",
        MOONPOOL_RESTART_BACKOFF_S="0",
        MOONPOOL_RESTART_BACKOFF_MAX_S="10",
        MOONPOOL_RETRY="yes",
        MOONPOOL_MEMORY_LIMIT_BYTES="2G",
        MOONPOOL_TASK_LIMIT="64",
        MOONPOOL_OPEN_FILES="100",
        MOONPOOL_CPUS="0-2, 5",
        MOONPOOL_CPU_WEIGHT="10",
        MOONPOOL_SCRATCH_BYTES="1M",
        MOONPOOL_RECYCLE_REQUESTS="1000",
        MOONPOOL_RECYCLE_RSS_BYTES="1G",
        MOONPOOL_PREFORK="imports",
        MOONPOOL_COMPILE_CACHE="yes",
        MOONPOOL_REGION_BYTES="64K",
        MOONPOOL_REGION_LIMIT_BYTES="1.5M",
        MOONPOOL_BACKLOG_BYTES="2M",
        MOONPOOL_LOG_LINES_PER_S="7",
        MOONPOOL_LOG_ERRORS="full",
        MOONPOOL_THREADS="1",
    )

    expected = ModelOptions(
        "$$TRITON_MODEL_DIRECTORY/env", False, None, 0.25, 5.0, 2.0, None,
        "strict", (("/data", False), ("/out", True)), (443, 53), ("fork",), ("a*", "b"),
        0, 1000.0, 0.0, 10.0, True,
        2 << 30, 64, 100, (0, 1, 2, 5), 10, 1 << 20, 1000, 1 << 30, "imports", True,
        64 << 10, 3 << 19, 2 << 20, 7, "full", 1,
    )  # fmt: skip
    assert given == expected


def test_every_field_has_its_line_in_the_table() -> None:
    assert [option.attribute for option in OPTIONS] == list(ModelOptions.__slots__)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("MOONPOOL_LOAD_TIMEOUT_S", "-1", 'must be a number of seconds above 0, or "none", not'),
        ("MOONPOOL_LOAD_TIMEOUT_S", "nan", "must be a number of seconds above 0"),
        ("MOONPOOL_EXECUTE_TIMEOUT_S", "0", "must be a number of seconds above 0"),
        ("MOONPOOL_EXECUTE_TIMEOUT_S", "1e300", 'must be at most 2000000 seconds, or "none"'),
        ("MOONPOOL_RESTART_WINDOW_S", "inf", "must be at most 2000000 seconds"),
        ("MOONPOOL_CPUS", ",".join(["0-9999"] * 1025), "must be at most 1024 numbers and ranges"),
        ("MOONPOOL_RESTART_WINDOW_S", "none", "must be a number of seconds above 0, not 'none'"),
        ("MOONPOOL_SANDBOX", "Strict", 'must be "off" or "standard" or "best-effort" or "strict", not \'Strict\''),
        ("MOONPOOL_SANDBOX_PATHS", "data", "must be absolute paths without '..'"),
        ("MOONPOOL_SANDBOX_PATHS", "/data/../etc", "must be absolute paths without '..'"),
        ("MOONPOOL_SANDBOX_PATHS", "/data/", "or a '/' at the end"),
        ("MOONPOOL_SANDBOX_PATHS", "rw://data", "'//'"),
        ("MOONPOOL_SANDBOX_PORTS", "0", "must be numbers of TCP ports, from 1 to 65535"),
        ("MOONPOOL_SANDBOX_SYSCALLS", "Fork!", "must be names of system calls"),
        ("MOONPOOL_CPUS", "a-b", "must be numbers of processors, such as 0-3,5"),
        ("MOONPOOL_CPU_WEIGHT", "10001", "must be a weight from 1 to 10000"),
        ("MOONPOOL_PREFORK", "yes", 'must be "no" or "blank" or "imports" or "initialize"'),
        ("MOONPOOL_MAX_RESTARTS", "1.5", "must be a whole number from 0 up"),
        ("MOONPOOL_THREADS", "0", "must be a whole number from 1 up"),
        ("MOONPOOL_RETRY", "", 'must be "yes" or "no"'),
        ("MOONPOOL_REGION_BYTES", "0", "must be a number of bytes above 0"),
        ("MOONPOOL_MEMORY_LIMIT_BYTES", "2X", "such as 1048576, 512K, 64M or 2G"),
        ("MOONPOOL_REGION_LIMIT_BYTES", "1K", "is smaller than MOONPOOL_REGION_BYTES (1048576)"),
        ("MOONPOOL_RESTART_BACKOFF_MAX_S", "0.01", "is less than MOONPOOL_RESTART_BACKOFF_S"),
        ("MOONPOOL_EXECUTE_TIMEOUT", "1", 'did you mean "MOONPOOL_EXECUTE_TIMEOUT_S"?'),
        ("moonpool_sandbox", "off", "no such option for m"),
        ("EXECUTION_ENV_PATH", "", "must be the path of an environment"),
        ("FORCE_CPU_ONLY_INPUT_TENSORS", "x",
         "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: x'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(key: str, value: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**{key: value})

    assert caught.value.field == f"parameters[{key}]"
    assert what in str(caught.value)


def test_a_mistake_is_named_by_line() -> None:
    config = _load('name: "m"\n\nparameters {\n key: "MOONPOOL_RETRY"\n value { } }')

    with pytest.raises(ConfigError, match=r"^config.pbtxt:4: parameters\[MOONPOOL_RETRY\]: "):
        ModelOptions.from_parameters(config)


@example(2**53 + 1, "")
@given(st.integers(1, 2**62), st.sampled_from(["", "K", "M", "G", "T", "k", "KiB", " mb"]))
def test_sizes_are_exact_in_every_unit(number: int, suffix: str) -> None:
    unit = suffix.strip().upper()[:1]
    expected = number * 1024 ** ["", "K", "M", "G", "T"].index(unit)

    try:
        size = parse_size(f"{number}{suffix}")
    except ValueError:
        size = None

    assert size == (expected if expected < 2**63 else None)


@pytest.mark.parametrize("module", ["moonpool.runtime.model.config.options", "moonpool.runtime.server.options.table"])
def test_a_table_is_printed_without_a_warning(module: str) -> None:
    printed = subprocess.run([sys.executable, "-W", "error", "-m", module], capture_output=True, text=True, timeout=60)

    assert (printed.returncode, printed.stderr) == (0, "")
    assert f"`python -m {module}`" in printed.stdout


def test_the_documented_table_is_current() -> None:
    page = Path(__file__).parents[4] / "docs" / "OPTIONS.md"
    if not page.exists():
        pytest.skip("only the tests are here, without the documents")

    assert page.read_text() == options_table()


def test_batches_that_take_too_long_are_looked_for_as_often_as_that_takes() -> None:
    """The looks of all models are on one thread, so a tiny limit costs no more than a small one."""

    def pause_s(limit_s: float | None, *, is_idle: bool) -> float:
        return ModelOptions(execute_timeout_s=limit_s).overdue_pause_s(is_idle=is_idle)

    assert pause_s(10, is_idle=False) == 0.5
    assert pause_s(0.5, is_idle=True) == 0.5
    # The limit may be another one meanwhile.
    assert pause_s(10, is_idle=True) == 1
    assert pause_s(1000, is_idle=True) == 50
    for limit_s in (1e-9, 0.001):
        assert pause_s(limit_s, is_idle=False) == pause_s(limit_s, is_idle=True) == 0.005
