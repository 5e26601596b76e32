"""The settings of a model that `moonpool tune` changes: their values, and where they stand in a configuration.

A setting that cannot change is left out with the reason. Values are in order, as the search wants them. None is a field
that the configuration leaves out; it is a value only if the field is missing at the start, so that a field may be added
but never taken away.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool import ConfigError, MoonpoolError
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.model import normalise
from moonpool.runtime.model.config.schema import Raw
from moonpool.runtime.model.config.source import fields, token_at

Value = int | str | None

# The settings by name, with what they are in words.
SETTINGS = {
    "instances": "instances of the model",
    "max_batch": "the largest batch",
    "delay": "microseconds that a batch waits for requests",
    "threads": "threads of each instance",
    "template": "how an instance is started",
}
_TEMPLATES = ("no", "blank", "imports", "initialize")
_TEMPLATE = "MOONPOOL_PREFORK"
# The parameter that has the number of threads, for backends that have one of their own.
_THREADS = {"onnxruntime": "intra_op_thread_count", "pytorch": "INTRA_OP_THREAD_COUNT"}
_DELAYS_US = (0, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)


class Unwritable(MoonpoolError):
    """The text of a configuration cannot be changed as it should be."""

    code = "INVALID_ARG"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of one model. `start` is the index of the present value."""

    model: str
    name: str
    values: tuple[Value, ...]
    start: int

    @classmethod
    def of(cls, model: str, name: str, values: Sequence[int], present: int | None) -> Setting:
        """Make one of numbers, with the present one among them."""
        numbers = sorted({*values, *(() if present is None else (present,))})
        if present is None:
            return cls(model, name, (None, *numbers), 0)
        return cls(model, name, tuple(numbers), numbers.index(present))


@dataclass(frozen=True, slots=True)
class SettingBounds:
    """The greatest values that are tried."""

    instances: int
    batch: int
    delay_us: float
    cores: int


def settings_of(raw: Raw, bounds: SettingBounds) -> tuple[list[Setting], dict[str, str]]:
    """Return the settings of a model's configuration, and those left out with their reasons."""
    found: list[Setting] = []
    left_out: dict[str, str] = {}
    for name, make in (
        ("instances", _instances),
        ("max_batch", _max_batch),
        ("delay", _delay),
        ("threads", _threads),
        ("template", _template),
    ):
        made = make(raw, bounds)
        if isinstance(made, str):
            left_out[name] = made
        elif len(made.values) > 1:
            found.append(made)
        else:
            left_out[name] = "it has one value within the bounds"
    return found, left_out


def _instances(raw: Raw, bounds: SettingBounds) -> Setting | str:
    groups = raw.get("instance_group") or [{}]
    if is_ensemble(raw):
        return "an ensemble has no instances"
    if len(groups) > 1:
        return f"it has {len(groups)} groups of instances"
    if "MOONPOOL_INSTANCES" in raw.get("parameters", {}):
        return "MOONPOOL_INSTANCES lets their number follow the load"
    present = max(1, int(groups[0].get("count", 1)))
    return Setting.of(raw["name"], "instances", _steps(bounds.instances), present)


def _max_batch(raw: Raw, bounds: SettingBounds) -> Setting | str:
    present = int(raw.get("max_batch_size", 0))
    if reason := _no_batching(raw):
        return reason
    values = [1 << power for power in range(bounds.batch.bit_length())]
    return Setting.of(raw["name"], "max_batch", values, present)


def _delay(raw: Raw, bounds: SettingBounds) -> Setting | str:
    if reason := _no_batching(raw):
        return reason
    batching = raw.get("dynamic_batching")
    present = None if batching is None else int(batching.get("max_queue_delay_microseconds", 0))
    values = [delay for delay in _DELAYS_US if delay <= bounds.delay_us]
    return Setting.of(raw["name"], "delay", values, present)


def _no_batching(raw: Raw) -> str | None:
    if is_ensemble(raw):
        return "the models of its steps form the batches"
    if "sequence_batching" in raw:
        return "its requests belong to sequences"
    if not int(raw.get("max_batch_size", 0)):
        return "it takes no batches"
    return None


def _threads(raw: Raw, bounds: SettingBounds) -> Setting | str:
    if is_ensemble(raw):
        return "an ensemble has no processes"
    key = _key(raw["backend"], "threads")
    if bounds.cores == 1:
        return "this process may use one processor"
    text = _parameter(raw, key)
    if text is not None and not text.isdecimal():
        return f"{key} is {text!r:.40}"
    return Setting.of(raw["name"], "threads", _steps(bounds.cores), None if text is None else int(text))


def _template(raw: Raw, bounds: SettingBounds) -> Setting | str:  # noqa: ARG001 - as the others
    if is_ensemble(raw):
        return "an ensemble has no processes"
    present = _parameter(raw, _TEMPLATE)
    if present is not None and present not in _TEMPLATES:
        return f"{_TEMPLATE} is {present!r:.40}"
    if present is None:
        # Blank is what a configuration without the field means.
        others = [each for each in _TEMPLATES if each != "blank"]
        return Setting(raw["name"], "template", (others[0], None, *others[1:]), 1)
    return Setting(raw["name"], "template", _TEMPLATES, _TEMPLATES.index(present))


