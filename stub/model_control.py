"""What a model calls to load, unload and look at other models: checks arguments, then asks the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.messages import LARGEST_CONFIG, MAX_FILE_BYTES, MAX_FILES, SHORT
from moonpool.ipc.texts import size_of
from moonpool.stub.errors import TritonModelException, as_text, shown
from moonpool.stub.host import current

if TYPE_CHECKING:
    from collections.abc import Mapping


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model, and return when it is ready. Raises TritonModelException.

    A loaded model is replaced if it was changed, else left alone. `config` is a whole configuration in
    JSON, in place of the one in the model's directory; `files` maps `file:<path>` to contents, which are
    the model's directory then.
    """
    if not (_is_text(model_name) and _is_text(config)):
        signature = "model_name: str, config: str = '', files: object = None"
        raise _bad("load_model", signature, "None", (model_name, config))
    name = _sendable("name of a model", model_name)
    text = _sendable("configuration", config, LARGEST_CONFIG)
    current().load_model(name, text, _checked(name, files))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model; does not wait. A model that is not loaded is no error."""
    if not (_is_text(model_name) and _is_flag(unload_dependents)):
        signature = "model_name: str, unload_dependents: bool = False"
        raise _bad("unload_model", signature, "None", (model_name, unload_dependents))
    current().unload_model(_sendable("name of a model", model_name), bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a request to this model could run now; an empty version is the latest.

    False for models that are not loaded. Raises TritonModelException for a version that is none.
    """
    if not (_is_text(model_name) and _is_text(model_version)):
        signature = "model_name: str, model_version: str = ''"
        raise _bad("is_model_ready", signature, "bool", (model_name, model_version))
    return current().is_model_ready(
        _sendable("name of a model", model_name), _sendable("version", model_version)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, (str, bytes))


def _sendable(what: str, given: str | bytes, most: int = SHORT) -> str:
    text = as_text(given)
    size_bytes = size_of(text)
    if size_bytes > most:
        raise TritonModelException(f"a {what} of {size_bytes} bytes; {most} is the most")
    return text


def _is_flag(value: object) -> bool:
    return value is not None and hasattr(type(value), "__bool__")


def _checked(name: str, files: object) -> dict[str, bytes] | None:
    if files is None:
        return None
    if not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{name}', files should be a dictionary of file paths and file "
            "contents"
        )
    if len(files) > MAX_FILES:
        raise TritonModelException(f"{len(files)} files for a model; {MAX_FILES} is the most")
    for path, content in files.items():
        if not _is_text(path):
            raise TypeError(f"Object of type '{type(path).__name__}' is not an instance of 'str'")
        if not isinstance(content, bytes):
            raise TypeError(
                f"Object of type '{type(content).__name__}' is not an instance of 'bytes'"
            )
        if len(content) > MAX_FILE_BYTES:
            raise TritonModelException(
                f"a file of {len(content)} bytes for a model; {MAX_FILE_BYTES} is the most"
            )
    return {_sendable("path", path): content for path, content in files.items()}


def _bad(function: str, signature: str, returned: str, given: tuple[object, ...]) -> TypeError:
    invoked = ", ".join(map(shown, given))
    return TypeError(
        f"{function}(): incompatible function arguments. The following argument types are "
        f"supported:\n    1. ({signature}) -> {returned}\n\nInvoked with: {invoked}"
    )
