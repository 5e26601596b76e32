"""The configuration of a model, completed and checked: what the rest of the runtime reads.

`config.pbtxt`, a dict from Python and what a model completes itself all become the same raw form, Triton's JSON
(`normalise`). The raw form becomes a `ModelConfig`, with everything checked that can be wrong. The error texts that
Triton has are Triton's.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from moonpool.ipc.messages import MAX_DIMS
from moonpool.runtime.model.checksums import Checksum, checksums
from moonpool.runtime.model.config.ensembles import ENSEMBLE, ensemble_scheduling
from moonpool.runtime.model.config.ensembles import EnsembleScheduling as EnsembleScheduling
from moonpool.runtime.model.config.schema import MESSAGES, ONE_OF, in_order, shaped, shaped_part
from moonpool.runtime.model.config.schema import Raw as Raw
from moonpool.runtime.model.config.sequences import SequenceBatching as SequenceBatching
from moonpool.runtime.model.config.sequences import SequenceControl as SequenceControl
from moonpool.runtime.model.config.sequences import SequenceState as SequenceState
from moonpool.runtime.model.config.sequences import sequence_batching
from moonpool.runtime.model.config.source import ConfigError as ConfigError
from moonpool.runtime.model.config.source import Source as Source
from moonpool.runtime.model.config.source import part
from moonpool.runtime.model.config.templates import in_strings
from moonpool.runtime.model.config.warmup import WarmupSample, warmup_samples


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or an output. `datatype` is the wire name, -1 in `dims` is any size.

    `dims` leaves out the batch dimension of models with a maximum batch size. Until the model has
    completed its configuration, `datatype` and `dims` may be empty.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    # True if requests whose shapes of this input differ may share a batch.
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """So many of a resource, which an instance needs while it executes: of its own device, or of one that all devices
    share.
    """

    name: str
    is_global: bool
    count: int


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The resources of an instance, and its priority: with 2, it executes half as often as with 1 while resources are
    short.
    """

    resources: tuple[RateLimitResource, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of one kind: CPU, GPU, MODEL or AUTO. For GPU there are `count` of them on each of `gpus`."""

    name: str
    kind: str
    count: int = 1
    gpus: tuple[int, ...] = ()
    rate_limits: RateLimits = RateLimits()
    # The name of the policy that says on which processors they run; "" for that of their kind.
    host_policy: str = ""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits on the time and the number of requests that wait. A timeout or size of 0 is no limit."""

    timeout_action: str = "REJECT"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Joins requests into batches. With 0 priority levels there are no priorities."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: Mapping[int, QueuePolicy] = field(default_factory=lambda: MappingProxyType({}))

    def queue_policy(self, priority_level: int) -> QueuePolicy:
        return self.priority_queue_policies.get(priority_level, self.default_queue_policy)

    @property
    def policies(self) -> tuple[QueuePolicy, ...]:
        """All policies that a request may meet."""
        return self.default_queue_policy, *self.priority_queue_policies.values()

    @property
    def rejects_late(self) -> bool:
        """True if a request may be rejected because it has waited too long."""
        return any(each.default_timeout_us and each.timeout_action == "REJECT" for each in self.policies)


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Chooses the versions to load: the `count` latest, all, or the specific `versions`."""

    kind: str = "latest"
    count: int = 1
    versions: tuple[int, ...] = ()

    def choose(self, available: Iterable[int]) -> list[int]:
        """Return the versions to load out of the available ones, ascending. May be empty."""
        present = sorted(set(available))
        if self.kind == "specific":
            return [version for version in present if version in self.versions]
        return present if self.kind == "all" else present[-self.count :]


PYTHON_BACKEND = "python"
MODEL_FILENAME = "model.py"
# The file that a version has for each backend. If the configuration names no backend, they are tried in this order.
FILENAMES = {PYTHON_BACKEND: MODEL_FILENAME, "onnxruntime": "model.onnx", "pytorch": "model.pt"}
# The backends of moonpool that run a library's own format. They act on fields that Triton's Python backend ignores.
_OF_LIBRARIES = FILENAMES.keys() - {PYTHON_BACKEND}
# Files of backends that moonpool does not have. With their names the error says which backend is missing, as in Triton.
FILENAMES_ELSEWHERE = {"tensorrt": "model.plan", "tensorflow": "model.savedmodel", "openvino": "model.xml"}
_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
_SEQUENCE_IDLE_MICROSECONDS = 1_000_000


def minimal(name: str, backend: str = PYTHON_BACKEND) -> Raw:
    """Return the configuration of a model that has none."""
    return normalise({"name": name, "backend": backend})


def normalise(raw: Mapping[str, object], source: Source | None = None) -> Raw:
    """Return a configuration with all of Triton's defaults, in the form that Triton prints.

    Needs no protobuf. The argument is not changed; normalising twice changes nothing. Raises
    ConfigError for unknown fields and wrong types.
    """
    source = source or Source()
    result = shaped(raw, source)
    result.setdefault("version_policy", {"latest": {"num_versions": 1}})
    result["backend"] = result["backend"] or _implied_backend(result)
    if result["default_model_filename"] == "":
        result["default_model_filename"] = FILENAMES.get(result["backend"], "")
    _default_batching(result)
    if "ensemble_scheduling" not in result:
        optimization = result.setdefault("optimization", {})
        optimization.setdefault("input_pinned_memory", {"enable": True})
        optimization.setdefault("output_pinned_memory", {"enable": True})
        # Again, to put the added fields in the order of the schema.
        result["optimization"] = shaped_part("optimization", optimization, source)
    return in_order(result)


def _implied_backend(raw: Raw) -> str:
    if raw["platform"] in _PLATFORMS:
        return _PLATFORMS[raw["platform"]]
    for backend, filename in FILENAMES.items():
        if raw["default_model_filename"].partition(":")[0] == filename:
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


# Messages and fields that moonpool acts on. All other fields that are set are reported, so that none is silently
# ignored.
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
            "ensemble_scheduling",
            "instance_group",
            "default_model_filename",
            "metric_tags",
            "model_metrics",
            "model_transaction_policy",
            "parameters",
            "model_warmup",
            "model_repository_agents",
            "response_cache",
        ]
    ),
    "ModelRepositoryAgents": frozenset(["agents"]),
    "ModelResponseCache": frozenset(["enable"]),
    "ModelRepositoryAgents.Agent": frozenset(["name", "parameters"]),
    "ModelWarmup": frozenset(MESSAGES["ModelWarmup"]),
    "ModelWarmup.Input": frozenset(MESSAGES["ModelWarmup.Input"]),
    "ModelTransactionPolicy": frozenset(["decoupled"]),
    "ModelVersionPolicy": frozenset(MESSAGES["ModelVersionPolicy"]),
    "ModelVersionPolicy.Latest": frozenset(["num_versions"]),
    "ModelVersionPolicy.All": frozenset(),
    "ModelVersionPolicy.Specific": frozenset(["versions"]),
    "ModelInput": frozenset(
        [
            "name",
            "data_type",
            "format",
            "dims",
            "reshape",
            "is_shape_tensor",
            "allow_ragged_batch",
            "optional",
            "is_non_linear_format_io",
        ]
    ),
    "ModelTensorReshape": frozenset(["shape"]),
    "ModelOutput": frozenset(MESSAGES["ModelOutput"]),
    "ModelDynamicBatching": frozenset(MESSAGES["ModelDynamicBatching"]),
    "ModelQueuePolicy": frozenset(MESSAGES["ModelQueuePolicy"]),
    **{name: frozenset(MESSAGES[name]) for name in MESSAGES if name.startswith("ModelSequence")},
    **{name: frozenset(MESSAGES[name]) for name in MESSAGES if name.startswith("ModelMetrics")},
    **{name: frozenset(MESSAGES[name]) for name in MESSAGES if name.startswith("ModelEnsembling")},
    "ModelInstanceGroup": frozenset(["name", "kind", "count", "gpus", "rate_limiter", "host_policy"]),
    "ModelRateLimiter": frozenset(MESSAGES["ModelRateLimiter"]),
    "ModelRateLimiter.Resource": frozenset(MESSAGES["ModelRateLimiter.Resource"]),
    "ModelParameter": frozenset(["string_value"]),
}


class Remark(NamedTuple):
    """A field of a configuration that does something else than its author may expect, or nothing."""

    field: str
    what: str


# The most parameters that a remark names.
_MOST_UNFILLED = 20


def remarks(raw: Mapping[str, object]) -> list[Remark]:
    """Return what the log and `moonpool check` say of a configuration that can be used."""
    found = [Remark(field, "has no effect in moonpool") for field in unused_fields(raw)]
    full = normalise(raw)
    if unfilled := [key for key, value in full["parameters"].items() if in_strings(value["string_value"])]:
        shown = ", ".join(unfilled[:_MOST_UNFILLED])
        shown += f" and {len(unfilled) - _MOST_UNFILLED} more" * (len(unfilled) > _MOST_UNFILLED)
        what = f"has values that look like places of a template that is not filled in: {shown}"
        found.append(Remark("parameters", what))
    for side in ("input", "output"):
        names = Counter(io["name"] for io in full[side])
        found += [
            Remark(side, f"declares '{name}' {count} times, and the first one counts")
            for name, count in names.items()
            if count > 1
        ]
    return found


def unused_fields(raw: Mapping[str, object]) -> list[str]:
    """Return the fields that are set and that moonpool does not act on.

    They are paths without indices, such as `optimization.cuda`, in the order of the schema, each once. A field
    at its default counts as not set.
    """
    full = normalise(raw)
    unused = dict.fromkeys(_unused("ModelConfig", full, ""))
    # Fields that the backend of the model reads itself.
    if full["backend"] not in ("", PYTHON_BACKEND):
        unused.pop("optimization", None)
    if full["backend"] in _OF_LIBRARIES:
        unused.pop("batch_input", None)
        unused.pop("batch_output", None)
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


# The values that Triton sets if the file has none.
_FILLED_IN = {
    "optimization": {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }
}


def _is_set(path: str, value: object) -> bool:
    if value == _FILLED_IN.get(path):
        return False
    if isinstance(value, Mapping):
        return any(_is_set("", item) for item in value.values())
    return value is not None and value not in ("", 0, False, [], {})


# Triton serves these signs unquoted over HTTP and gRPC. It fails or hangs with spaces and other alphabets.
_NAME = re.compile(r"[A-Za-z0-9_.+,=@:-]+")
_BACKEND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The longest name of a model, a tensor, an instance group and so on. Together with the number of an instance it fits
# any message.
MAX_NAME_BYTES = 512
_IS_NAME = re.compile("(^|_)(name|filename)$")
_ILLEGAL = frozenset(";|&$`<>()[]{}\\\"'*?~#!")


def name_problem(name: str) -> str:
    """Describe what is wrong with a model's name, "" for nothing."""
    if not name:
        return "model configuration must specify 'name'"
    if _ILLEGAL.intersection(name):
        return "Invalid stub name: contains invalid characters"
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_BYTES or name in (".", ".."):
        return f"model name {name[:80]!r} must be 1 to {MAX_NAME_BYTES} letters, digits and signs of '_.-+,=@:'"
    return ""


def _check_lengths(raw: object, source: Source, path: str = "") -> None:
    """Check the length and encoding of every name in a configuration. Messages, logs and paths have limits."""
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            here = f"{path}.{key}" if path else str(key)
            if isinstance(value, str) and _IS_NAME.search(str(key)):
                _check_length(value, here, source)
            else:
                _check_lengths(value, source, here)
    elif isinstance(raw, (list, tuple)):
        for index, item in enumerate(raw):
            _check_lengths(item, source, f"{path}[{index}]")


def _check_length(name: str, path: str, source: Source) -> None:
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise source.error(path, f"is not Unicode text: {error}") from error
    if size_bytes > MAX_NAME_BYTES:
        what = f"has {size_bytes} bytes, and {MAX_NAME_BYTES} is the most for a name"
        source.mistake(path, what)


def _check_names(raw: Raw, source: Source) -> None:
    """Check the names of the model, of its backend and of its file."""
    _check_lengths(raw, source)
    if problem := name_problem(raw["name"]):
        source.mistake("name", problem)
    name, backend, platform = raw["name"], raw["backend"], raw["platform"]
    if platform == ENSEMBLE:
        return
    if not backend:
        what = (
            f"unexpected platform type '{platform}' for {name}; specify as backend one of {', '.join(FILENAMES)}, or "
            "the name of a Python-based backend"
        )
        source.mistake("backend", what)
    elif not _is_backend(backend):
        source.mistake("backend", f"is not the name of a backend: {backend[:80]!r} for {name}")
    _check_filename(raw["default_model_filename"], "default_model_filename", backend, source)
    _check_filename(raw["runtime"], "runtime", "", source)


def _is_backend(name: str) -> bool:
    return _BACKEND.fullmatch(name) is not None and name not in (".", "..")


# Fields that change what a model computes, or which file is served, with what moonpool would do instead.
_REFUSED = {
    "cc_model_filenames": "would serve default_model_filename on every GPU",
    "model_operations": "would not load these libraries",
}


def _check_refused(raw: Raw, source: Source) -> None:
    """Refuse fields without which a model would give other results.

    Those of `_REFUSED` are for the backends of ONNX and PyTorch. Triton's Python backend ignores them, too.
    """
    for name, instead in _REFUSED.items():
        if raw["backend"] in _OF_LIBRARIES and _is_set(name, raw.get(name)):
            what = f"has no effect in moonpool, which {instead} of '{raw['name']}'"
            source.mistake(name, what)
    for index, group in enumerate(raw["instance_group"]):
        if group["passive"]:
            what = "moonpool has no passive instances: this one would get requests; take it out"
            source.mistake(f"instance_group[{index}].passive", what)


def _check_batch_tensors(raw: Raw, source: Source, *, partial: bool) -> None:
    """Check `batch_input` and `batch_output`, of every backend as in Triton: names, unless the model has yet to
    complete them.
    """
    suffix = f" for {raw['name']}"
    inputs = {each["name"]: each for each in raw["input"]}
    outputs = {each["name"]: each for each in raw["output"]}
    for side in ("batch_input", "batch_output"):
        for index, given in enumerate(raw[side]):
            path, sources = f"{side}[{index}]", given["source_input"]
            if len(sources) != 1:
                what = f"{side.replace('_', ' ')} kind '{given['kind']}' expects 1 source input, got {len(sources)}"
                source.mistake(f"{path}.source_input", what + suffix)
            if side == "batch_input" and given["data_type"] not in ("TYPE_INT32", "TYPE_FP32"):
                what = "batch input data type must be TYPE_INT32 or TYPE_FP32"
                source.mistake(f"{path}.data_type", what + suffix)
            if partial or len(sources) != 1:
                continue
            if sources[0] not in inputs:
                what = f"unknown source input name '{sources[0]}'"
                source.mistake(f"{path}.source_input", what + suffix)
            elif side == "batch_output":
                _check_scattered(given["target_name"], inputs[sources[0]], outputs, path, raw, source)


def _check_scattered(
    targets: Sequence[str], from_: Raw, outputs: Mapping[str, Raw], path: str, raw: Raw, source: Source
) -> None:
    """Check the outputs of a batch that are cut as the input `from_` is."""
    suffix = f" for {raw['name']}"
    for index, target in enumerate(targets):
        if target not in outputs:
            what = f"unknown target output name '{target}'"
            source.mistake(f"{path}.target_name", what + suffix)
            continue
        if target in targets[:index]:
            what = f"target output name '{target}' can only be specified once"
            source.mistake(f"{path}.target_name", what + suffix)
        beyond = _seen_by_model(outputs[target])[len(_seen_by_model(from_)) :]
        # In Triton, such a size is whatever lies behind the shape in memory.
        if raw["backend"] in _OF_LIBRARIES and -1 in beyond:
            what = f"output '{target}' has variable dimensions that its source input '{from_['name']}' lacks"
            source.mistake(f"{path}.target_name", what + suffix)


def _seen_by_model(io: Raw) -> list[int]:
    dims: list[int] = io["reshape"]["shape"] if "reshape" in io else io["dims"]
    return dims


# One that a class or a function of the file may follow: `two.py:A`.
_PYTHON_FILE = re.compile(r".*\.py(:[^\W\d][\w.]*)?", re.DOTALL)


def _check_filename(filename: str, field: str, backend: str, source: Source) -> None:
    if "/" in filename or "\0" in filename or filename in (".", ".."):
        source.mistake(field, f"must be a file name without directories, not {filename!r}")
    if backend == PYTHON_BACKEND and not _PYTHON_FILE.fullmatch(filename):
        what = f"Model name must end with '.py'. Model name is \"{filename}\"."
        source.mistake(field, what)


def _max_batch_size(raw: Raw, source: Source) -> int:
    size: int = raw["max_batch_size"]
    if size < 0:
        what = f"'max_batch_size' must be non-negative value for {raw['name']}"
        source.mistake("max_batch_size", what)
    return size


def _tensors(raw: Raw, side: str, source: Source, *, partial: bool) -> tuple[TensorConfig, ...]:
    """Read the inputs or the outputs. `side` is "input" or "output"."""
    result = []
    for index, io in enumerate(raw[side]):
        path = f"{side}[{index}]"
        with part():
            result.append(_tensor(io, raw, f"model {side} ", path, source, partial=partial))
        is_known = bool(io["dims"]) or not partial
        if is_known and io.get("format", "FORMAT_NONE") != "FORMAT_NONE" and len(io["dims"]) != 3:
            what = f"model input NHWC/NCHW require 3 dims for {raw['name']}"
            source.mistake(f"{path}.format", what)
    if not partial:
        _check_present(raw, side, source)
    return tuple(result)


def _once(tensors: Iterable[TensorConfig]) -> tuple[TensorConfig, ...]:
    """Return the first tensor of each name."""
    found: dict[str, TensorConfig] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, tensor)
    return tuple(found.values())


