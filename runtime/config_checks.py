"""From raw configurations to their typed parts, with everything checked that can be wrong.

The error texts that Triton has are Triton's.  Every function takes the raw form after `normalise`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from moonpool.ipc.messages import MAX_DIMS
from moonpool.runtime.config_defaults import PYTHON_BACKEND
from moonpool.runtime.config_shape import Raw
from moonpool.runtime.config_source import Source
from moonpool.runtime.config_types import (
    DynamicBatching,
    InstanceGroup,
    QueuePolicy,
    TensorConfig,
    VersionPolicy,
)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The longest name of a tensor, an instance group and so on. Together with the number of an instance it fits any message.
MAX_NAME_BYTES = 512
_IS_NAME = re.compile("(^|_)(name|filename)$")
_ILLEGAL = frozenset(";|&$`<>()[]{}\\\"'*?~#!")


def name_problem(name: str) -> str:
    """What is wrong with a model's name; "" for nothing."""
    if not name:
        return "model configuration must specify 'name'"
    if _ILLEGAL.intersection(name):
        return "Invalid stub name: contains invalid characters"
    if not _NAME.fullmatch(name) or name in (".", ".."):
        return f"model name {name[:80]!r} must be 1 to 64 letters, digits, '_', '.' or '-'"
    return ""


def check_lengths(raw: object, source: Source, path: str = "") -> None:
    """Check every name in a configuration: messages, logs and paths have limited room and carry only Unicode."""
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            here = f"{path}.{key}" if path else str(key)
            if isinstance(value, str) and _IS_NAME.search(str(key)):
                _check_length(value, here, source)
            else:
                check_lengths(value, source, here)
    elif isinstance(raw, (list, tuple)):
        for index, item in enumerate(raw):
            check_lengths(item, source, f"{path}[{index}]")


def _check_length(name: str, path: str, source: Source) -> None:
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise source.error(path, f"is no Unicode text: {error}") from error
    if size_bytes > MAX_NAME_BYTES:
        what = f"has {size_bytes} bytes, and {MAX_NAME_BYTES} is the most for a name"
        raise source.error(path, what)


def check_names(raw: Raw, source: Source) -> None:
    """The name of the model, of its backend and of its file."""
    check_lengths(raw, source)
    if problem := name_problem(raw["name"]):
        raise source.error("name", problem)
    name, backend, platform = raw["name"], raw["backend"], raw["platform"]
    if platform == "ensemble" or "ensemble_scheduling" in raw:
        raise source.error(
            "platform", f"'{name}' is an ensemble, which moonpool does not serve yet"
        )
    if not backend:
        what = f"unexpected platform type '{platform}' for {name}; specify backend: \"python\""
        raise source.error("backend", what)
    if not _NAME.fullmatch(backend) or backend in (".", ".."):
        raise source.error("backend", f"is no name of a backend: {backend[:80]!r} for {name}")
    _check_filename(raw["default_model_filename"], "default_model_filename", backend, source)
    _check_filename(raw["runtime"], "runtime", "", source)


def check_no_agents(raw: Raw, source: Source) -> None:
    """Refuse a model that a repository agent has to check first, by a checksum for example.

    No agent has checked it, and it would be served as if one had.
    """
    agents = raw.get("model_repository_agents", {}).get("agents", ())
    if agents:
        names = ", ".join(repr(agent["name"][:80]) for agent in agents[:10])
        what = (
            f"moonpool runs no repository agents, and '{raw['name']}' names {names}; to serve the model without what "
            "they check, take model_repository_agents out of its configuration"
        )
        raise source.error("model_repository_agents", what)


def _check_filename(filename: str, field: str, backend: str, source: Source) -> None:
    if "/" in filename or "\0" in filename or filename in (".", ".."):
        raise source.error(field, f"must be a file name without directories, not {filename!r}")
    if backend == PYTHON_BACKEND and not filename.endswith(".py"):
        what = f"Model name must end with '.py'. Model name is \"{filename}\"."
        raise source.error(field, what)


def max_batch_size(raw: Raw, source: Source) -> int:
    size: int = raw["max_batch_size"]
    if size < 0:
        what = f"'max_batch_size' must be non-negative value for {raw['name']}"
        raise source.error("max_batch_size", what)
    return size


