"""The suite under a level of the sandbox: `pytest --sandbox strict tests/e2e`.

Models of this process's runtimes that say nothing of their sandbox are at that level then, with the grants by which a
test deals with its models: they may ask each other, write into the test's `tmp_path`, and import the packages of the
tests. What they cannot do at `strict`, by design, is named below; a test whose subject that is says so with
`@pytest.mark.needs(...)`, and is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from moonpool.ipc.policy import BEST_EFFORT, LEVELS, STRICT
from moonpool.runtime.model.config.options import ModelOptions

if TYPE_CHECKING:
    from moonpool.runtime.model.config.model import ModelConfig

_PACKAGES = (str(Path(np.__file__).resolve().parents[1]), False)
# The paths of the running test. True if they may be written to.
_shared: list[tuple[str, bool]] = []
# No model has these at `best-effort` and `strict` without a grant.
WITHHELD = {
    "processes": "a model has no other processes, and no semaphores to share with them",
    "descriptors": "a model sends none to anybody",
    "names of metrics": "no metric of a model's passes for one of the runtime's",
    "paths in errors": "an error of a model has no paths where others read it",
    "a limit that is not named": "an error for want of memory names the limit",
    "a folder of the test": "models that a run loads once may write to no folder of a later test",
    "no denials": "a stub may tell what its model was refused",
    "shared memory": "a model gets copies of what others have, and they of what it has",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sandbox",
        choices=LEVELS,
        help="the sandbox of models that say nothing of it; skips tests that need what it withholds",
    )


def _is_contained(config: pytest.Config) -> bool:
    return config.getoption("--sandbox") in (BEST_EFFORT, STRICT)


def pytest_configure(config: pytest.Config) -> None:
    level = config.getoption("--sandbox")
    if level is None:
        return
    read = ModelOptions.from_parameters

    def from_parameters(model_config: ModelConfig) -> ModelOptions:
        options = read(model_config)
        if "MOONPOOL_SANDBOX" in model_config.parameters:
            return options
        return replace(
            options,
            sandbox=level,
            sandbox_models=options.sandbox_models or ("*",),
            sandbox_paths=(*options.sandbox_paths, *_shared, _PACKAGES),
        )

    # This is never undone, because the option is for the whole process.
    ModelOptions.from_parameters = from_parameters  # type: ignore[assignment, method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for need in [need for mark in item.iter_markers("needs") for need in mark.args]:
            if need not in WITHHELD:
                raise pytest.UsageError(f"{item.nodeid} needs {need!r}, which {__file__} has not")
            if _is_contained(config):
                item.add_marker(pytest.mark.skip(reason=f"in this sandbox {WITHHELD[need]}"))


@pytest.fixture(autouse=True)
def _models_share_the_folder_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if not _is_contained(request.config) or "tmp_path" not in request.fixturenames:
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    # If the tests run as root, each model is a user of its own.
    folder.chmod(0o777)
    _shared.append((str(folder.resolve()), True))
    yield
    _shared.clear()
