"""Limits on what a configuration may ask for, so that none takes the memory or the processes of a machine.

Each limit is far above what models have. An operator who needs more raises it by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from moonpool.runtime.model.config.model import InstanceGroup
from moonpool.runtime.model.config.source import ConfigError, Source

# No field lies deeper in the schema. Deeper nesting is refused before anything recurses.
_DEEPEST = 32
_LARGEST = 2**31 - 1
# Lists that have a limit of their own. `items` is the limit of all others, and of maps.
_LISTS = {"input": "inputs", "output": "outputs"}


@dataclass(frozen=True, slots=True)
class ConfigLimits:
    """The limits for the configuration of one model. Each is checked before the memory or process that it bounds is
    taken.

    `option` is the option by which an operator raises one, with braces for its name and number.
    """

    # The size of config.pbtxt, or of the JSON that a load brings: parsed JSON takes twenty times its size.
    config_bytes: int = 1 << 20
    # The instances of all versions together; each is a process.
    instances: int = 1024
    versions: int = 256
    inputs: int = 4096
    outputs: int = 4096
    # Each has a queue once a request names it.
    priority_levels: int = 1024
    # Of one instance at a time. Each is there until it has been idle for as long as the model says.
    sequences: int = 1 << 16
    # The entries of any other list or map: preferred sizes, queue policies, parameters, tags, buckets, GPUs.
    items: int = 4096
    # The requests that one request to an ensemble becomes, ensembles in its steps included.
    ensemble_requests: int = 4096
    option: str = "--model-config-limit={}"

    def raised(self, texts: Iterable[str]) -> ConfigLimits:
        """Return these limits with some changed by texts such as `instances=2000`. Raises ValueError."""
        names = [each.name for each in fields(self) if each.name != "option"]
        changes: dict[str, Any] = {}
        for text in texts:
            name, _, number = text.partition("=")
            if name not in names or not re.fullmatch("[0-9]{1,10}", number):
                raise ValueError(f"must be one of {', '.join(names)} and a number, such as items=9999")
            if not 0 < int(number) <= _LARGEST:
                raise ValueError(f"{name} must be a number from 1 to {_LARGEST}")
            changes[name] = int(number)
        return replace(self, **changes)

    def check_size(self, size_bytes: int, file: str | None = None) -> None:
        """Raise `ConfigError` for a text of a configuration that is too long to be read."""
        if size_bytes > self.config_bytes:
            raise ConfigError(f"is longer than {self.config_bytes} bytes{self.advice('config_bytes')}", file=file)

    def check(self, raw: Mapping[str, object], source: Source) -> None:
        """Raise `ConfigError` for lists and numbers that are too large. `raw` may be wrong in any other way."""
        # Without recursion, since `raw` may be nested to any depth.
        waiting: list[tuple[str, object, int]] = [("", raw, 0)]
        while waiting:
            path, value, depth = waiting.pop()
            if depth > _DEEPEST:
                raise source.error(path, f"is nested more than {_DEEPEST} deep")
            if isinstance(value, Mapping):
                self._check_count(path, len(value), source)
                inner = [(f"{path}.{key}" if path else str(key), each) for key, each in value.items()]
            elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
                self._check_count(path, len(value), source)
                inner = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
            else:
                continue
            waiting += [(where, each, depth + 1) for where, each in reversed(inner)]
        batching = raw.get("dynamic_batching")
        levels = batching.get("priority_levels") if isinstance(batching, Mapping) else None
        self._check_number("dynamic_batching.priority_levels", "priority_levels", levels, "levels", source)
        sequences = raw.get("sequence_batching")
        if isinstance(sequences, Mapping):
            oldest, path = sequences.get("oldest"), "max_batch_size"
            slots = raw.get(path)
            if isinstance(oldest, Mapping) and oldest.get("max_candidate_sequences"):
                path = "sequence_batching.oldest.max_candidate_sequences"
                slots = oldest["max_candidate_sequences"]
            self._check_number(path, "sequences", slots, "sequences of an instance", source)

    def _check_number(self, path: str, name: str, value: object, unit: str, source: Source) -> None:
        if isinstance(value, int | str) and re.fullmatch("[0-9]{1,20}", str(value)[:21]):
            self._check(path, name, int(value), unit, source)

    def _check_count(self, path: str, count: int, source: Source) -> None:
        self._check(path, _LISTS.get(path, "items"), count, "entries", source)

    def check_versions(self, count: int, source: Source) -> None:
        """Raise `ConfigError` if the version policy picks more versions than may be loaded."""
        self._check("version_policy", "versions", count, "versions", source)

    def check_instances(self, groups: Sequence[InstanceGroup], versions: int, source: Source) -> None:
        """Raise `ConfigError` if the groups of so many versions have too many instances."""
        total = 0
        for index, group in enumerate(groups):
            total += versions * group.count * max(1, len(group.gpus))
            self._check(f"instance_group[{index}].count", "instances", total, "instances", source)

    def _check(self, path: str, name: str, count: int, unit: str, source: Source) -> None:
        most = getattr(self, name)
        if count > most:
            what = f"asks for {count} {unit}, and {most} is the most"
            raise source.error(path, what + self.advice(name))

    def advice(self, name: str) -> str:
        """Return the part of an error that says how to raise a limit."""
        return f"; an operator raises it by {self.option.format(f'{name}=NUMBER')}"
