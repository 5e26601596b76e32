"""The suite is divided among workers by file or by shared server."""

from __future__ import annotations

from pathlib import Path

from tests.workers import SECONDS, WITH_SERVERS, seconds_of, unit_of

ROOT = Path(__file__).parent.parent


def test_the_listed_units_exist() -> None:
    assert [unit for unit in (*WITH_SERVERS, *SECONDS) if not (ROOT / unit).exists()] == []
    assert {unit_of(f"{unit}/test_any.py" if unit in WITH_SERVERS else unit) for unit in SECONDS} == set(SECONDS)


def test_a_unit_is_a_file_or_a_folder_that_shares_servers() -> None:
    assert unit_of("tests/triton/backend/test_log.py::test_a[b::c]") == "tests/triton/backend"
    assert unit_of("tests/triton/sanitized/test_races.py::test_a") == "tests/triton/sanitized/test_races.py"


def test_a_unit_of_few_long_tests_comes_before_one_of_many_short_ones() -> None:
    assert seconds_of("tests/benchmarks/test_suites.py", 20) > seconds_of(
        "tests/runtime/model/config/test_model.py", 100
    )