def tensors(raw: Raw, side: str, source: Source, *, partial: bool) -> tuple[TensorConfig, ...]:
    """The inputs or the outputs; `side` is "input" or "output"."""
    seen: set[str] = set()
    result = []
    for index, io in enumerate(raw[side]):
        path = f"{side}[{index}]"
        tensor = _tensor(io, raw, f"model {side} ", path, source, partial=partial)
        if tensor.name in seen:
            what = f"model {side} '{tensor.name}' is specified twice for {raw['name']}"
            raise source.error(f"{path}.name", what)
        seen.add(tensor.name)
        result.append(tensor)
    if not partial:
        _check_present(raw, side, source)
    return tuple(result)


def _check_present(raw: Raw, side: str, source: Source) -> None:
    name = raw["name"]
    if not raw["input"] and not raw["output"]:
        what = f"must specify inputs and outputs for {name}, here or in auto_complete_config"
        raise source.error(side, what)
    if side == "input" and not raw["input"] and raw["max_batch_size"] > 0:
        what = f"a model with max_batch_size > 0 needs an input to batch for {name}"
        raise source.error(side, what)


def _tensor(
    io: Raw, raw: Raw, prefix: str, path: str, source: Source, *, partial: bool
) -> TensorConfig:
    suffix = f" for {raw['name']}"
    if not io["name"]:
        raise source.error(f"{path}.name", f"{prefix}must specify 'name'{suffix}")
    prefix += f"'{io['name']}' "
    if io["data_type"] == "TYPE_INVALID" and not partial:
        raise source.error(f"{path}.data_type", f"{prefix}must specify 'data_type'{suffix}")
    if not io["dims"] and not partial:
        raise source.error(f"{path}.dims", f"{prefix}must specify 'dims'{suffix}")
    dims = _dims(io["dims"], f"{prefix}dimension", f"{path}.dims", source, suffix)
    rank = len(dims) + (raw["max_batch_size"] > 0)
    if rank > MAX_DIMS:
        what = f"{prefix}has {rank} dimensions with the batch; at most {MAX_DIMS}{suffix}"
        raise source.error(f"{path}.dims", what)
    datatype = io["data_type"].removeprefix("TYPE_")
    return TensorConfig(
        name=io["name"],
        datatype={"STRING": "BYTES", "INVALID": ""}.get(datatype, datatype),
        dims=dims,
        optional=io.get("optional", False),
        reshape=_reshape(io, raw, prefix, path, source),
    )


