"""Checks the sequence batcher of a configuration. Error texts are Triton's where Triton has some."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.ipc.messages import MAX_DIMS
from moonpool.runtime.model.config.schema import Raw
from moonpool.runtime.model.config.source import Source, part

_CHOICES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_ID_DATATYPES = ("UINT64", "INT64", "UINT32", "INT32", "STRING")
_ONE_OF_CHOICES = "'int32_false_true', 'fp32_false_true' {} 'bool_false_true'"
_PATH = "sequence_batching"


@dataclass(frozen=True, slots=True)
class SequenceControl:
    """An input that gives the model the place of a request in its sequence: START, END, READY or CORRID.

    `values` are the numbers for false and for true. CORRID has none.
    """

    name: str
    kind: str
    datatype: str
    values: tuple[float, float] = (0, 0)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A state of a sequence: an input that the model gets with each request, and an output whose value is the next
    input.

    `dims` leaves out the batch dimension. At the start of a sequence, the value has `initial_dims`. It is in `file`, or
    zeros.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...]
    file: str = ""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Keeps the requests of a sequence together on one instance.

    `slots` is the number of sequences that an instance has at a time. Direct: a slot is a place in the batch.
    Otherwise batches are formed, as by `DynamicBatching`, of the oldest requests of these sequences.
    """

    is_direct: bool = True
    slots: int = 1
    max_idle_us: int = 1_000_000
    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0
    preferred_batch_sizes: tuple[int, ...] = ()
    preserve_ordering: bool = False
    is_iterative: bool = False
    controls: tuple[SequenceControl, ...] = ()
    states: tuple[SequenceState, ...] = ()


def sequence_batching(
    raw: Raw, source: Source, *, partial: bool = False, has_states: bool = False
) -> SequenceBatching | None:
    """Read and check the sequence batcher, None if there is none. A partial configuration may lack the maximum batch
    size.

    `has_states` is as in `ModelConfig.from_dict`. Raises ConfigError.
    """
    batching = raw.get("sequence_batching")
    if batching is None:
        return None
    _check_numbers(batching, raw, source, partial=partial)
    direct, oldest = batching.get("direct", {}), batching.get("oldest")
    rows = max(1, raw["max_batch_size"])
    chosen = direct if oldest is None else oldest
    return SequenceBatching(
        is_direct=oldest is None,
        slots=rows if oldest is None else oldest["max_candidate_sequences"] or rows,
        max_idle_us=batching["max_sequence_idle_microseconds"],
        max_queue_delay_us=chosen.get("max_queue_delay_microseconds", 0),
        minimum_slot_utilization=direct.get("minimum_slot_utilization", 0.0),
        preferred_batch_sizes=tuple(sorted(set(chosen.get("preferred_batch_size", ())))),
        preserve_ordering=chosen.get("preserve_ordering", False),
        is_iterative=batching["iterative_sequence"],
        controls=_controls(batching, raw, source),
        states=_states(batching, raw, source, has_states=has_states),
    )


def _check_numbers(batching: Raw, raw: Raw, source: Source, *, partial: bool) -> None:
    suffix = f" for {raw['name']}"
    utilization = batching.get("direct", {}).get("minimum_slot_utilization", 0.0)
    if not 0 <= utilization <= 1:
        what = f"sequence batching minimum slot utilization must be in range (0.0, 1.0]{suffix}"
        source.mistake(f"{_PATH}.direct.minimum_slot_utilization", what)
    oldest = batching.get("oldest")
    if oldest is None:
        return
    if oldest["max_candidate_sequences"] < 0:
        what = f"sequence batching max candidate sequences must be non-negative{suffix}"
        source.mistake(f"{_PATH}.oldest.max_candidate_sequences", what)
    for index, size in enumerate(oldest["preferred_batch_size"]):
        rule = "positive" if size <= 0 else "<= max batch size"
        is_small = size <= raw["max_batch_size"] or (partial and not raw["max_batch_size"])
        if not (size > 0 and is_small):
            what = f"sequence batching preferred batch size must be {rule}{suffix}"
            source.mistake(f"{_PATH}.oldest.preferred_batch_size[{index}]", what)


