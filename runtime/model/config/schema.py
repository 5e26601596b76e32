"""The schema of a model configuration, without protobuf, and the check of a raw configuration against it.

`FIELDS` and `ENUMS` are the schema of `config.pbtxt`: names, types, numbers and enum values. Models that are loaded
from Python, and configurations that a model completes, must be checked without importing protobuf.
`runtime/model/protobuf.py` makes protobuf's messages of the same tables. A test compares every line with those of
Triton's client.

A field is `name:type=number`, or `name:type=number/group` if at most one field of the group may be set. A type is a
scalar (`string bytes bool int32 int64 uint32 uint64 float double`), an enum or a message. `*` is repeated, `{K}V` a map
from K to V.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from moonpool.runtime.model.config.source import Source, part

_FIELDS = """
ModelConfig = name:string=1 platform:string=2 backend:string=17 runtime:string=25
    version_policy:ModelVersionPolicy=3 max_batch_size:int32=4 input:ModelInput*=5
    output:ModelOutput*=6 batch_input:BatchInput*=20 batch_output:BatchOutput*=21
    optimization:ModelOptimizationPolicy=12
    dynamic_batching:ModelDynamicBatching=11/scheduling_choice
    sequence_batching:ModelSequenceBatching=13/scheduling_choice
    ensemble_scheduling:ModelEnsembling=15/scheduling_choice instance_group:ModelInstanceGroup*=7
    default_model_filename:string=8 cc_model_filenames:{string}string=9
    metric_tags:{string}string=10 parameters:{string}ModelParameter=14
    model_warmup:ModelWarmup*=16 model_operations:ModelOperations=18
    model_transaction_policy:ModelTransactionPolicy=19
    model_repository_agents:ModelRepositoryAgents=23 response_cache:ModelResponseCache=24
    model_metrics:ModelMetrics=26
ModelVersionPolicy = latest:ModelVersionPolicy.Latest=1/policy_choice
    all:ModelVersionPolicy.All=2/policy_choice
    specific:ModelVersionPolicy.Specific=3/policy_choice
ModelVersionPolicy.Latest = num_versions:uint32=1
ModelVersionPolicy.All =
ModelVersionPolicy.Specific = versions:int64*=1
ModelInput = name:string=1 data_type:DataType=2 format:ModelInput.Format=3 dims:int64*=4
    reshape:ModelTensorReshape=5 is_shape_tensor:bool=6 allow_ragged_batch:bool=7 optional:bool=8
    is_non_linear_format_io:bool=9
ModelTensorReshape = shape:int64*=1
ModelOutput = name:string=1 data_type:DataType=2 dims:int64*=3 reshape:ModelTensorReshape=5
    label_filename:string=4 is_shape_tensor:bool=6 is_non_linear_format_io:bool=7
BatchInput = kind:BatchInput.Kind=1 target_name:string*=2 data_type:DataType=3
    source_input:string*=4
BatchOutput = target_name:string*=1 kind:BatchOutput.Kind=2 source_input:string*=3
ModelOptimizationPolicy = graph:ModelOptimizationPolicy.Graph=1
    priority:ModelOptimizationPolicy.ModelPriority=2 cuda:ModelOptimizationPolicy.Cuda=3
    execution_accelerators:ModelOptimizationPolicy.ExecutionAccelerators=4
    input_pinned_memory:ModelOptimizationPolicy.PinnedMemoryBuffer=5
    output_pinned_memory:ModelOptimizationPolicy.PinnedMemoryBuffer=6
    gather_kernel_buffer_threshold:uint32=7 eager_batching:bool=8
ModelOptimizationPolicy.Graph = level:int32=1
ModelOptimizationPolicy.Cuda = graphs:bool=1 busy_wait_events:bool=2
    graph_spec:ModelOptimizationPolicy.Cuda.GraphSpec*=3 output_copy_stream:bool=4
ModelOptimizationPolicy.Cuda.GraphSpec = batch_size:int32=1
    input:{string}ModelOptimizationPolicy.Cuda.GraphSpec.Shape=2
    graph_lower_bound:ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound=3
ModelOptimizationPolicy.Cuda.GraphSpec.Shape = dim:int64*=1
ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound = batch_size:int32=1
    input:{string}ModelOptimizationPolicy.Cuda.GraphSpec.Shape=2
ModelOptimizationPolicy.ExecutionAccelerators =
    gpu_execution_accelerator:ModelOptimizationPolicy.ExecutionAccelerators.Accelerator*=1
    cpu_execution_accelerator:ModelOptimizationPolicy.ExecutionAccelerators.Accelerator*=2
ModelOptimizationPolicy.ExecutionAccelerators.Accelerator = name:string=1
    parameters:{string}string=2
ModelOptimizationPolicy.PinnedMemoryBuffer = enable:bool=1
ModelDynamicBatching = preferred_batch_size:int32*=1 max_queue_delay_microseconds:uint64=2
    preserve_ordering:bool=3 priority_levels:uint64=4 default_priority_level:uint64=5
    default_queue_policy:ModelQueuePolicy=6 priority_queue_policy:{uint64}ModelQueuePolicy=7