def _check_present(raw: Raw, side: str, source: Source) -> None:
    name = raw["name"]
    if not raw["input"] and not raw["output"]:
        what = f"must specify inputs and outputs for {name}, here or in auto_complete_config"
        source.mistake(side, what)
    elif side == "input" and not raw["input"] and raw["max_batch_size"] > 0:
        what = f"a model with max_batch_size > 0 needs an input to batch for {name}"
        source.mistake(side, what)


# Fields of tensors that only TensorRT acts on, with Triton's texts for all other backends.
_OF_TENSORRT = {
    "is_shape_tensor": "shape tensors are only supported for TensorRT platform",
    "is_non_linear_format_io": "Non-linear IO format is only supported for the TensorRT platform",
}


def _tensor(io: Raw, raw: Raw, prefix: str, path: str, source: Source, *, partial: bool) -> TensorConfig:
    suffix = f" for {raw['name']}"
    if not io["name"]:
        raise source.error(f"{path}.name", f"{prefix}must specify 'name'{suffix}")
    prefix += f"'{io['name']}' "
    if io["data_type"] == "TYPE_INVALID" and not partial:
        source.mistake(f"{path}.data_type", f"{prefix}must specify 'data_type'{suffix}")
    if not io["dims"] and not partial:
        source.mistake(f"{path}.dims", f"{prefix}must specify 'dims'{suffix}")
    dims = _dims(io["dims"], f"{prefix}dimension", f"{path}.dims", source, suffix)
    rank = len(dims) + (raw["max_batch_size"] > 0)
    if rank > MAX_DIMS:
        what = f"{prefix}has {rank} dimensions with the batch; at most {MAX_DIMS}{suffix}"
        source.mistake(f"{path}.dims", what)
    for name, what in _OF_TENSORRT.items():
        if io[name]:
            source.mistake(f"{path}.{name}", f"{what}{suffix}")
    datatype = io["data_type"].removeprefix("TYPE_")
    return TensorConfig(
        name=io["name"],
        datatype={"STRING": "BYTES", "INVALID": ""}.get(datatype, datatype),
        dims=dims,
        optional=io.get("optional", False),
        reshape=_reshape(io, raw, prefix, path, source),
        ragged=io.get("allow_ragged_batch", False),
    )