def _dims(
    dims: Sequence[int], prefix: str, path: str, source: Source, suffix: str
) -> tuple[int, ...]:
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
        what = (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
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
    """The number of elements in each run of fixed dimensions between the variable ones."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [math.prod(run) for run in runs]


def version_policy(raw: Raw, source: Source) -> VersionPolicy:
    policy = raw["version_policy"]
    if "specific" in policy:
        versions = tuple(policy["specific"]["versions"])
        if any(version < 1 for version in versions):
            what = f"versions must be integer >= 1 for {raw['name']}"
            raise source.error("version_policy.specific.versions", what)
        return VersionPolicy("specific", 0, versions)
    if "latest" in policy:
        # An empty `latest {}` has 0 there and means the documented default.
        return VersionPolicy("latest", policy["latest"]["num_versions"] or 1)
    return VersionPolicy("all", 0)


def instance_groups(raw: Raw, source: Source) -> tuple[InstanceGroup, ...]:
    """The instance groups, named; one of kind AUTO where there are none."""
    if not raw["instance_group"]:
        return (InstanceGroup(raw["name"], "AUTO"),)
    groups = [
        _group(index, group, raw, source) for index, group in enumerate(raw["instance_group"])
    ]
    names = [group.name for group in groups]
    for index, name in enumerate(names):
        if name in names[:index]:
            what = f"instance group {name} of model {raw['name']} is specified twice"
            raise source.error(f"instance_group[{index}].name", what)
    return tuple(groups)


def _group(index: int, group: Raw, raw: Raw, source: Source) -> InstanceGroup:
    path = f"instance_group[{index}]"
    name = group["name"] or f"{raw['name']}_{index}"
    title = f"instance group {name} of model {raw['name']}"
    if _ILLEGAL.intersection(name) or "/" in name or not name.isprintable():
        what = "Invalid stub name: contains invalid characters"
        raise source.error(f"{path}.name", what)
    if group["count"] < 0:
        raise source.error(f"{path}.count", f"{title} has the negative count {group['count']}")
    kind, gpus = group["kind"].removeprefix("KIND_"), tuple(group["gpus"])
    if gpus and kind in ("CPU", "MODEL"):
        what = f"{title} has kind KIND_{kind} but specifies one or more GPUs"
        raise source.error(f"{path}.gpus", what)
    if any(gpu < 0 for gpu in gpus) or len(set(gpus)) < len(gpus):
        what = f"{title} must name each GPU once, by an id >= 0, not {list(gpus)}"
        raise source.error(f"{path}.gpus", what)
    return InstanceGroup(name, kind, group["count"] or 1, gpus)


def placed(
    group: InstanceGroup,
    index: int,
    present: Sequence[int],
    model: str,
    source: Source,
    *,
    why_none: str = "",
) -> InstanceGroup:
    """A group with AUTO decided and its GPUs named, on a machine that has the GPUs `present`."""
    kind = group.kind
    if kind == "AUTO":
        kind = "GPU" if present and set(group.gpus) <= set(present) else "CPU"
    if kind != "GPU":
        return replace(group, kind=kind, gpus=())
    path, title = f"instance_group[{index}]", f"instance group {group.name} of model {model}"
    if not present:
        what = f"{title} has kind KIND_GPU but no GPUs are available"
        raise source.error(path, f"{what}: {why_none}" if why_none else what)
    for gpu in group.gpus:
        if gpu not in present:
            what = f"{title} specifies invalid or unsupported gpu id {gpu}"
            shown = ", ".join(map(str, present))
            raise source.error(f"{path}.gpus", f"{what}. GPUs of this machine are: {shown}")
    return replace(group, kind=kind, gpus=group.gpus or tuple(present))


def with_groups(raw: Raw, groups: Sequence[InstanceGroup]) -> Raw:
    """The raw form with what was decided about the instance groups written into it."""
    blank: Raw = {"secondary_devices": [], "profile": [], "passive": False, "host_policy": ""}
    given = raw["instance_group"] or [blank] * len(groups)
    decided = [
        {"name": group.name, "kind": f"KIND_{group.kind}", "count": group.count}
        | {"gpus": list(group.gpus)}
        for group in groups
    ]
    merged = [{**old, **new} for old, new in zip(given, decided, strict=True)]
    return {**raw, "instance_group": merged}


def dynamic_batching(raw: Raw, source: Source, *, partial: bool = False) -> DynamicBatching | None:
    """How requests are joined; in a partial configuration the maximum may be missing still."""
    batching = raw.get("dynamic_batching")
    if batching is None:
        return None
    path, suffix = "dynamic_batching", f" for {raw['name']}"
    for index, size in enumerate(batching["preferred_batch_size"]):
        rule = "positive" if size <= 0 else "<= max batch size"
        is_small = size <= raw["max_batch_size"] or (partial and not raw["max_batch_size"])
        if not (size > 0 and is_small):
            what = f"dynamic batching preferred size must be {rule}{suffix}"
            raise source.error(f"{path}.preferred_batch_size[{index}]", what)
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
        raise source.error(f"{path}.default_priority_level", what)
    for level in batching.priority_queue_policies:
        if not 1 <= level <= levels:
            what = f"priority queue policy must have priority level in range [1, {levels}]{suffix}"
            raise source.error(f"{path}.priority_queue_policy[{level}]", what)


def _check_ordering(batching: DynamicBatching, path: str, source: Source, suffix: str) -> None:
    if not batching.preserve_ordering:
        return
    if batching.priority_levels > 1:
        what = f"Only one priority level is allowed when 'preserve_ordering' is true{suffix}"
        raise source.error(f"{path}.priority_levels", what)
    policies = {f"{path}.default_queue_policy": batching.default_queue_policy}
    for level, policy in batching.priority_queue_policies.items():
        policies[f"{path}.priority_queue_policy[{level}]"] = policy
    for where, policy in policies.items():
        if policy.timeout_action == "DELAY" and policy.default_timeout_us != 0:
            what = (
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
            )
            raise source.error(f"{where}.timeout_action", what + suffix)
