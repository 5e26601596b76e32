"""The schema of a model configuration, without protobuf, and the check of a raw configuration against it.

`MESSAGES` and `ENUMS` repeat the schema of `config.pbtxt`: names, types and enum values. Models that are loaded from Python, and
configurations that a model completes, must be checked without importing protobuf. A test compares every line with the
protobuf descriptors.

A type is a scalar (`string bool int32 int64 uint32 uint64 float double`), an enum or a message. `*` is repeated, `?` a scalar
that may be absent, `{K}V` a map from K to V.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from moonpool.runtime.model.config.source import Source

_MESSAGES = """
ModelConfig = name:string platform:string backend:string runtime:string
    version_policy:ModelVersionPolicy max_batch_size:int32 input:ModelInput* output:ModelOutput*
    batch_input:BatchInput* batch_output:BatchOutput* optimization:ModelOptimizationPolicy
    dynamic_batching:ModelDynamicBatching sequence_batching:ModelSequenceBatching
    ensemble_scheduling:ModelEnsembling instance_group:ModelInstanceGroup*
    default_model_filename:string cc_model_filenames:{string}string metric_tags:{string}string
    parameters:{string}ModelParameter model_warmup:ModelWarmup* model_operations:ModelOperations
    model_transaction_policy:ModelTransactionPolicy
    model_repository_agents:ModelRepositoryAgents response_cache:ModelResponseCache
    model_metrics:ModelMetrics
ModelVersionPolicy = latest:ModelVersionPolicy.Latest all:ModelVersionPolicy.All
    specific:ModelVersionPolicy.Specific
ModelVersionPolicy.Latest = num_versions:uint32
ModelVersionPolicy.All =
ModelVersionPolicy.Specific = versions:int64*
ModelInput = name:string data_type:DataType format:ModelInput.Format dims:int64*
    reshape:ModelTensorReshape is_shape_tensor:bool allow_ragged_batch:bool optional:bool
    is_non_linear_format_io:bool
ModelTensorReshape = shape:int64*
ModelOutput = name:string data_type:DataType dims:int64* reshape:ModelTensorReshape
    label_filename:string is_shape_tensor:bool is_non_linear_format_io:bool
BatchInput = kind:BatchInput.Kind target_name:string* data_type:DataType source_input:string*
BatchOutput = target_name:string* kind:BatchOutput.Kind source_input:string*
ModelOptimizationPolicy = graph:ModelOptimizationPolicy.Graph
    priority:ModelOptimizationPolicy.ModelPriority cuda:ModelOptimizationPolicy.Cuda
    execution_accelerators:ModelOptimizationPolicy.ExecutionAccelerators
    input_pinned_memory:ModelOptimizationPolicy.PinnedMemoryBuffer
    output_pinned_memory:ModelOptimizationPolicy.PinnedMemoryBuffer
    gather_kernel_buffer_threshold:uint32 eager_batching:bool
ModelOptimizationPolicy.Graph = level:int32
ModelOptimizationPolicy.Cuda = graphs:bool busy_wait_events:bool
    graph_spec:ModelOptimizationPolicy.Cuda.GraphSpec* output_copy_stream:bool
ModelOptimizationPolicy.Cuda.GraphSpec = batch_size:int32
    input:{string}ModelOptimizationPolicy.Cuda.GraphSpec.Shape
    graph_lower_bound:ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound
ModelOptimizationPolicy.Cuda.GraphSpec.Shape = dim:int64*
ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound = batch_size:int32
    input:{string}ModelOptimizationPolicy.Cuda.GraphSpec.Shape
ModelOptimizationPolicy.ExecutionAccelerators =
    gpu_execution_accelerator:ModelOptimizationPolicy.ExecutionAccelerators.Accelerator*
    cpu_execution_accelerator:ModelOptimizationPolicy.ExecutionAccelerators.Accelerator*
ModelOptimizationPolicy.ExecutionAccelerators.Accelerator = name:string
    parameters:{string}string
ModelOptimizationPolicy.PinnedMemoryBuffer = enable:bool
ModelDynamicBatching = preferred_batch_size:int32* max_queue_delay_microseconds:uint64
    preserve_ordering:bool priority_levels:uint64 default_priority_level:uint64
    default_queue_policy:ModelQueuePolicy priority_queue_policy:{uint64}ModelQueuePolicy
ModelQueuePolicy = timeout_action:ModelQueuePolicy.TimeoutAction
    default_timeout_microseconds:uint64 allow_timeout_override:bool max_queue_size:uint32
ModelSequenceBatching = direct:ModelSequenceBatching.StrategyDirect
    oldest:ModelSequenceBatching.StrategyOldest max_sequence_idle_microseconds:uint64
    control_input:ModelSequenceBatching.ControlInput* state:ModelSequenceBatching.State*
    iterative_sequence:bool
