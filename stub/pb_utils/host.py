"""Defines the host of a process, which a model asks for everything outside of the process, and the calls to load
models.

In a stub the host is `hosts.runtime_host.StubHost`, which asks the runtime. A test of a model sets another one with
`use`. Without a host, every call is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence

from moonpool.ipc.messages import LARGEST_CONFIG, MAX_FILE_BYTES, MAX_FILES, SHORT, size_of
from moonpool.stub.pb_utils.errors import TritonModelException, as_text, shown
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import Answer

ONLY_IN_EXECUTE = "BLS is only supported during the 'execute' function."


class Host:
    """Refuses everything with TritonModelException. Subclasses override what they offer.

    Any thread may call any method.
    """

    def infer(self, request: InferenceRequest, decoupled: bool) -> Answer:  # noqa: ARG002
        """Run a request on another model, and wait for it."""
        raise TritonModelException(ONLY_IN_EXECUTE)

    def ainfer(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Answer]:  # noqa: ARG002
        """Do the same as `infer` without blocking the running event loop."""
        raise TritonModelException(ONLY_IN_EXECUTE)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:  # noqa: ARG002
        """Load a model, and return when it is ready. An empty `config` means the one in its directory."""
        raise self.refusal(f"load model '{name}'")

    def unload_model(self, name: str, unload_dependents: bool) -> None:  # noqa: ARG002
        """Begin to unload a model."""
        raise self.refusal(f"unload model '{name}'")

    def is_model_ready(self, name: str, version: str) -> bool:  # noqa: ARG002
        """Return whether a request to this model could run now. An empty `version` means the latest."""
        raise self.refusal(f"check the readiness of model '{name}'")

    def new_metric(
        self,
        name: str,
        description: str,  # noqa: ARG002
        kind: int,  # noqa: ARG002
        labels: Mapping[str, str] | None,  # noqa: ARG002
        buckets: Sequence[float] | None,  # noqa: ARG002
    ) -> int:
        """Make a metric, or only the family if `labels` is None. Returns its number for the other methods.

        `kind` and the operations of `change_metric` are numbers of `ipc.messages`.
        """
        raise self.refusal(f"create metric '{name}'")

    def failure(self, why: str) -> str:
        """Return the text of this host for the reason of a refusal."""
        return why

    def refusal(self, doing: str) -> TritonModelException:
        """Return the error for something that this host does not offer."""
        return TritonModelException(f"Failed to {doing}: no runtime hosts this process.")

    def change_metric(self, metric: int, operation: int, value: float) -> None:  # noqa: ARG002
        """Change a metric, without waiting for it."""
        raise self.refusal(f"change metric {metric}")

    def metric_value(self, metric: int) -> float:
        """Return the value of a metric, with all earlier changes of this process."""
        raise self.refusal(f"read metric {metric}")

    def drop_metric(self, metric: int) -> None:
        """Release a metric. Finalizers call this, so it neither blocks nor takes a lock."""


class _Current:
    host: Host


def current() -> Host:
    """Return the host of this process."""
    return _Current.host


def use(host: Host | None) -> None:
    """Set the host of this process. None refuses everything."""
    _Current.host = InferenceRequest._host = Host() if host is None else host


use(None)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model, and return when it is ready. Raises TritonModelException.

    A loaded model is replaced only if it has changed. `config` is a whole configuration in JSON, which replaces the
    one in the model's directory. `files` maps `file:<path>` to contents, which replace the directory.
    """
    if not (_is_text(model_name) and _is_text(config)):
        signature = "model_name: str, config: str = '', files: object = None"
        raise _bad("load_model", signature, "None", (model_name, config))
    name = _sendable("name of a model", model_name)
    text = _sendable("configuration", config, LARGEST_CONFIG)
    current().load_model(name, text, _checked(name, files))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model, without waiting. It is no error if the model is not loaded."""
    if not (_is_text(model_name) and _is_flag(unload_dependents)):
        signature = "model_name: str, unload_dependents: bool = False"
        raise _bad("unload_model", signature, "None", (model_name, unload_dependents))
    current().unload_model(_sendable("name of a model", model_name), bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a request to this model could run now. An empty version means the latest.

    False for models that are not loaded. Raises TritonModelException for an invalid version.
    """
    if not (_is_text(model_name) and _is_text(model_version)):
        signature = "model_name: str, model_version: str = ''"
        raise _bad("is_model_ready", signature, "bool", (model_name, model_version))
    return current().is_model_ready(_sendable("name of a model", model_name), _sendable("version", model_version))


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
            f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
        )
    if len(files) > MAX_FILES:
        raise TritonModelException(f"{len(files)} files for a model; {MAX_FILES} is the most")
    for path, content in files.items():
        if not _is_text(path):
            raise TypeError(f"Object of type '{type(path).__name__}' is not an instance of 'str'")
        if not isinstance(content, bytes):
            raise TypeError(f"Object of type '{type(content).__name__}' is not an instance of 'bytes'")
        if len(content) > MAX_FILE_BYTES:
            raise TritonModelException(f"a file of {len(content)} bytes for a model; {MAX_FILE_BYTES} is the most")
    return {_sendable("path", path): content for path, content in files.items()}


def _bad(function: str, signature: str, returned: str, given: tuple[object, ...]) -> TypeError:
    invoked = ", ".join(map(shown, given))
    return TypeError(
        f"{function}(): incompatible function arguments. The following argument types are "
        f"supported:\n    1. ({signature}) -> {returned}\n\nInvoked with: {invoked}"
    )