ModelQueuePolicy = timeout_action:ModelQueuePolicy.TimeoutAction=1
    default_timeout_microseconds:uint64=2 allow_timeout_override:bool=3 max_queue_size:uint32=4
ModelSequenceBatching = direct:ModelSequenceBatching.StrategyDirect=3/strategy_choice
    oldest:ModelSequenceBatching.StrategyOldest=4/strategy_choice
    max_sequence_idle_microseconds:uint64=1 control_input:ModelSequenceBatching.ControlInput*=2
    state:ModelSequenceBatching.State*=5 iterative_sequence:bool=6
ModelSequenceBatching.StrategyDirect = max_queue_delay_microseconds:uint64=1
    minimum_slot_utilization:float=2
ModelSequenceBatching.StrategyOldest = max_candidate_sequences:int32=1
    preferred_batch_size:int32*=2 max_queue_delay_microseconds:uint64=3 preserve_ordering:bool=4
ModelSequenceBatching.ControlInput = name:string=1 control:ModelSequenceBatching.Control*=2
ModelSequenceBatching.Control = kind:ModelSequenceBatching.Control.Kind=1
    int32_false_true:int32*=2 fp32_false_true:float*=3 bool_false_true:bool*=5
    data_type:DataType=4
ModelSequenceBatching.State = input_name:string=1 output_name:string=2 data_type:DataType=3
    dims:int64*=4 initial_state:ModelSequenceBatching.InitialState*=5
    use_same_buffer_for_input_output:bool=6 use_growable_memory:bool=7
ModelSequenceBatching.InitialState = data_type:DataType=1 dims:int64*=2
    zero_data:bool=3/state_data data_file:string=4/state_data name:string=5
ModelEnsembling = step:ModelEnsembling.Step*=1 max_inflight_requests:uint32=2
ModelEnsembling.Step = model_name:string=1 model_version:int64=2 input_map:{string}string=3
    output_map:{string}string=4 model_namespace:string=5
ModelInstanceGroup = name:string=1 kind:ModelInstanceGroup.Kind=4 count:int32=2
    rate_limiter:ModelRateLimiter=6 gpus:int32*=3
    secondary_devices:ModelInstanceGroup.SecondaryDevice*=8 profile:string*=5 passive:bool=7
    host_policy:string=9
ModelRateLimiter = resources:ModelRateLimiter.Resource*=1 priority:uint32=2
ModelRateLimiter.Resource = name:string=1 global:bool=2 count:uint32=3
ModelInstanceGroup.SecondaryDevice = kind:ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind=1
    device_id:int64=2
ModelParameter = string_value:string=1
ModelWarmup = name:string=1 batch_size:uint32=2 inputs:{string}ModelWarmup.Input=3 count:uint32=4
ModelWarmup.Input = data_type:DataType=1 dims:int64*=2 zero_data:bool=3/input_data_type
    random_data:bool=4/input_data_type input_data_file:string=5/input_data_type
ModelOperations = op_library_filename:string*=1
ModelTransactionPolicy = decoupled:bool=1
ModelRepositoryAgents = agents:ModelRepositoryAgents.Agent*=1
ModelRepositoryAgents.Agent = name:string=1 parameters:{string}string=2
ModelResponseCache = enable:bool=1
ModelMetrics = metric_control:ModelMetrics.MetricControl*=1
ModelMetrics.MetricControl = metric_identifier:ModelMetrics.MetricControl.MetricIdentifier=1
    histogram_options:ModelMetrics.MetricControl.HistogramOptions=2/metric_options
ModelMetrics.MetricControl.MetricIdentifier = family:string=1
ModelMetrics.MetricControl.HistogramOptions = buckets:double*=1
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


class FieldRow(NamedTuple):
    """One field of a message, as the tables have it. `group` is empty for a field that excludes no other."""

    name: str
    type: str
    number: int
    group: str


def read_table(table: str) -> dict[str, list[str]]:
    """Read the records of a table: a name, `=`, and words."""
    joined = table.strip().replace("\n    ", " ")
    pairs = (line.split("=", 1) for line in joined.splitlines())
    return {name.strip(): rest.split() for name, rest in pairs}


def read_fields(table: str) -> dict[str, list[FieldRow]]:
    """Read the fields of messages."""
    return {name: [_row(word) for word in words] for name, words in read_table(table).items()}


def _row(word: str) -> FieldRow:
    name, _, rest = word.partition(":")
    type_, _, rest = rest.partition("=")
    number, _, group = rest.partition("/")
    return FieldRow(name, type_, int(number), group)