def _dims(dims: Sequence[int], prefix: str, path: str, source: Source, suffix: str) -> tuple[int, ...]:
    if any(dim < 1 and dim != -1 for dim in dims):
        what = f"{prefix} must be integer >= 1, or -1 to indicate a variable-size dimension"
        raise source.error(path, what + suffix)
    return tuple(dims)


def _reshape(io: Raw, raw: Raw, prefix: str, path: str, source: Source) -> tuple[int, ...] | None:
    if "reshape" not in io:
        return None
    path, suffix = f"{path}.reshape", f" for {raw['name']}"
    shape = io["reshape"]["shape"]
    if not shape and raw["max_batch_size"] == 0:
        what = "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        raise source.error(path, f"{prefix}{what}{suffix}")
    result = _dims(shape, f"{prefix}reshape dimensions", path, source, suffix)
    if len(result) >= MAX_DIMS:
        raise source.error(path, f"{prefix}has too many reshape dimensions{suffix}")
    ours, theirs = _runs(io["dims"]), _runs(result)
    if io["dims"] and len(ours) != len(theirs) and 1 not in (len(ours), len(theirs)):
        what = "has different number of variable-size dimensions for dims and reshape"
        raise source.error(path, f"{prefix}{what}{suffix}")
    if io["dims"] and ours != theirs:
        raise source.error(path, f"{prefix}has different size for dims and reshape{suffix}")
    return result


