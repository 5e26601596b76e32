"""The suite under a level of the sandbox: `pytest --sandbox strict tests/e2e`.

Models of this process's runtimes that say nothing of their sandbox are at that level then. What they cannot do at
`strict`, by design, is named below; a test whose subject that is says so with `@pytest.mark.needs(...)`, and is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moonpool.ipc.policy import BEST_EFFORT, LEVELS, STRICT
from moonpool.runtime.config_options import ModelOptions

if TYPE_CHECKING:
    from moonpool.runtime.config import ModelConfig

# What no model has at `best-effort` and `strict` unless it was granted.
WITHHELD = {
    "processes": "a model has no processes of its own",
    "files": "a model sees no files but its own and its interpreter's",
    "sockets": "a model has no network",
    "signals": "a model sends signals to nobody but itself",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sandbox",
        choices=LEVELS,
        help="the sandbox of models that say nothing of it; skips tests that need what it withholds",
    )


def pytest_configure(config: pytest.Config) -> None:
    level = config.getoption("--sandbox")
    if level is None:
        return
    read = ModelOptions.from_parameters

    def from_parameters(model_config: ModelConfig) -> ModelOptions:
        options = read(model_config)
        says_nothing = "MOONPOOL_SANDBOX" not in model_config.parameters
        return replace(options, sandbox=level) if says_nothing else options

    # For good: the option is for the whole process.
    ModelOptions.from_parameters = from_parameters  # type: ignore[assignment, method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_contained = config.getoption("--sandbox") in (BEST_EFFORT, STRICT)
    for item in items:
        for mark in item.iter_markers("needs"):
            for need in mark.args:
                if need not in WITHHELD:
                    raise pytest.UsageError(
                        f"{item.nodeid} needs {need!r}, which is not in {__file__}"
                    )
                if is_contained:
                    item.add_marker(pytest.mark.skip(reason=f"in this sandbox {WITHHELD[need]}"))