ModelSequenceBatching.StrategyDirect = max_queue_delay_microseconds:uint64
    minimum_slot_utilization:float
ModelSequenceBatching.StrategyOldest = max_candidate_sequences:int32 preferred_batch_size:int32*
    max_queue_delay_microseconds:uint64 preserve_ordering:bool
ModelSequenceBatching.ControlInput = name:string control:ModelSequenceBatching.Control*
ModelSequenceBatching.Control = kind:ModelSequenceBatching.Control.Kind int32_false_true:int32*
    fp32_false_true:float* bool_false_true:bool* data_type:DataType
ModelSequenceBatching.State = input_name:string output_name:string data_type:DataType
    dims:int64* initial_state:ModelSequenceBatching.InitialState*
    use_same_buffer_for_input_output:bool use_growable_memory:bool
ModelSequenceBatching.InitialState = data_type:DataType dims:int64* zero_data:bool?
    data_file:string? name:string
ModelEnsembling = step:ModelEnsembling.Step* max_inflight_requests:uint32
ModelEnsembling.Step = model_name:string model_version:int64 input_map:{string}string
    output_map:{string}string model_namespace:string
ModelInstanceGroup = name:string kind:ModelInstanceGroup.Kind count:int32
    rate_limiter:ModelRateLimiter gpus:int32*
    secondary_devices:ModelInstanceGroup.SecondaryDevice* profile:string* passive:bool
    host_policy:string
ModelRateLimiter = resources:ModelRateLimiter.Resource* priority:uint32
ModelRateLimiter.Resource = name:string global:bool count:uint32
ModelInstanceGroup.SecondaryDevice = kind:ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind
    device_id:int64
ModelParameter = string_value:string
ModelWarmup = name:string batch_size:uint32 inputs:{string}ModelWarmup.Input count:uint32
ModelWarmup.Input = data_type:DataType dims:int64* zero_data:bool? random_data:bool?
    input_data_file:string?
ModelOperations = op_library_filename:string*
ModelTransactionPolicy = decoupled:bool
ModelRepositoryAgents = agents:ModelRepositoryAgents.Agent*
ModelRepositoryAgents.Agent = name:string parameters:{string}string
ModelResponseCache = enable:bool
ModelMetrics = metric_control:ModelMetrics.MetricControl*
ModelMetrics.MetricControl = metric_identifier:ModelMetrics.MetricControl.MetricIdentifier
    histogram_options:ModelMetrics.MetricControl.HistogramOptions
ModelMetrics.MetricControl.MetricIdentifier = family:string
ModelMetrics.MetricControl.HistogramOptions = buckets:double*
"""

_ENUMS = """
DataType = TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8
    TYPE_INT16 TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16
ModelInput.Format = FORMAT_NONE FORMAT_NHWC FORMAT_NCHW
BatchInput.Kind = BATCH_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO BATCH_MAX_ELEMENT_COUNT_AS_SHAPE BATCH_ITEM_SHAPE
    BATCH_ITEM_SHAPE_FLATTEN
BatchOutput.Kind = BATCH_SCATTER_WITH_INPUT_SHAPE
ModelOptimizationPolicy.ModelPriority = PRIORITY_DEFAULT PRIORITY_MAX PRIORITY_MIN
ModelQueuePolicy.TimeoutAction = REJECT DELAY
ModelSequenceBatching.Control.Kind = CONTROL_SEQUENCE_START CONTROL_SEQUENCE_READY
    CONTROL_SEQUENCE_END CONTROL_SEQUENCE_CORRID
ModelInstanceGroup.Kind = KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL
ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind = KIND_NVDLA
"""

# At most one field of each group may be set.
ONE_OF = {
    "ModelConfig": ("dynamic_batching", "sequence_batching", "ensemble_scheduling"),
    "ModelVersionPolicy": ("latest", "all", "specific"),
    "ModelSequenceBatching": ("direct", "oldest"),
    "ModelSequenceBatching.InitialState": ("zero_data", "data_file"),
    "ModelWarmup.Input": ("zero_data", "random_data", "input_data_file"),
}


def _records(table: str) -> dict[str, list[str]]:
    joined = table.strip().replace("\n    ", " ")
    pairs = (line.split("=", 1) for line in joined.splitlines())
    return {name.strip(): rest.split() for name, rest in pairs}


def _fields(record: list[str]) -> dict[str, str]:
    pairs = (item.split(":", 1) for item in record)
    return dict(pairs)


MESSAGES: dict[str, dict[str, str]] = {
    name: _fields(record) for name, record in _records(_MESSAGES).items()
}
# The position of a value in its list is its number.
ENUMS: dict[str, list[str]] = _records(_ENUMS)


# A configuration in the form of JSON, as Triton prints it. What has passed `shaped` has the types of `MESSAGES`.
Raw = dict[str, Any]

_INTEGERS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
_ZEROS: dict[str, object] = {"string": "", "bool": False, "float": 0.0, "double": 0.0}


def shaped(raw: Mapping[str, object], source: Source) -> Raw:
    """Copy a configuration in Triton's JSON form, and set every missing field to its default.

    Messages that are not set stay absent. Raises ConfigError for unknown fields, wrong types and numbers out of range.
    Nothing else is checked.
    """
    return _message("ModelConfig", raw, "", source)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean "…"?` if a known word is close, else an empty text."""
    from difflib import get_close_matches  # only needed for an error

    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