def _controls(batching: Raw, raw: Raw, source: Source) -> tuple[SequenceControl, ...]:
    suffix = f" for {raw['name']}"
    inputs = {io["name"] for io in raw["input"]}
    names: set[str] = set()
    kinds: set[str] = set()
    controls = []
    for index, given in enumerate(batching["control_input"]):
        path, name = f"{_PATH}.control_input[{index}]", given["name"]
        if not name:
            what = f"sequence batching control tensor must have a name{suffix}"
            source.mistake(f"{path}.name", what)
            continue
        if name in inputs:
            what = f"sequence batching control tensor '{name}' is an input of the model{suffix}"
            source.mistake(f"{path}.name", what)
        if name in names or len(given["control"]) > 1:
            what = f"sequence batching control tensor '{name}' is specified for multiple control kinds"
            source.mistake(f"{path}.control", what + suffix)
        names.add(name)
        for control in given["control"]:
            if control["kind"] in kinds:
                what = f"sequence batching specifies multiple {control['kind']} tensors{suffix}"
                source.mistake(f"{path}.control[0].kind", what)
            kinds.add(control["kind"])
            with part():
                controls.append(_control(name, control, suffix, f"{path}.control[0]", source))
    return tuple(controls)


def _control(name: str, control: Raw, suffix: str, path: str, source: Source) -> SequenceControl:
    kind, where = control["kind"], f" for {control['kind']}{suffix}"
    given = [choice for choice in _CHOICES if control[choice]]
    if kind == "CONTROL_SEQUENCE_CORRID":
        return _id_control(name, control, suffix, path, source)
    if not given:
        what = "sequence batching must specify either " + _ONE_OF_CHOICES.format("or")
        raise source.error(path, what + where)
    if len(given) > 1:
        what = "sequence batching specifies more than one from " + _ONE_OF_CHOICES.format("and")
        raise source.error(f"{path}.{given[1]}", what + where)
    values = control[given[0]]
    if len(values) != 2:
        what = f"sequence batching control '{given[0]}' must have exactly 2 entries{where}"
        raise source.error(f"{path}.{given[0]}", what)
    short = kind.removeprefix("CONTROL_SEQUENCE_")
    return SequenceControl(name, short, _CHOICES[given[0]], (values[0], values[1]))


def _id_control(name: str, control: Raw, suffix: str, path: str, source: Source) -> SequenceControl:
    datatype = control["data_type"].removeprefix("TYPE_")
    if datatype not in _ID_DATATYPES:
        *others, last = (f"TYPE_{each}" for each in _ID_DATATYPES)
        what = (
            f"unexpected data type for control CONTROL_SEQUENCE_CORRID{suffix}. Allowed data types "
            f"are {', '.join(others)} and {last}"
        )
        raise source.error(f"{path}.data_type", what)
    for choice in _CHOICES:
        if control[choice]:
            what = "sequence batching must not specify either " + _ONE_OF_CHOICES.format("or")
            raise source.error(f"{path}.{choice}", f"{what} for CONTROL_SEQUENCE_CORRID{suffix}")
    return SequenceControl(name, "CORRID", "BYTES" if datatype == "STRING" else datatype)


def _states(batching: Raw, raw: Raw, source: Source, *, has_states: bool) -> tuple[SequenceState, ...]:
    """Read the states. A tritonserver that keeps them has checked them, and takes some that nobody else could serve."""
    if has_states:
        return tuple(_state(given) for given in batching["state"])
    suffix = f" for {raw['name']}"
    controls = {given["name"] for given in batching["control_input"]}
    inputs = {io["name"] for io in raw["input"]} | controls
    outputs = {io["name"]: io for io in raw["output"]}
    seen: set[tuple[str, str]] = set()
    for index, given in enumerate(batching["state"]):
        path, name = f"{_PATH}.state[{index}]", given["input_name"]
        for side in ("input_name", "output_name"):
            if not given[side]:
                what = f"sequence batching state must have an '{side}'{suffix}"
                source.mistake(f"{path}.{side}", what)
            elif (side, given[side]) in seen:
                kind = "input" if side == "input_name" else "output"
                what = f"State {kind} name '{given[side]}' specified more than once."
                source.mistake(f"{path}.{side}", what)
            seen.add((side, given[side]))
        if name in inputs:
            what = f"sequence batching state '{name}' is an input of the model already{suffix}"
            source.mistake(f"{path}.input_name", what)
        with part():
            _check_state(given, outputs.get(given["output_name"]), path, suffix, source)
    return tuple(_state(given) for given in batching["state"])


