"""Python-based backends: one Python file that serves every model whose configuration names its backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

# Those that come with moonpool, laid out as any other directory of backends.
BUILT_IN = Path(__file__).parent.parent / "stub" / "backends"
FILENAME = "model.py"


class BackendDirectory:
    """Finds the file of a backend: in a directory of the user's, then among those built in.

    Nothing is kept: each call reads the disk.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Raises `LoadFailed` where there is no such directory."""
        self.path = None if path is None else Path(os.path.abspath(path))
        if self.path is not None and not self.path.is_dir():
            raise LoadFailed(f"there is no backend directory {self.path}", stage="backend")

    def find(self, name: str, runtime: str, others: Iterable[str]) -> Path:
        """The file of a backend; `runtime` is the configuration's name for it.

        Raises `LoadFailed`, which tells what there is; `others` are those of another kind.
        """
        looked = []
        for folder in self._folders():
            file = folder / name / (runtime or FILENAME)
            if file.is_file():
                return file
            looked.append(str(file))
        known = ", ".join(sorted({*others, *self._names()}))
        raise LoadFailed(
            f"unable to find backend library for backend '{name}', try specifying runtime on the "
            f"model configuration. (There is no {' and no '.join(looked)}; there are: {known})",
            stage="backend",
        )

    def python_folder(self) -> str:
        """What models of the `python` backend may import beside their own folders; "" for nothing."""
        return "" if self.path is None else str(self.path / "python")

    def _folders(self) -> list[Path]:
        return [BUILT_IN] if self.path is None else [self.path, BUILT_IN]

    def _names(self) -> list[str]:
        return [
            folder.name
            for parent in self._folders()
            for folder in parent.iterdir()
            if (folder / FILENAME).is_file()
        ]
