"""pytest plug-in: in a test run, models' `import triton_python_backend_utils` finds moonpool's.

It is a module beside the package, because importing anything of `moonpool` imports numpy, and pytest imports its
plug-ins whether or not a test needs them.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import pytest

NAMES = ("triton_python_backend_utils", "c_python_backend_utils")


class UtilitiesFinder:
    """Finds moonpool's module under the two names, and loads it when one of them is imported.

    It has to be the last on `sys.meta_path`, so that Triton's own module comes first where it is installed.
    """

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in NAMES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let importlib make an empty module, which the next step puts aside."""

    def exec_module(self, module: ModuleType) -> None:
        from moonpool.stub import pb_utils

        # importlib returns whatever stands here afterwards.
        sys.modules[module.__name__] = pb_utils


def install() -> Callable[[], None]:
    """Make the two names importable where they are not; return a function that undoes it."""
    if any(isinstance(finder, UtilitiesFinder) for finder in sys.meta_path):
        return lambda: None
    finder = UtilitiesFinder()
    before = {name: sys.modules[name] for name in NAMES if name in sys.modules}
    sys.meta_path.append(finder)

    def uninstall() -> None:
        sys.meta_path.remove(finder)
        ours = sys.modules.get("moonpool.stub.pb_utils")
        for name in NAMES:
            if name not in before and ours is not None and sys.modules.get(name) is ours:
                del sys.modules[name]

    return uninstall


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the first file of the user's is imported."""
    early_config.add_cleanup(install())