def _message(kind: str, value: object, path: str, source: Source) -> Raw:
    if not isinstance(value, Mapping):
        _refuse(source, path, f"must be a message with the fields of {kind}", value)
    schema = MESSAGES[kind]
    prefix = path + "." if path else ""
    for name in value:
        if name not in schema:
            what = f'no field "{name}" in {kind}{suggestion(str(name), schema)}'
            raise source.error(f"{prefix}{name}", what)
    result: Raw = {}
    for name, type_ in schema.items():
        given = value.get(name)
        if given is not None:
            result[name] = _field(type_, given, prefix + name, source)
        elif (default := _default(type_)) is not None:
            result[name] = default
    _one_of(kind, result, path, source)
    return result


def _one_of(kind: str, result: Raw, path: str, source: Source) -> None:
    names = [name for name in ONE_OF.get(kind, ()) if name in result]
    if len(names) > 1:
        where = f"{path}.{names[1]}" if path else names[1]
        raise source.error(where, f"{names[1]} and {names[0]} exclude each other; keep one")


def _default(type_: str) -> object:
    if type_.endswith("*"):
        return []
    if type_.startswith("{"):
        return {}
    if type_.endswith("?") or type_ in MESSAGES:
        return None
    return ENUMS[type_][0] if type_ in ENUMS else _ZEROS.get(type_, 0)


def _field(type_: str, value: object, path: str, source: Source) -> object:
    if type_.endswith("*"):
        return _list(type_[:-1], value, path, source)
    if type_.startswith("{"):
        key, _, item = type_[1:].partition("}")
        return _map(key, item, value, path, source)
    if type_ in MESSAGES:
        return _message(type_, value, path, source)
    return _scalar(type_.rstrip("?"), value, path, source)


def _list(type_: str, value: object, path: str, source: Source) -> list[object]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse(source, path, "must be a list", value)
    return [_field(type_, item, f"{path}[{i}]", source) for i, item in enumerate(value)]


def _map(key_type: str, type_: str, value: object, path: str, source: Source) -> Raw:
    if not isinstance(value, Mapping):
        _refuse(source, path, "must be a map", value)
    result: Raw = {}
    for key, item in value.items():
        where = f"{path}[{key}]"
        # JSON has no keys but strings.
        result[str(_scalar(key_type, key, where, source))] = _field(type_, item, where, source)
    return result


def _scalar(type_: str, value: object, path: str, source: Source) -> object:
    convert: Callable[[str, object], object]
    if type_ in ENUMS:
        convert, wanted = _enum, "one of " + ", ".join(ENUMS[type_])
    elif type_ in _INTEGERS:
        low, high = _INTEGERS[type_]
        convert, wanted = _integer, f"an integer from {low} to {high}"
    elif type_ in ("float", "double"):
        convert, wanted = _float, "a finite number"
    else:
        convert, wanted = _plain, "true or false" if type_ == "bool" else "a string"
    result = convert(type_, value)
    if result is None:
        hint = suggestion(str(value), ENUMS.get(type_, ()))
        _refuse(source, path, f"must be {wanted}", value, hint)
    return result


def _enum(type_: str, value: object) -> object:
    names = ENUMS[type_]
    if isinstance(value, str):
        return value if value in names else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    return None


def _integer(type_: str, value: object) -> object:
    if isinstance(value, bool):
        return None
    try:
        # JSON made by protobuf has 64-bit integers as decimal strings.
        number = int(value, 10) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    low, high = _INTEGERS[type_]
    return number if low <= number <= high else None


def _float(_type: str, value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _plain(type_: str, value: object) -> object:
    if type_ == "bool":
        return value if isinstance(value, bool) else None
    # Half a surrogate pair cannot be sent to a model.
    return (
        value
        if isinstance(value, str) and value.encode(errors="ignore").decode() == value
        else None
    )


def _refuse(source: Source, path: str, wanted: str, value: object, hint: str = "") -> NoReturn:
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    raise source.error(path, f"{wanted}, not {shown}{hint}")
