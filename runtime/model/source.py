"""The source of a model's code: a version directory of a repository, a file, a class, or a function."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.process.files import read_file

# The largest file of a model in Python. It is code, not data.
_MOST_BYTES = 64 << 20
_TRITONS = "TritonPythonModel"
# A file, and the name of a class or a function in it: `two.py:A`.
_NAMED = re.compile(r"(.*\.py):([^\W\d][\w.]*)", re.DOTALL)
# A class or a function that is a model.
Definition = type | FunctionType
# Each classification reads the labels anew.
_LABELS_BYTES = 4 << 20
# A `tokenizer_config.json` may list all tokens that were added to a vocabulary.
_TEMPLATE_BYTES = 8 << 20
_TEMPLATE, _TOKENIZER = "chat_template.jinja", "tokenizer_config.json"


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

    @property
    def is_native(self) -> bool:
        """True for moonpool's own kind of model."""
        return self.kind == "native"

    def within(self, model_directory: Path, version_directory: Path) -> ModelSource:
        """Return the same source as a part of a model's directory."""
        return replace(self, model_directory=model_directory, version_directory=version_directory, is_directory=True)

    def read_labels(self, filename: str) -> list[str]:
        """Return the lines of a file with labels. Raises OSError and ValueError.

        Clients get these lines, so it must be a file of the model's own: `LeadsOut` is raised for any other.
        """
        own = (self.model_directory, self.version_directory)
        data = read_file(self.model_directory / filename, _LABELS_BYTES, own)
        return data.decode(errors="replace").splitlines()

    def read_chat_template(self, path: str) -> tuple[str, str]:
        """Return the text of a chat template and that of a `tokenizer_config.json`, which has the special tokens and
        perhaps the template. "" stands for a file that is not there. Raises OSError and ValueError.

        The path is that of one of the files, or of a folder with both. In the model's folder, it must not lead out.
        """
        found = self.model_directory / path
        own = () if os.path.isabs(path) else (self.model_directory, self.version_directory)
        files = [found / _TEMPLATE, found / _TOKENIZER]
        if not found.is_dir():
            files = [found.parent, found] if found.suffix == ".json" else [found, found.parent / _TOKENIZER]
        texts = [
            read_file(file, _TEMPLATE_BYTES, own).decode() if file == found or file.is_file() else "" for file in files
        ]
        if not any(texts):
            raise ValueError(f"it has neither {_TEMPLATE} nor {_TOKENIZER}")
        return texts[0], texts[1]

    def without_links(self) -> ModelSource:
        """Return the same source by its real paths, for a process that does not see the links on the way."""
        return replace(
            self,
            file=self.file.resolve(),
            model_directory=self.model_directory.resolve(),
            version_directory=self.version_directory.resolve(),
        )


def split_name(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Split `two.py:A` into a file and the name of the model in it, which is None for a file. A file that has such a
    name is one.
    """
    named = _NAMED.fullmatch(os.fspath(path))
    if named is None or os.path.exists(path):
        return Path(path), None
    return Path(named[1]), named[2]


def of_file(path: str | os.PathLike[str]) -> ModelSource:
    """Describe one Python file, or one model in it (`two.py:A`). Raises `LoadFailed`.

    A file is of Triton's kind if it contains `TritonPythonModel`.
    """
    path, name = split_name(path)
    file = Path(os.path.abspath(path))
    if not file.is_file():
        raise LoadFailed(f"Python model file not found in '{file}'", stage="find")
    try:
        text = read_file(file, _MOST_BYTES)
    except OSError as error:
        raise LoadFailed(f"cannot read '{file}': {error.strerror}", stage="find") from error
    is_tritons = _TRITONS.encode() in text if name is None else name == _TRITONS
    kind = "triton" if is_tritons else "native"
    return ModelSource(kind, file, name if kind == "native" else None, file.parent, file.parent)


def file_of(definition: Definition) -> Path | None:
    """Return the file that a class or function is defined in; None for one that was typed into a session."""
    try:
        found = inspect.getsourcefile(definition)
    except (TypeError, OSError):
        found = None
    return None if found is None or not os.path.isfile(found) else Path(os.path.abspath(found))


def kind_of(definition: Definition) -> str:
    """Return the word for a definition in errors."""
    return "class" if isinstance(definition, type) else "function"


def of_definition(definition: Definition, file: Path) -> ModelSource:
    """Describe a class or a function, which the stub imports anew from a file. Raises `LoadFailed`."""
    if "<" in definition.__qualname__:
        where = "is defined inside a function" if "<locals>" in definition.__qualname__ else "has no name"
        raise LoadFailed(
            f"{kind_of(definition)} {definition.__qualname__} {where}; a stub cannot reach it "
            "there, so move it to the top level of its file",
            stage="find",
        )
    kind = "triton" if definition.__name__ == _TRITONS else "native"
    return ModelSource(kind, file, definition.__qualname__, file.parent, file.parent)