FIELDS = read_fields(_FIELDS)
# The position of a value in its list is its number.
ENUMS: dict[str, list[str]] = read_table(_ENUMS)
# The types of fields by their names. A scalar of a group may be absent, and has a `?`.
MESSAGES: dict[str, dict[str, str]] = {
    message: {row.name: row.type + "?" * (bool(row.group) and row.type not in FIELDS) for row in rows}
    for message, rows in FIELDS.items()
}
# At most one of these fields of a message may be set. No message has several groups.
ONE_OF: dict[str, tuple[str, ...]] = {
    message: names for message, rows in FIELDS.items() if len(names := tuple(row.name for row in rows if row.group)) > 1
}


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


def shaped_part(name: str, value: object, source: Source) -> Any:
    """Copy one field of a configuration as `shaped` does."""
    return _field(MESSAGES["ModelConfig"][name], value, name, source)


def in_order(raw: Raw) -> Raw:
    """Put the fields of a configuration in the order of the schema."""
    return {name: raw[name] for name in MESSAGES["ModelConfig"] if name in raw}


# The most known words that are looked at, and the most that are compared. Strangers may choose the word, and some the
# known ones, too.
_MOST_KNOWN, _MOST_COMPARED = 2000, 200
_LONGEST_WORD = 100
# The least share of common letters.
_CLOSE = 0.6


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean "…"?` if a known word is close, else an empty text. Takes some milliseconds at most."""
    from difflib import get_close_matches  # only needed for an error

    if len(word) > _LONGEST_WORD:
        return ""
    alike = (each for each in islice(known, _MOST_KNOWN) if _may_be_close(len(word), len(each)))
    near = get_close_matches(word, list(islice(alike, _MOST_COMPARED)), n=1, cutoff=_CLOSE)
    return f'; did you mean "{near[0]}"?' if near else ""


def _may_be_close(one: int, other: int) -> bool:
    """Return True if words of these lengths are close if the shorter one is a part of the other."""
    return 2 * min(one, other) >= _CLOSE * (one + other)


class WrongPart(ValueError):
    """A part of a text is wrong. The error quotes that part, so that nobody has to quote the text."""


def unread(error: ValueError, text: str) -> str:
    """Return the sentence for a text that a reader refused with this error, which says what it must be."""
    return str(error) if isinstance(error, WrongPart) else f"{error}, not {text!r:.200}"


def _message(kind: str, value: object, path: str, source: Source) -> Raw:
    if not isinstance(value, Mapping):
        raise source.error(path, refusal(kind, _shown(value)))
    schema = MESSAGES[kind]
    prefix = path + "." if path else ""
    for name in value:
        if name not in schema:
            what = f'no field "{name}" in {kind}{suggestion(str(name), schema)}'
            source.mistake(f"{prefix}{name}", what)
    result: Raw = {}
    for name, type_, default in _fields_of(kind):
        given = value.get(name)
        if default is not None:
            result[name] = default.copy() if type(default) in (list, dict) else default  # type: ignore[attr-defined]
        if given is not None:
            with part():
                result[name] = _field(type_, given, prefix + name, source)
    _one_of(kind, result, path, source)
    return result


@cache
def _fields_of(kind: str) -> tuple[tuple[str, str, object], ...]:
    """Return name, type and default of each field of a message, None for none."""
    return tuple((name, type_, _default(type_)) for name, type_ in MESSAGES[kind].items())


def _one_of(kind: str, result: Raw, path: str, source: Source) -> None:
    names = [name for name in ONE_OF.get(kind, ()) if name in result]
    if len(names) > 1:
        where = f"{path}.{names[1]}" if path else names[1]
        source.mistake(where, exclusive(names[1], names[0]))


def exclusive(name: str, other: str) -> str:
    """Say that only one of two fields may be set."""
    return f"{name} and {other} exclude each other; keep one"


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
        convert = _enum
    elif type_ in _INTEGERS:
        convert = _integer
    else:
        convert = _float if type_ in ("float", "double") else _plain
    result = convert(type_, value)
    if result is None:
        raise source.error(path, refusal(type_, _shown(value)))
    return result


def is_type(name: str) -> bool:
    """Return True for the name of a scalar, of an enumeration or of a message of the schema."""
    return name in _INTEGERS or name in _ZEROS or name in ENUMS or name in MESSAGES


def refusal(type_: str, shown: str) -> str:
    """Say what the value of a field of this type must be, and is not."""
    hint = ""
    if type_ in ENUMS:
        wanted = "one of " + ", ".join(ENUMS[type_])
        hint = suggestion(shown.strip("'"), ENUMS[type_])
    elif type_ in _INTEGERS:
        wanted = "an integer from {} to {}".format(*_INTEGERS[type_])
    elif type_ in ("float", "double"):
        wanted = "a finite number"
    elif type_ in MESSAGES:
        wanted = f"a message with the fields of {type_}"
    else:
        wanted = "true or false" if type_ == "bool" else "a string"
    return f"must be {wanted}, not {shown[:60]}{hint}"


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
    return value if isinstance(value, str) and value.encode(errors="ignore").decode() == value else None


def _refuse(source: Source, path: str, wanted: str, value: object) -> NoReturn:
    raise source.error(path, f"{wanted}, not {_shown(value)}")


def _shown(value: object) -> str:
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