def _check_state(given: Raw, output: Raw | None, path: str, suffix: str, source: Source) -> None:
    title = f"sequence batching state '{given['input_name']}'"
    if given["data_type"] == "TYPE_INVALID":
        source.mistake(f"{path}.data_type", f"{title} must have a 'data_type'{suffix}")
    if not given["dims"]:
        raise source.error(f"{path}.dims", f"{title} must have 'dims'{suffix}")
    if len(given["dims"]) >= MAX_DIMS:
        what = f"{title} has {len(given['dims'])} dimensions, at most {MAX_DIMS - 1}{suffix}"
        raise source.error(f"{path}.dims", what)
    if any(dim < 1 and dim != -1 for dim in given["dims"]):
        what = f"{title} must have dimensions >= 1, or -1 for a variable-size one{suffix}"
        raise source.error(f"{path}.dims", what)
    if given["use_growable_memory"] and not given["use_same_buffer_for_input_output"]:
        what = (
            "In order to 'use_growable_memory', you must also enable "
            f"'use_same_buffer_for_input_output' for state input name '{given['input_name']}'{suffix}"
        )
        raise source.error(f"{path}.use_growable_memory", what)
    if output is not None:
        if output["data_type"] not in ("TYPE_INVALID", given["data_type"]):
            what = f"{title} is {given['data_type']}, and output '{output['name']}' is {output['data_type']}{suffix}"
            raise source.error(f"{path}.data_type", what)
        if "reshape" in output:
            what = f"{title} is output '{output['name']}', which has a reshape{suffix}"
            raise source.error(f"{path}.output_name", what)
    if given["initial_state"]:
        _check_initial(given, f"{path}.initial_state", source)


def _check_initial(given: Raw, path: str, source: Source) -> None:
    name, several = given["input_name"], given["initial_state"]
    if len(several) > 1:
        what = (
            f"initial_state field for state input '{name}' must contain exactly one or zero "
            f"element. Found '{len(several)}' elements."
        )
        raise source.error(path, what)
    initial, path = several[0], f"{path}[0]"
    ours, wanted = initial["dims"], given["dims"]
    if initial["data_type"] != given["data_type"]:
        what = f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        raise source.error(f"{path}.data_type", what)
    if not initial["name"]:
        what = f"Field 'name' must be set when using initial_state for state input '{name}'."
        raise source.error(f"{path}.name", what)
    if len(ours) != len(wanted):
        what = (
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
            f"for state input '{name}'. {len(ours)} != {len(wanted)}"
        )
        raise source.error(f"{path}.dims", what)
    for dim, expected in zip(ours, wanted, strict=True):
        if dim == -1:
            what = f"'initial_state' field for state input name '{name}' contains variable dimensions."
            raise source.error(f"{path}.dims", what)
        # Triton takes a value of any size where the state's is variable, but tells the model that it has one element.
        if dim < 1 or expected not in (-1, dim):
            what = (
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {expected}"
            )
            raise source.error(f"{path}.dims", what)
    if "zero_data" not in initial and "data_file" not in initial:
        what = f"initial_state setting expects state'{name}' to have state_data set"
        raise source.error(path, what)


def _state(given: Raw) -> SequenceState:
    datatype = given["data_type"].removeprefix("TYPE_")
    initial: Raw = given["initial_state"][0] if given["initial_state"] else {}
    return SequenceState(
        given["input_name"],
        given["output_name"],
        "BYTES" if datatype == "STRING" else datatype,
        tuple(given["dims"]),
        tuple(initial.get("dims") or (max(1, dim) for dim in given["dims"])),
        initial.get("data_file", ""),
    )
