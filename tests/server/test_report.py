"""The table at a server's start: Triton's, with another column if a model has another sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.inside import registry_of
from tests.server.page.models import write

import moonpool
from moonpool.runtime.server.report import model_table


@pytest.mark.promise(
    "Seeing sandboxes",
    "The table at a server's start is Triton's. It has a column for the sandbox if a "
    "model has another one than the usual.",
)
@pytest.mark.parametrize("level", ["standard", "off"])
def test_the_sandbox_is_a_column_where_it_is_not_the_usual_one(tmp_path: Path, level: str) -> None:
    write(tmp_path, "add_sub")
    config = {"parameters": {"MOONPOOL_SANDBOX": {"string_value": level}}}
    with moonpool.Runtime(tmp_path, models=[]) as runtime:
        runtime.load("add_sub", config=config)
        head, _, row = model_table(registry_of(runtime).statuses()).splitlines()[1:4]

    shown = ["Model", "Version", "Status", "Sandbox"], ["add_sub", "1", "READY", level]
    columns = 3 if level == "standard" else 4
    for line, cells in zip((head, row), shown, strict=True):
        assert [cell.strip() for cell in line.strip("|").split("|")] == cells[:columns]