def is_ensemble(raw: Raw) -> bool:
    """Return True for the configuration of an ensemble."""
    return "ensemble_scheduling" in raw


def _steps(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16 and so on up to `most`, with `most`."""
    steps = {most}
    size = 1
    while size <= most:
        steps.update(each for each in (size, size * 3 // 2) if each <= most)
        size *= 2
    return sorted(steps)


def _parameter(raw: Raw, key: str) -> str | None:
    value = raw.get("parameters", {}).get(key)
    return None if value is None else str(value.get("string_value", ""))


def with_values(raw: Raw, values: Mapping[str, Value], backend: str) -> Raw:
    """Return a configuration with other values of settings, by name. None leaves a field as it is.

    `backend` is the model's, which a configuration may leave to be found out.
    """
    changed = copy.deepcopy(dict(raw))
    for name, value in values.items():
        if value is None:
            continue
        if name == "instances":
            groups = changed.get("instance_group") or [{}]
            changed["instance_group"] = [{**groups[0], "count": value}]
        elif name == "max_batch":
            batching = changed.get("dynamic_batching") or {}
            # One size, the largest, is what a configuration without preferred sizes means.
            if batching.get("preferred_batch_size") == [changed.get("max_batch_size")]:
                del batching["preferred_batch_size"]
            changed["max_batch_size"] = value
        elif name == "delay":
            batching = changed.get("dynamic_batching") or {}
            changed["dynamic_batching"] = {**batching, "max_queue_delay_microseconds": value}
        else:
            key = _key(backend, name)
            parameters = changed.get("parameters") or {}
            changed["parameters"] = {**parameters, key: {"string_value": str(value)}}
    return normalise(changed)


def _key(backend: str, name: str) -> str:
    """Return the parameter of threads or template."""
    return _TEMPLATE if name == "template" else _THREADS.get(backend, "MOONPOOL_THREADS")


def written(text: str, values: Mapping[str, Value], measured: Raw, file: str) -> str:
    """Return the text of a `config.pbtxt` with other values of settings. All else in it stays as it is.

    `measured` is the whole configuration at the start, of which the text may leave parts to be found out.
    Raises `ConfigError` for a text that cannot be read, and `Unwritable` if the new text would not mean what it should.
    """
    before, _ = pbtxt.parse(text, file)
    backend = measured["backend"]
    changed = {name: value for name, value in values.items() if value is not None}
    batching = measured.get("dynamic_batching")
    if "max_batch" in changed and batching is not None and "dynamic_batching" not in before:
        # A backend adds batching only to a configuration that says nothing of batches.
        changed.setdefault("delay", int(batching.get("max_queue_delay_microseconds", 0)))
    for name, value in changed.items():
        text = _edited(text, backend, name, value)
    try:
        found, _ = pbtxt.parse(text, file)
    except ConfigError as error:
        raise Unwritable(f"{file} could not be changed: {error}; change it by hand") from error
    if found != with_values(before, changed, backend):
        names = ", ".join(f"{name} = {value}" for name, value in changed.items())
        raise Unwritable(f"{file} is written in a way that is not understood; set {names} by hand")
    return text


def _edited(text: str, backend: str, name: str, value: Value) -> str:
    if name == "instances":
        block = f"instance_group [\n  {{\n    count: {value}\n  }}\n]"
        return _put(text, "instance_group[0]", "count", str(value), block)
    if name == "max_batch":
        return _put(text, "", "max_batch_size", str(value), f"max_batch_size: {value}")
    if name == "delay":
        field = "max_queue_delay_microseconds"
        block = f"dynamic_batching {{\n  {field}: {value}\n}}"
        return _put(text, "dynamic_batching[0]", field, str(value), block)
    key = _key(backend, name)
    block = f'parameters {{\n  key: "{key}"\n  value: {{ string_value: "{value}" }}\n}}'
    return _put(text, _entry(text, key), "string_value", f'"{value}"', block)


def _entry(text: str, key: str) -> str:
    """Return the path of the value of a parameter; one that no text has, if the text does not have it."""
    for path, offset, _ in fields(text):
        is_key = path.startswith("parameters[") and path.endswith("].key[0]")
        if is_key and token_at(text, offset).strip("\"'") == key:
            return path.removesuffix("key[0]") + "value[0]"
    return "parameters[-1]"


def _put(text: str, outer: str, field: str, literal: str, block: str) -> str:
    """Set a field inside the message `outer`, "" for the whole text. Where there is no such message, append `block`."""
    # The last of a path is its value; the first of a field is its name.
    places = {path: offset for path, offset, is_key in fields(text) if not is_key}
    path = f"{outer}.{field}[0]" if outer else f"{field}[0]"
    if path in places:
        begin = places[path]
        return text[:begin] + literal + text[begin + len(token_at(text, begin)) :]
    if outer in places:
        begin = places[outer] + 1
        line = f"{field}: {literal}"
        rest = text[begin:]
        inside = rest[: len(rest) - len(rest.lstrip())]
        # In a message of many lines it gets a line of its own, as far in as the next one.
        if "\n" in inside:
            return text[:begin] + inside + line + rest
        return f"{text[:begin]} {line}{'' if inside else ' '}{rest}"
    return text + ("\n" if text and not text.endswith("\n") else "") + block + "\n"
