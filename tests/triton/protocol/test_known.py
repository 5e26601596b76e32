"""The differences that tests know of are those that the page tells, and each has a case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.triton.differences import TESTS
from tests.triton.protocol.known import DIFFERENCES, difference

from moonpool.runtime.conformance.cases import all_cases

PAGE = Path(__file__).parents[3] / "docs" / "site" / "PROTOCOL_DIFFERENCES.md"


@pytest.mark.promise("What the server bears, and whom it answers like", "moonpool answers over HTTP and …")
@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not in the wheel")
def test_every_difference_is_told() -> None:
    rows = re.findall(r"^\| (?!---|\|)(.+?) \| .*\|$", PAGE.read_text(), flags=re.MULTILINE)

    # Rows with tests elsewhere cannot be compared.
    here = {row for row in rows if TESTS[row].startswith("tests/triton/protocol/")}
    assert here == set(DIFFERENCES)


def test_every_difference_has_a_case() -> None:
    assert {difference(case.name) for case in all_cases()} - {None} == set(DIFFERENCES)
