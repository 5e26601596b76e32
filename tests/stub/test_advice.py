"""Tests that the text of an error ends with the option that would have prevented it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from moonpool.ipc.policy import Policy
from moonpool.stub import report
from moonpool.stub.report import describe

pytestmark = pytest.mark.promise("Environments", "A model sees the whole environment …")

LIMIT = 1 << 28
MEMORY = "; the instance reached its memory limit of 268435456 bytes (MOONPOOL_MEMORY_LIMIT_BYTES)"


@pytest.fixture(params=["standard", "strict"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    policy = Policy(level=request.param, limits={"memory_bytes": LIMIT})
    monkeypatch.setattr(report, "policy", policy)
    return str(request.param)


def first_line(error: BaseException) -> str:
    return describe(error).split("\n")[0]


def test_a_missing_module_leads_to_the_environment_of_the_model(level: str) -> None:  # noqa: ARG001
    with pytest.raises(ModuleNotFoundError) as raised:
        import nothing_of_that_name.below  # type: ignore[import-not-found]  # noqa: F401
    assert first_line(raised.value) == (
        "ModuleNotFoundError: No module named 'nothing_of_that_name'; install nothing_of_that_name for "
        f"{sys.executable}, under which the model runs, or name an environment that has it in EXECUTION_ENV_PATH"
    )


def test_a_module_in_the_working_folder_leads_to_the_path(
    level: str,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lies_beside.py").touch()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModuleNotFoundError) as raised:
        import lies_beside  # type: ignore[import-not-found]  # noqa: F401
    assert first_line(raised.value) == (
        f"ModuleNotFoundError: No module named 'lies_beside'; lies_beside is in {tmp_path}, where the runtime was "
        f"started, but models do not import from there; start the runtime with PYTHONPATH={tmp_path}"
    )


def test_a_missing_variable_leads_to_who_can_set_it(level: str) -> None:
    for read in (os.environ.__getitem__, os.environ.pop, os.environ.__delitem__):
        with pytest.raises(KeyError) as raised:
            read("MY_ENV")
        assert first_line(raised.value) == "KeyError: 'MY_ENV'" + (
            "; a model in the sandbox 'strict' sees MY_ENV only if it is set for the runtime and MOONPOOL_ENVIRONMENT "
            "names it"
            if level == "strict"
            else "; set MY_ENV for the runtime, whose environment the model has"
        )


def test_another_key_that_is_missing_leads_nowhere(level: str) -> None:  # noqa: ARG001
    with pytest.raises(KeyError) as raised:
        dict(os.environ)["MY_ENV"]
    assert first_line(raised.value) == "KeyError: 'MY_ENV'"


def test_causes_of_an_error_count_unless_they_are_suppressed(level: str) -> None:  # noqa: ARG001
    error = ValueError("no")
    error.__context__ = OSError("between")
    error.__context__.__cause__ = MemoryError()
    assert first_line(error).endswith(MEMORY)
    error.__suppress_context__ = True
    assert first_line(error) == "ValueError: no"
    error.__suppress_context__ = False
    error.__context__.__cause__ = error
    assert first_line(error) == "ValueError: no"


def test_an_error_without_a_reason_counts_for_memory_if_there_is_none(
    level: str,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = SystemError("error return without exception set")
    assert first_line(error) == "SystemError: error return without exception set"
    monkeypatch.setattr(report, "_PIECE_BYTES", 1 << 60)  # no process is given so much
    assert first_line(error).endswith(MEMORY)
    for other in (ValueError("no"), FileNotFoundError(errno.ENOENT, "gone", "/data")):
        assert "limit" not in first_line(other)


def test_an_exception_that_cannot_be_asked_gets_no_advice(level: str) -> None:  # noqa: ARG001
    class Hostile(ModuleNotFoundError):
        @property
        def name(self) -> str:  # type: ignore[override]
            raise SystemExit("asked")

    assert first_line(Hostile("no")) == "Hostile: no"


def test_a_process_that_is_no_stub_gives_no_advice() -> None:
    assert first_line(ModuleNotFoundError("no", name="x")) == "ModuleNotFoundError: no"
