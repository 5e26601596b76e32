"""The settings of Triton's trace extension: which requests are traced, and what a trace has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.runtime.server.setting_values import BadSetting, number, text, texts

LEVELS = ("TIMESTAMPS", "TENSORS")
TRITON = "triton"
OPENTELEMETRY = "opentelemetry"
_NUMBERS = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
# The settings of the exporter unless the command line has others.
_EXPORTER = {
    "url": "http://localhost:4318/v1/traces",
    "bsp_max_queue_size": "2048",
    "bsp_schedule_delay": "5000",
    "bsp_max_export_batch_size": "512",
}


@dataclass(frozen=True)
class TraceSetting:
    """The settings for all models, or for one."""

    levels: tuple[str, ...] = ()
    """TIMESTAMPS, TENSORS, or both; empty for OFF."""
    rate: int = 1000
    """One of so many requests is traced."""
    count: int = -1
    """The number of requests that are traced; -1 sets no limit."""
    log_frequency: int = 0
    """The number of traces in a file; 0 for one file with all of them."""

    def shown_levels(self) -> list[str]:
        """Return the levels by the protocol's names."""
        return list(self.levels) or ["OFF"]


@dataclass(frozen=True)
class TraceOptions:
    """The settings of traces on the command line."""

    setting: TraceSetting = field(default_factory=TraceSetting)
    mode: str = TRITON
    file: str = ""
    """The file for traces in the mode `triton`."""
    exporter: Mapping[str, str] = field(default_factory=lambda: dict(_EXPORTER))
    """The exporter in the mode `opentelemetry`: url, bsp_max_queue_size, bsp_schedule_delay (in milliseconds),
    bsp_max_export_batch_size."""
    resource: Mapping[str, str] = field(default_factory=lambda: {"service.name": "moonpool"})
    """Attributes of the server in spans, such as service.name."""

    def invalid_reason(self, setting: TraceSetting) -> str | None:
        """Return the reason why nothing can be traced with a setting whose level is not OFF; None if it can."""
        if not setting.levels:
            return None
        if self.mode == TRITON and not self.file:
            return "trace file name is not given"
        # A request that comes with a context is traced at any rate.
        if setting.rate == 0 and self.mode == TRITON:
            return "sample rate must be non-zero"
        return "" if setting.count == 0 else None


_KNOWN = (
    "level, rate, count, mode; triton,file, triton,log-frequency; opentelemetry,url, "
    "opentelemetry,resource, opentelemetry,bsp_max_queue_size, opentelemetry,bsp_schedule_delay, "
    "opentelemetry,bsp_max_export_batch_size"
)


def trace_options(flags: Iterable[str]) -> TraceOptions:
    """Read the values of `--trace-config`: `level=TIMESTAMPS`, `triton,file=PATH`, and so on.

    Raises `BadSetting`.
    """
    changes: dict[str, object] = {}
    levels: list[str] = []
    said = {"mode": TRITON, "file": ""}
    exporter, resource = dict(_EXPORTER), {"service.name": "moonpool"}
    for flag in flags:
        name, value = _parsed(flag)
        if name == "level":
            levels.append(value)
        elif name in ("rate", "count"):
            changes[f"trace_{name}"] = value
        elif name == "triton,log-frequency":
            changes["log_frequency"] = value
        elif name in ("mode", "triton,file"):
            said[name.removeprefix("triton,")] = value
        elif name == "opentelemetry,resource":
            key, _, text_of = value.partition("=")
            resource[key] = text_of
        elif name.startswith("opentelemetry,") and name.removeprefix("opentelemetry,") in exporter:
            exporter[name.removeprefix("opentelemetry,")] = value
        else:
            raise BadSetting(f"--trace-config knows no setting {name:.80}; there are {_KNOWN}")
    for name in _NUMBERS:
        number(f"opentelemetry,{name}", exporter[name])
    if said["mode"] not in (TRITON, OPENTELEMETRY):
        raise BadSetting(f"--trace-config mode is {TRITON} or {OPENTELEMETRY}, not {said['mode']:.80}")
    unknown = set(levels) - {*LEVELS, "OFF"}
    if unknown:
        raise BadSetting(f"--trace-config level is OFF, TIMESTAMPS or TENSORS, not {', '.join(sorted(unknown))}")
    if levels:
        changes["trace_level"] = levels
    setting = changed(TraceSetting(), changes, TraceSetting())
    options = TraceOptions(setting, said["mode"], said["file"], exporter, resource)
    reason = options.invalid_reason(setting)
    if reason:
        needed = " (triton,file=PATH)" if not options.file else ""
        raise BadSetting(f"--trace-config: {reason}{needed}")
    return options


def _parsed(flag: str) -> tuple[str, str]:
    """Split a flag into its name, with the mode before it if it has one, and its value."""
    before, comma, rest = flag.partition(",")
    mode = f"{before}," if comma and "=" not in before else ""
    name, is_assigned, value = (rest if mode else flag).partition("=")
    if not is_assigned:
        raise BadSetting(
            f"--trace-config option format is '<trace mode>,<setting>=<value>' or '<setting>=<value>'. Got {flag:.80}"
        )
    return mode + name.replace("log_frequency", "log-frequency"), value


def changed(setting: TraceSetting, changes: Mapping[str, object], cleared: TraceSetting) -> TraceSetting:
    """Return a setting with the changes of a request. None takes a value from `cleared`.

    As in Triton, unknown names, the mode and unknown levels change nothing. Raises `BadSetting`.
    """
    if "trace_file" in changes:
        raise BadSetting("trace file location can not be updated through network protocol", "UNSUPPORTED")
    levels = setting.levels
    if "trace_level" in changes:
        value = changes["trace_level"]
        levels = cleared.levels if value is None else _levels(texts(value), levels)
    return TraceSetting(
        levels,
        _number("trace_rate", changes, setting.rate, cleared.rate),
        _number("trace_count", changes, setting.count, cleared.count, -1),
        _number("log_frequency", changes, setting.log_frequency, cleared.log_frequency),
    )


def _number(name: str, changes: Mapping[str, object], before: int, cleared: int, low: int = 0) -> int:
    if name not in changes:
        return before
    value = changes[name]
    return cleared if value is None else number(name, text(value), low)


def _levels(wanted: Sequence[str], before: tuple[str, ...]) -> tuple[str, ...]:
    if "OFF" in wanted:
        if len(wanted) > 1:
            raise BadSetting("Expect only one trace level 'OFF' is specified")
        return ()
    return tuple(level for level in LEVELS if level in wanted) or before


def changes_of_lists(settings: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return the changes of a gRPC request, in which every value is a list. An empty one clears. Raises
    `BadSetting`.
    """
    changes: dict[str, object] = {}
    for name, values in settings.items():
        if name == "trace_level":
            changes[name] = list(values) or None
        elif len(values) > 1 and name in ("trace_rate", "trace_count", "log_frequency"):
            raise BadSetting(f"expect only 1 value for '{name}'")
        else:
            changes[name] = values[0] if values else None
    return changes
