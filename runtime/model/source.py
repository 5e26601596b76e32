"""The source of a model's code: a version directory of a repository, a file, or a class."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.process.files import read_file

# The largest file of a model in Python. It is code, not data.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The code that the stub loads. `kind` is `triton` or `native`.

    The file of a Python-based backend lies outside the model's directories.
    """

    kind: str
    file: Path
    class_name: str | None
    # `<repository>/<model>` and `<repository>/<model>/<version>`; for a lone file, its folder.
    model_directory: Path
    version_directory: Path
    # True if the directory and all that is in it belong to the model.
    is_directory: bool = False
    # A digest of all files, if the directory was made for one load. The next load of the same files has another one.
    content: str = ""

    def without_links(self) -> ModelSource:
        """Return the same source by its real paths, for a process that does not see the links on the way."""
        return replace(
            self,
            file=self.file.resolve(),
            model_directory=self.model_directory.resolve(),
            version_directory=self.version_directory.resolve(),
        )


def of_file(path: str | os.PathLike[str]) -> ModelSource:
    """Describe one Python file. It is of Triton's kind if it contains `TritonPythonModel`. Raises `LoadFailed`."""
    file = Path(os.path.abspath(path))
    if not file.is_file():
        raise LoadFailed(f"Python model file not found in '{file}'", stage="find")
    try:
        text = read_file(file, _MOST_BYTES)
    except OSError as error:
        raise LoadFailed(f"cannot read '{file}': {error.strerror}", stage="find") from error
    kind = "triton" if b"TritonPythonModel" in text else "native"
    return ModelSource(kind, file, None, file.parent, file.parent)


def file_of_class(model_class: type) -> Path | None:
    """Return the file that a class is defined in; None for a class that was typed into a session."""
    try:
        found = inspect.getsourcefile(model_class)
    except (TypeError, OSError):
        found = None
    return None if found is None or not os.path.isfile(found) else Path(os.path.abspath(found))


def of_class(model_class: type, file: Path) -> ModelSource:
    """Describe a class, which the stub imports anew from a file. Raises `LoadFailed`."""
    if "<locals>" in model_class.__qualname__:
        raise LoadFailed(
            f"class {model_class.__qualname__} is defined inside a function; a stub cannot reach it "
            "there, so move it to the top level of its file",
            stage="find",
        )
    kind = "triton" if model_class.__name__ == "TritonPythonModel" else "native"
    return ModelSource(kind, file, model_class.__qualname__, file.parent, file.parent)