def _runs(dims: Sequence[int]) -> list[int]:
    """Return the number of elements in each run of fixed dimensions between the variable ones."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [math.prod(run) for run in runs]


def _version_policy(raw: Raw, source: Source) -> VersionPolicy:
    policy = raw["version_policy"]
    if "specific" in policy:
        versions = tuple(policy["specific"]["versions"])
        if any(version < 0 for version in versions):
            what = f"versions must be integer >= 0 for {raw['name']}"
            source.mistake("version_policy.specific.versions", what)
            return VersionPolicy("all", 0)
        return VersionPolicy("specific", 0, versions)
    if "latest" in policy:
        # An empty `latest {}` has 0 there and means the documented default.
        return VersionPolicy("latest", policy["latest"]["num_versions"] or 1)
    return VersionPolicy("all", 0)


def _instance_groups(raw: Raw, source: Source) -> tuple[InstanceGroup, ...]:
    """Return the instance groups with their names. If there are none, return one of kind AUTO; an ensemble has none."""
    if raw["platform"] == ENSEMBLE:
        return ()
    if not raw["instance_group"]:
        return (InstanceGroup(raw["name"], "AUTO"),)
    groups = [_group(index, group, raw, source) for index, group in enumerate(raw["instance_group"])]
    names = [group.name for group in groups]
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"instance group {name} of model {raw['name']} is specified twice"
            source.mistake(f"instance_group[{index}].name", what)
    return tuple(groups)


def _group(index: int, group: Raw, raw: Raw, source: Source) -> InstanceGroup:
    path = f"instance_group[{index}]"
    name = group["name"] or f"{raw['name']}_{index}"
    title = f"instance group {name} of model {raw['name']}"
    if _ILLEGAL.intersection(name) or "/" in name or not name.isprintable():
        what = "Invalid stub name: contains invalid characters"
        source.mistake(f"{path}.name", what)
    if group["count"] < 0:
        source.mistake(f"{path}.count", f"{title} has the negative count {group['count']}")
    kind, gpus = group["kind"].removeprefix("KIND_"), tuple(group["gpus"])
    if gpus and kind in ("CPU", "MODEL"):
        what = f"{title} has kind KIND_{kind} but specifies one or more GPUs"
        source.mistake(f"{path}.gpus", what)
    if any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
        what = f"{title} must name each GPU once, by an id >= 0, not {list(gpus)}"
        source.mistake(f"{path}.gpus", what)
    limits = _rate_limits(group)
    return InstanceGroup(name, kind, group["count"] or 1, gpus, limits, group["host_policy"])


def _rate_limits(group: Raw) -> RateLimits:
    limits = group.get("rate_limiter") or {}
    resources = tuple(
        RateLimitResource(each["name"], each["global"], each["count"]) for each in limits.get("resources", ())
    )
    return RateLimits(resources, limits.get("priority", 0))


# The option that does without GPUs.
AS_CPU = "MOONPOOL_AS_CPU"
_WITHOUT_GPUS = f"to try the model without, use {AS_CPU}=yes, or `moonpool check --as-cpu`"


def _lacking(error: ConfigError) -> ConfigError:
    error.instead = {AS_CPU: "yes"}
    return error


def _placed(
    group: InstanceGroup, index: int, present: Sequence[int], model: str, source: Source, *, why_none: str = ""
) -> InstanceGroup:
    """Place a group on a machine with the GPUs `present`: replace AUTO, and name the GPUs."""
    kind = group.kind
    if kind == "AUTO":
        kind = "GPU" if present and set(group.gpus) <= set(present) else "CPU"
    if kind != "GPU":
        return replace(group, kind=kind, gpus=())
    path, title = f"instance_group[{index}]", f"instance group {group.name} of model {model}"
    if not present:
        what = f"{title} has kind KIND_GPU but no GPUs are available"
        what += f": {why_none}" if why_none else ""
        raise _lacking(source.error(path, f"{what}; {_WITHOUT_GPUS}"))
    for gpu in group.gpus:
        if gpu not in present:
            what = f"{title} specifies invalid or unsupported gpu id {gpu}"
            shown = ", ".join(map(str, present))
            what += f". GPUs of this machine are: {shown}; {_WITHOUT_GPUS}"
            raise _lacking(source.error(f"{path}.gpus", what))
    return replace(group, kind=kind, gpus=group.gpus or tuple(present))


def _with_groups(raw: Raw, groups: Sequence[InstanceGroup]) -> Raw:
    """Return the raw form with these instance groups."""
    if not groups:
        return raw
    blank: Raw = {"secondary_devices": [], "profile": [], "passive": False, "host_policy": ""}
    given = raw["instance_group"] or [blank] * len(groups)
    decided = [
        {"name": group.name, "kind": f"KIND_{group.kind}", "count": group.count} | {"gpus": list(group.gpus)}
        for group in groups
    ]
    merged = [{**old, **new} for old, new in zip(given, decided, strict=True)]
    return {**raw, "instance_group": merged}


def _dynamic_batching(raw: Raw, source: Source, *, partial: bool = False) -> DynamicBatching | None:
    """Read and check the dynamic batcher, None if there is none. A partial configuration may lack the maximum batch
    size.
    """
    batching = raw.get("dynamic_batching")
    if batching is None:
        return None
    path, suffix = "dynamic_batching", f" for {raw['name']}"
    for index, size in enumerate(batching["preferred_batch_size"]):
        rule = "positive" if size <= 0 else "<= max batch size"
        is_small = size <= raw["max_batch_size"] or (partial and not raw["max_batch_size"])
        if not (size > 0 and is_small):
            what = f"dynamic batching preferred size must be {rule}{suffix}"
            source.mistake(f"{path}.preferred_batch_size[{index}]", what)
    result = DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(batching["preferred_batch_size"]))),
        max_queue_delay_us=batching["max_queue_delay_microseconds"],
        preserve_ordering=batching["preserve_ordering"],
        priority_levels=batching["priority_levels"],
        default_priority_level=batching["default_priority_level"],
        default_queue_policy=_queue_policy(batching.get("default_queue_policy")),
        priority_queue_policies=MappingProxyType(
            {int(k): _queue_policy(v) for k, v in batching["priority_queue_policy"].items()}
        ),
    )
    _check_priorities(result, path, source, suffix)
    _check_ordering(result, path, source, suffix)
    return result


def _queue_policy(policy: Raw | None) -> QueuePolicy:
    if policy is None:
        return QueuePolicy()
    return QueuePolicy(
        policy["timeout_action"],
        policy["default_timeout_microseconds"],
        policy["allow_timeout_override"],
        policy["max_queue_size"],
    )


def _check_priorities(batching: DynamicBatching, path: str, source: Source, suffix: str) -> None:
    levels = batching.priority_levels
    if levels == 0:
        return
    if not 1 <= batching.default_priority_level <= levels:
        what = f"default priority level must be in range [1, {levels}]{suffix}"
        source.mistake(f"{path}.default_priority_level", what)
    for level in batching.priority_queue_policies:
        if not 1 <= level <= levels:
            what = f"priority queue policy must have priority level in range [1, {levels}]{suffix}"
            source.mistake(f"{path}.priority_queue_policy[{level}]", what)


def _check_ordering(batching: DynamicBatching, path: str, source: Source, suffix: str) -> None:
    if not batching.preserve_ordering:
        return
    if batching.priority_levels > 1:
        what = f"Only one priority level is allowed when 'preserve_ordering' is true{suffix}"
        source.mistake(f"{path}.priority_levels", what)
    policies = {f"{path}.default_queue_policy": batching.default_queue_policy}
    for level, policy in batching.priority_queue_policies.items():
        policies[f"{path}.priority_queue_policy[{level}]"] = policy
    for where, policy in policies.items():
        if policy.timeout_action == "DELAY" and policy.default_timeout_us != 0:
            what = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
            source.mistake(f"{where}.timeout_action", what + suffix)


DECOUPLED = "'decoupled' transaction policy"


def _response_cache(raw: Raw, source: Source) -> bool:
    if not raw.get("response_cache", {}).get("enable", False):
        return False
    why = ""
    if raw.get("model_transaction_policy", {}).get("decoupled", False):
        why = DECOUPLED
    elif "sequence_batching" in raw:
        why = "sequence batching scheduler"
    if why:
        source.mistake("response_cache.enable", uncached(raw["name"], why))
    return True


def uncached(name: str, why: str) -> str:
    """Return Triton's text for a model that can have no response cache."""
    return f"Response Cache does not currently support model {name} with {why}. Please disable the response cache."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration after all checks. Immutable.

    `raw` is Triton's JSON form with all defaults; do not write to it.
    """

    name: str
    backend: str
    max_batch_size: int
    # By name, each once.
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    instance_groups: tuple[InstanceGroup, ...]
    dynamic_batching: DynamicBatching | None
    sequence_batching: SequenceBatching | None
    version_policy: VersionPolicy
    warmup: tuple[WarmupSample, ...]
    # True if responses may be kept for equal requests.
    response_cache: bool
    checksums: tuple[Checksum, ...]
    default_model_filename: str
    parameters: Mapping[str, str]
    decoupled: bool
    raw: Raw
    source: Source = field(default_factory=Source, compare=False, repr=False)
    ensemble: EnsembleScheduling | None = None
    # True if a tritonserver keeps the states of sequences.
    has_states_elsewhere: bool = False

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, object],
        *,
        source: Source | None = None,
        partial: bool = False,
        has_states: bool = False,
        has_agents: bool = False,
    ) -> ModelConfig:
        """Check a raw configuration. ConfigError names file, line and field of the first mistake.

        `partial`: the model has yet to complete the configuration, so tensors, their datatypes and their dims may be
        missing. `has_states`: a tritonserver keeps states of sequences and gives them to the model as inputs.
        `has_agents`: a tritonserver has read the configuration, and has checked the files and placed the instances as
        it says.
        """
        source = source or Source()
        full = normalise(raw, source)
        _check_names(full, source)
        if not has_agents:
            _check_refused(full, source)
        _check_batch_tensors(full, source, partial=partial)
        ensemble = ensemble_scheduling(full, source)
        # No code of an ensemble could complete its configuration.
        partial = partial and ensemble is None
        groups = _instance_groups(full, source)
        # No backend is looked for by a name that is a mistake.
        backend = full["backend"] if _is_backend(full["backend"]) else ""
        policy = full.get("model_transaction_policy", {})
        return cls(
            name=full["name"],
            backend=backend if ensemble is None else ENSEMBLE,
            max_batch_size=_max_batch_size(full, source),
            inputs=_once(_tensors(full, "input", source, partial=partial)),
            outputs=_once(_tensors(full, "output", source, partial=partial)),
            instance_groups=groups,
            dynamic_batching=_dynamic_batching(full, source, partial=partial),
            sequence_batching=sequence_batching(full, source, partial=partial, has_states=has_states),
            version_policy=_version_policy(full, source),
            warmup=warmup_samples(full, source),
            response_cache=_response_cache(full, source),
            checksums=() if has_agents else checksums(full, source),
            default_model_filename=full["default_model_filename"],
            parameters=MappingProxyType({key: value["string_value"] for key, value in full["parameters"].items()}),
            decoupled=policy.get("decoupled", False),
            raw=_with_groups(full, groups),
            source=source,
            ensemble=ensemble,
            has_states_elsewhere=has_states,
        )

    @property
    def states(self) -> tuple[SequenceState, ...]:
        """The states of sequences that moonpool keeps for the model."""
        batching = self.sequence_batching
        return () if batching is None or self.has_states_elsewhere else batching.states

    def declared(self, side: str) -> tuple[TensorConfig, ...]:
        """Return the tensors of `input` or `output` as they are declared: one that is there twice is listed twice."""
        return _tensors(self.raw, side, self.source, partial=True)

    @property
    def uses_gpu(self) -> bool:
        """True if any of its instances is on a GPU."""
        return any(group.kind == "GPU" for group in self.instance_groups)

    @property
    def json(self) -> str:
        """The JSON that models get as `model_config`."""
        return json.dumps(self.raw, separators=(",", ":"), ensure_ascii=False)

    def with_decoupled(self, decoupled: bool) -> ModelConfig:
        """Return the configuration of a model that is decoupled, or is not."""
        raw = {**self.raw, "model_transaction_policy": {"decoupled": decoupled}}
        return replace(self, decoupled=decoupled, raw=raw)

    def without_gpus(self) -> ModelConfig:
        """Return the configuration with the instances on the CPU that may be on a GPU: those of the kinds GPU and
        AUTO.
        """
        groups = tuple(
            group if group.kind == "MODEL" else replace(group, kind="CPU", gpus=()) for group in self.instance_groups
        )
        return replace(self, instance_groups=groups, raw=_with_groups(self.raw, groups))

    def placed(self, available_gpus: Iterable[int], why_none: str = "") -> ModelConfig:
        """Return the configuration with its instance groups placed as Triton does it.

        AUTO becomes GPU if there are GPUs and the group's are among them, else CPU. A GPU group that names none gets
        all. Raises ConfigError for a GPU that is not available, with `why_none` if there are none.
        """
        present = sorted(set(available_gpus))
        groups = list(self.instance_groups)
        for index, group in enumerate(self.instance_groups):
            with part():
                groups[index] = _placed(group, index, present, self.name, self.source, why_none=why_none)
        return replace(self, instance_groups=tuple(groups), raw=_with_groups(self.raw, groups))
