"""What a configuration means where it says nothing, and what it says that nobody acts on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moonpool.runtime.config_schema import MESSAGES, ONE_OF
from moonpool.runtime.config_shape import Raw, shaped
from moonpool.runtime.config_source import Source

PYTHON_BACKEND = "python"
MODEL_FILENAME = "model.py"
# The file that a version has for these backends, in the order in which they are looked for where
# the configuration names no backend.
FILENAMES = {PYTHON_BACKEND: MODEL_FILENAME, "onnxruntime": "model.onnx", "pytorch": "model.pt"}
_PLATFORMS = {"onnxruntime_onnx": "onnxruntime", "pytorch_libtorch": "pytorch"}
_SEQUENCE_IDLE_MICROSECONDS = 1_000_000


def minimal(name: str, backend: str = PYTHON_BACKEND) -> Raw:
    """The configuration of a model that has none."""
    return normalise({"name": name, "backend": backend})


def normalise(raw: Mapping[str, object], source: Source | None = None) -> Raw:
    """A configuration with all of Triton's defaults filled in, in the form that Triton prints.

    Needs no protobuf.  The argument stays as it is; normalising twice changes nothing.  Raises
    ConfigError for unknown fields and wrong types.
    """
    result = shaped(raw, source or Source())
    result.setdefault("version_policy", {"latest": {"num_versions": 1}})
    result["backend"] = result["backend"] or _implied_backend(result)
    if result["default_model_filename"] == "":
        result["default_model_filename"] = FILENAMES.get(result["backend"], "")
    _default_batching(result)
    if "ensemble_scheduling" not in result:
        optimization = result.setdefault("optimization", {})
        optimization.setdefault("input_pinned_memory", {"enable": True})
        optimization.setdefault("output_pinned_memory", {"enable": True})
    # Once more, which brings what was added to its place in the order of the schema.
    return shaped(result, source or Source())


def _implied_backend(raw: Raw) -> str:
    if raw["platform"] in _PLATFORMS:
        return _PLATFORMS[raw["platform"]]
    for backend, filename in FILENAMES.items():
        if raw["default_model_filename"] == filename:
            return backend
    return ""


def _default_batching(result: Raw) -> None:
    largest: int = result["max_batch_size"]
    batchers = [result.get("dynamic_batching")]
    if sequence := result.get("sequence_batching"):
        sequence["max_sequence_idle_microseconds"] = (
            sequence["max_sequence_idle_microseconds"] or _SEQUENCE_IDLE_MICROSECONDS
        )
        batchers.append(sequence.get("oldest"))
    for batcher in batchers:
        if batcher is not None and largest > 0 and not batcher["preferred_batch_size"]:
            batcher["preferred_batch_size"] = [largest]


# Messages and fields that moonpool acts on.  The rest of the schema is reported, so that a field
# nobody thought of is never passed over in silence.
_ACTED_ON: dict[str, frozenset[str]] = {
    "ModelConfig": frozenset(
        [
            "name",
            "platform",
            "backend",
            "runtime",
            "version_policy",
            "max_batch_size",
            "input",
            "output",
            "dynamic_batching",
            "sequence_batching",
            "instance_group",
            "default_model_filename",
            "metric_tags",
            "model_metrics",
            "model_transaction_policy",
            "parameters",
        ]
    ),
    "ModelTransactionPolicy": frozenset(["decoupled"]),
    "ModelVersionPolicy": frozenset(MESSAGES["ModelVersionPolicy"]),
    "ModelVersionPolicy.Latest": frozenset(["num_versions"]),
    "ModelVersionPolicy.All": frozenset(),
    "ModelVersionPolicy.Specific": frozenset(["versions"]),
    "ModelInput": frozenset(["name", "data_type", "dims", "reshape", "optional"]),
    "ModelTensorReshape": frozenset(["shape"]),
    "ModelOutput": frozenset(["name", "data_type", "dims", "reshape", "label_filename"]),
    "ModelDynamicBatching": frozenset(MESSAGES["ModelDynamicBatching"]),
    "ModelQueuePolicy": frozenset(MESSAGES["ModelQueuePolicy"]),
    **{name: frozenset(MESSAGES[name]) for name in MESSAGES if name.startswith("ModelSequence")},
    **{name: frozenset(MESSAGES[name]) for name in MESSAGES if name.startswith("ModelMetrics")},
    "ModelInstanceGroup": frozenset(["name", "kind", "count", "gpus"]),
    "ModelParameter": frozenset(["string_value"]),
}


def unused_fields(raw: Mapping[str, object]) -> list[str]:
    """The fields that are set to something and that moonpool does not act on yet.

    Paths without indices, such as `input.format`, in the order of the schema, each once.  A field
    at its default counts as not set.
    """
    full = normalise(raw)
    unused = dict.fromkeys(_unused("ModelConfig", full, ""))
    if full["backend"] not in ("", PYTHON_BACKEND):
        # How a model is to be optimized is for its own backend to read.
        unused.pop("optimization", None)
    return list(unused)


def _unused(kind: str, message: Mapping[str, object], prefix: str) -> Iterator[str]:
    for name, type_ in MESSAGES[kind].items():
        value = message.get(name)
        path = prefix + name
        if name not in _ACTED_ON[kind]:
            if value is not None and (name in ONE_OF.get(kind, ()) or _is_set(path, value)):
                yield path
            continue
        inner = type_.rpartition("}")[2].rstrip("*?")
        for item in _items(type_, value) if inner in MESSAGES else ():
            yield from _unused(inner, item, path + ".")


def _items(type_: str, value: object) -> Iterator[Mapping[str, object]]:
    if type_.startswith("{") and isinstance(value, Mapping):
        values = list(value.values())
    else:
        values = value if isinstance(value, list) else [value]
    yield from (item for item in values if isinstance(item, Mapping))


# What Triton sets where the file says nothing.
_FILLED_IN = {
    "optimization": {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    },
    "input.format": "FORMAT_NONE",
}


def _is_set(path: str, value: object) -> bool:
    if value == _FILLED_IN.get(path):
        return False
    if isinstance(value, Mapping):
        return any(_is_set("", item) for item in value.values())
    return value is not None and value not in ("", 0, False, [], {})
