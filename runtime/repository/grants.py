"""Checks what a model's configuration would give the model beyond its level, against the grants of the operator.

A configuration is as untrusted as the model's code. Under a level that the operator set, each thing in it that goes
beyond the level is an `Ask`, which a grant of the same value must cover. Everything else is refused at the load, with
the text of the grant that would allow it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime.errors import LoadFailed, NotGranted
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import InstanceGroup, name_problem
from moonpool.runtime.model.config.options import (
    CHAT_TEMPLATE,
    OPTIONS,
    TASK,
    ModelOptions,
    hardened,
    listed,
    policy_of,
)
from moonpool.runtime.model.config.patterns import fits_any
from moonpool.runtime.model.config.schema import WrongPart, suggestion, unread
from moonpool.runtime.process.files import is_within
from moonpool.runtime.repository.environment import expanded


def granted(options: ModelOptions, gpus: Sequence[int] = ()) -> tuple[str, ...]:
    """Describe in words what a contained model is given, for the log and for a look at its instance. `gpus` are its
    GPUs.
    """
    if not is_contained(options.sandbox):
        return ()
    paths = [f"{'write' if writes else 'read'} {path}" for path, writes in options.sandbox_paths]
    interpreter = options.execution_env_path
    return (
        *([f"run the interpreter of {interpreter}"] if interpreter is not None else []),
        *paths,
        *(f"use GPU {gpu}" for gpu in gpus),
        *(f"connect to port {port}" for port in options.sandbox_ports),
        *(f"call {name}" for name in options.sandbox_syscalls),
        *(f"ask model {pattern}" for pattern in options.sandbox_models),
        *(f"see {pattern} of the environment" for pattern in options.environment),
        *(["share a template with its other instances"] if options.has_template else []),
        *(["keep what it compiles"] if options.compile_cache else []),
        *(["stay in memory"] if options.pin else []),
    )


def check_may_ask(asker: Model, name: str) -> None:
    """Raise `NotGranted` unless the sandbox of a model lets it call another one, load it or unload it."""
    options = asker.options
    if not is_contained(options.sandbox):
        return
    if not fits_any(options.sandbox_models, name):
        raise NotGranted(
            f"the sandbox of model '{asker.name}' does not let it ask for model '{name}'; "
            "MOONPOOL_SANDBOX_MODELS in its configuration names those that it may"
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing beyond the model's level that its configuration asks for."""

    # The key in a grant; "" if only a grant of the whole model covers it.
    key: str
    # The text in the configuration, and its value.
    text: str
    value: object
    # The field of the configuration.
    field: str
    # Words for what the model would get.
    more: str

    @property
    def what(self) -> str:
        """Return the option with its value, or words for what the model would get."""
        return f"{self.key}={self.text}" if self.key else self.more

    @property
    def is_pastable(self) -> bool:
        """Tell if a grant of it reads the same in a shell, a file, a variable and a program."""
        return bool(self.key and _PASTABLE.fullmatch(self.text)) and not _NEXT.search(self.text)


def asks(model: Model, said: Collection[str] = ()) -> Iterator[Ask]:
    """List all things that a model's configuration gives it beyond its level, without the options `said` by the
    operator.
    """
    options, parameters = model.options, model.config.parameters
    # What the runtime keeps for the model follows the memory that the operator has given its process.
    memory_bytes = options.memory_limit_bytes if _MEMORY in said else None
    usual = hardened(replace(type(options)(), sandbox=options.sandbox, memory_limit_bytes=memory_bytes))
    yield from _links(model)
    yield from _processors(model, said)
    yield from _resources(model)
    if CHAT_TEMPLATE not in said:
        yield from _template(model)
    for key, attribute in _GRANTS.items():
        value = getattr(options, attribute)
        if key not in said and value != getattr(usual, attribute):
            text = parameters.get(key, "").strip()
            if isinstance(value, tuple):
                # Without the spaces, which a shell would want quoted.
                text = ",".join(part.strip() for part in text.split(",") if part.strip())
            yield Ask(key, text, value, f"parameters[{key}]", "more than its sandbox does")
    if model.config.uses_gpu:
        gpus = _gpus(model)
        text = "all" if gpus is None else ",".join(map(str, gpus))
        yield Ask(_GPUS, text, gpus, "instance_group", "a GPU")
    for key, (attribute, bound) in _LIMITS.items():
        value, most = _amount(options, attribute), _amount(usual, bound)
        if key not in said and _exceeds(value, most):
            text = parameters.get(key, "").strip()
            yield Ask(key, text, value, f"parameters[{key}]", f"more than {most}")
    for key, (attribute, least) in _FLOORS.items():
        value = getattr(options, attribute)
        if key not in said and value is not None and value < least:
            text = parameters.get(key, "").strip()
            yield Ask(key, text, value, f"parameters[{key}]", f"less than {least:g}")
    idle_us = _sequence_idle_us(model)
    if idle_us > _MOST_SEQUENCE_IDLE_US:
        field, more = _SEQUENCE_IDLE_FIELD, f"more than {_MOST_SEQUENCE_IDLE_US}"
        yield Ask(_SEQUENCE_IDLE, str(idle_us), idle_us, field, more)


class _Resource(NamedTuple):
    """A resource of the rate limiter. `kind` is "global" if all devices share it, or else ""."""

    name: str
    kind: str
    most: int

    def includes(self, other: _Resource) -> bool:
        """Tell if a grant of this one covers another one."""
        return self[:2] == other[:2] and self.most >= other.most

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.name, self.most, self.kind) if part != "")


class Grants:
    """The grants of an operator, beyond the levels of models. Never changes.

    A grant of a whole model (`MODEL`) covers all that its configuration asks for, now and later. The others cover one
    value each (`MODEL:KEY=VALUE`), so that nobody gets more by changing the configuration.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Read `MODEL` and `MODEL:KEY=VALUE,KEY=VALUE`. Raises `ValueError`."""
        self.whole: set[str] = set()
        self._values: dict[tuple[str, str], list[object]] = {}
        # Each letter of a text alone would be the name of a model that is granted everything.
        if isinstance(texts, str):
            raise ValueError(f"must be a list of texts, such as [{texts!r:.200}]")
        for text in texts:
            try:
                name, values = _read(text)
            except ValueError as error:
                raise ValueError(unread(error, text)) from None
            if values is None:
                self.whole.add(name)
            for key, value in values or ():
                self._values.setdefault((name, key), []).append(value)

    def names(self) -> list[str]:
        """Return the names of the models that were granted something."""
        return sorted(self.whole | {name for name, _ in self._values})

    def covers(self, name: str, ask: Ask) -> bool:
        """Tell if this value, or one that gives as much, was granted to the model."""
        return _is_within(ask, self._values.get((name, ask.key), ()))


def read_grant(text: str) -> str:
    """Check one text for `Grants`, and return it. Raises `ValueError`, which says what it must be."""
    _read(text)
    return text


def _read(text: str) -> tuple[str, list[tuple[str, object]] | None]:
    """Return the model, and the values that it is granted by key; None for all."""
    quoted_name, colon, rest = text.partition(":")
    name = unquote(quoted_name)
    if problem := name_problem(name):
        raise ValueError(f"must be MODEL or MODEL:KEY=VALUE ({problem})")
    return name, [_one_grant(part) for part in _NEXT.split(rest)] if colon else None


def _one_grant(part: str) -> tuple[str, object]:
    key, equals, value = part.partition("=")
    if key not in _GRANTABLE:
        meant = "" if key in HARMLESS else suggestion(key, _GRANTABLE)
        raise WrongPart(f"{key!r:.80} cannot be granted{meant or '; these can: ' + ', '.join(_GRANTABLE)}")
    if not equals:
        raise ValueError(
            f"must say which value of {key} is granted, such as {key}={_EXAMPLES.get(key, 'VALUE')}, as the next "
            "version of the model could ask for another (`moonpool check REPO --sandbox strict` prints what models ask "
            "for)"
        )
    try:
        return key, _GRANTABLE[key](value.strip())
    except ValueError as error:
        raise WrongPart(f"{key} {error}, not {value!r:.80}") from None


def _is_within(ask: Ask, granted: Sequence[object]) -> bool:
    if ask.key in _LIMITS or ask.key == _SEQUENCE_IDLE:
        return any(not _exceeds(ask.value, most) for most in granted)  # type: ignore[arg-type]
    if ask.key in _FLOORS:
        return any(not _exceeds(least, ask.value) for least in granted)  # type: ignore[arg-type]
    if ask.key == _GPUS and None in granted:
        return True
    if isinstance(ask.value, tuple):
        single = {item for value in granted if isinstance(value, tuple) for item in value}
        if ask.key == _RESOURCES:
            return all(any(more.includes(each) for more in single) for each in ask.value)
        # A grant to write includes reading.
        single |= {(item[0], False) for item in single if isinstance(item, tuple)}
        return single.issuperset(ask.value)
    return ask.value in granted and ask.value is not None


def check_ungranted(
    model: Model, grants: Grants, form: Callable[[str], str], *, said: Collection[str] = (), brings: str = ""
) -> None:
    """Raise `ConfigError` if the configuration gives the model more than its level and its grants do.

    `said` are the options that the operator set for it, and `form` writes a grant as this program takes it. `brings` is
    that of `Wanted`. A grant of the whole model is for the configuration in the repository. Files that a load brings
    have no grants at all: the operator meant other code.
    """
    name = model.name
    if not brings and name in grants.whole:
        return
    has_foreign_code = brings == "files"
    found = list(asks(model, () if has_foreign_code else said))
    refused = [ask for ask in found if has_foreign_code or not grants.covers(name, ask)]
    if not refused:
        return
    first = refused[0]
    what = f"a model's configuration cannot give it {first.more}"
    if has_foreign_code:
        what += f": what '{name}' was granted is for its files in the repository, not for those that a load brings"
    elif all(ask.is_pastable for ask in found):
        what += f"; to let '{name}', start it with {form(paste(name, found))}"
    else:
        option = form(quoted_name(name))
        what += f"; to let '{name}' have whatever its configuration says, now and later, start it with {option}"
    raise model.config.source.error(first.field, what)


def paste(name: str, found: Iterable[Ask]) -> str:
    """Return the text that grants all this, if all of it is pastable."""
    return f"{quoted_name(name)}:" + ",".join(f"{ask.key}={ask.text}" for ask in found)


def quoted_name(name: str) -> str:
    """Quote a name as in an address: without that, its first colon would end it."""
    return quote(name, safe="+,=@")


def as_flag(grant: str) -> str:
    """Return a grant in the form of the command line."""
    return f"--sandbox-grants={quoted(grant)}"


def quoted(grant: str) -> str:
    """Quote a grant for a shell; a name needs no quotes."""
    name, colon, values = grant.partition(":")
    return f"{name}:{shlex.quote(values)}" if colon else name


def as_argument(grant: str) -> str:
    """Return a grant in the form of a program."""
    return f"Runtime(sandbox_grants=[{json.dumps(grant)}])"


def _links(model: Model) -> Iterator[Ask]:
    """List links below the model's directory that lead out of it, since the model could read the files at their end."""
    source = model.source
    if not source.is_directory:
        return
    folder = os.path.realpath(source.model_directory)
    named = [Path(path) for path, _ in model.options.sandbox_paths]
    if model.options.execution_env_path is not None:
        named.append(expanded(model.options.execution_env_path, source.model_directory))
    # The file of a Python-based backend is the server's own.
    for path in (source.version_directory, source.file, *named):
        if path.is_relative_to(source.model_directory):
            real = os.path.realpath(path)
            if not is_within(real, folder):
                more = f"the files at the end of the link {path}, which is {real}"
                yield Ask("", "", None, "", more)


def check_stays_inside(model: Model) -> None:
    """Raise `LoadFailed` if the model must stay inside its directory and a link leads out of it."""
    for link in _links(model) if model.stays_inside else ():
        raise LoadFailed(f"the model would have {link.more}, outside its folder", stage="sandbox")


def _processors(model: Model, said: Collection[str]) -> Iterator[Ask]:
    """Yield the processors of the model, if the host policies of the operator give instances of their kinds others."""
    policies, own = model.host_policies, model.options.cpus
    if own and _CPUS in said:
        return
    taken: set[int] = set()
    field = more = ""
    for index, group in enumerate(model.config.instance_groups):
        for kind, gpu in _kinds(group, model):
            allowed = policies.get(policy_of("", kind, gpu))
            # Nothing but its name tells an instance of the kind MODEL from one on the CPU.
            if allowed is None and kind == "MODEL":
                allowed = policies.get(policy_of("", "CPU", 0))
            if allowed is None:
                continue
            # A policy that the operator has not given is for all processors.
            cpus = own or policies.get(policy_of(group.host_policy, kind, gpu))
            cpus = tuple(sorted(os.sched_getaffinity(0))) if cpus is None else cpus
            if set(cpus) <= set(allowed):
                continue
            taken |= set(cpus)
            what = "host_policy" if group.host_policy else "kind"
            field = field or (f"parameters[{_CPUS}]" if own else f"instance_group[{index}].{what}")
            more = more or f"other processors than {listed(allowed)}, which the host policy has"
    if taken:
        cpus = tuple(sorted(taken))
        yield Ask(_CPUS, listed(cpus).replace(" ", ""), cpus, field, more)


def _kinds(group: InstanceGroup, model: Model) -> list[tuple[str, int]]:
    """Return the kinds that the instances of a group may have, each with the number of a GPU."""
    kinds = []
    if group.kind == "GPU" or (group.kind == "AUTO" and model.config.uses_gpu):
        # A group that names no GPU has all.
        numbers = group.gpus or [int(name[4:]) for name in model.host_policies if re.fullmatch("gpu_[0-9]{1,4}", name)]
        kinds += [("GPU", number) for number in numbers]
    if group.kind != "GPU":
        kinds.append(("MODEL" if group.kind == "MODEL" else "CPU", 0))
    return kinds


def _resources(model: Model) -> Iterator[Ask]:
    """Yield the resources that the model would share with others: it holds them while it executes, which may be for
    ever.
    """
    if not model.is_rate_limited:
        return
    needed = {
        (each.name, "global" if each.is_global else "", each.count)
        for group in model.config.instance_groups
        for each in group.rate_limits.resources
    }
    if not needed:
        return
    value = tuple(_Resource(*each) for each in sorted(needed))
    text = ",".join(map(str, value))
    try:
        is_plain = _read_resources(text) == value
    except ValueError:  # a name with a comma, for example
        is_plain = False
    field, more = "instance_group.rate_limiter", "resources that other models then wait for"
    yield Ask(_RESOURCES, text, value, field, more) if is_plain else Ask("", "", None, field, more)


def _template(model: Model) -> Iterator[Ask]:
    """Yield a chat template outside of the model's folder, which the runtime would read for the model."""
    path = model.options.chat_template
    if path is not None and os.path.isabs(path):
        yield Ask("", "", None, f"parameters[{CHAT_TEMPLATE}]", f"the file {path}")


def _read_resources(text: str) -> tuple[_Resource, ...]:
    found = [_RESOURCE.fullmatch(each.strip()) for each in text.split(",")]
    if None in found:
        raise ValueError("must be NAME:COUNT, or NAME:COUNT:global, separated by commas")
    return tuple(_Resource(each[1], each[3] or "", int(each[2])) for each in found if each)


def _gpus(model: Model) -> tuple[int, ...] | None:
    """Return the numbers of the GPUs that a configuration may get; None for all."""
    # Beside a group of the kind GPU, those of the kind AUTO are placed on GPUs, too.
    groups = [group for group in model.config.instance_groups if group.kind in ("GPU", "AUTO")]
    if not all(group.gpus for group in groups):
        return None
    return tuple(sorted({gpu for group in groups for gpu in group.gpus}))


def _sequence_idle_us(model: Model) -> int:
    """Return the time for which a sequence may be without requests; 0 for a model without sequences."""
    batching = model.config.sequence_batching
    return 0 if batching is None else batching.max_idle_us


def _read_idle_us(text: str) -> int:
    if not re.fullmatch("[0-9]{1,20}", text):
        raise ValueError("must be a number of microseconds")
    return int(text)


def _read_gpus(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    numbers = text.split(",")
    if not all(re.fullmatch(r" *[0-9]{1,4} *", number) for number in numbers):
        raise ValueError('must be numbers of GPUs, such as 0,1, or "all"')
    return tuple(map(int, numbers))


def _amount(options: ModelOptions, attribute: str) -> float | None:
    """Return the value of a limit. A missing deadline counts as infinite."""
    value: float | None = getattr(options, attribute)
    return math.inf if value is None and attribute in _DEADLINES.values() else value


def _exceeds(value: float | None, most: float | None) -> bool:
    """Tell if a limit is looser than another one. None sets no limit of its own, and is not looser."""
    return value is not None and most is not None and value > most


def check_not_looser(model: Model, asker: ModelOptions) -> None:
    """Raise `ConfigError` if a configuration that a model brings gives more than this model has itself."""
    options, source = model.options, model.config.source
    if LEVELS.index(options.sandbox) < LEVELS.index(asker.sandbox):
        what = f"a model in the sandbox '{asker.sandbox}' cannot load one in '{options.sandbox}'"
        raise source.error("parameters[MOONPOOL_SANDBOX]", what)
    if is_contained(asker.sandbox):
        subject = f"a model in the sandbox '{asker.sandbox}' cannot"
        if options.execution_env_path is not None:
            what = f"{subject} choose the interpreter of another"
            raise source.error("parameters[EXECUTION_ENV_PATH]", what)
        if model.config.uses_gpu:
            raise source.error("instance_group", f"{subject} give another a GPU")
        template = () if options.chat_template == asker.chat_template else _template(model)
        for ask in (*_resources(model), *template):
            raise source.error(ask.field, f"{subject} give another {ask.more}")
        what = f"a model in the sandbox '{asker.sandbox}' cannot set this for another"
        for key, attribute in _GRANTS.items():
            value = getattr(options, attribute)
            if value not in (getattr(asker, attribute), getattr(type(options)(), attribute)):
                raise source.error(f"parameters[{key}]", what)
        for key, (attribute, bound) in _LIMITS.items():
            is_unset = key in _DEADLINES and key not in model.config.parameters
            if not is_unset and _exceeds(_amount(options, attribute), _amount(asker, bound)):
                raise source.error(f"parameters[{key}]", what)
        for key, (attribute, least) in _FLOORS.items():
            value, own = getattr(options, attribute), getattr(asker, attribute)
            if value is not None and value < (least if own is None else min(least, own)):
                raise source.error(f"parameters[{key}]", what)
        if _sequence_idle_us(model) > _MOST_SEQUENCE_IDLE_US:
            raise source.error(_SEQUENCE_IDLE_FIELD, what)


# Loads and unloads wait so long, and the start and the end of a server with them.
_DEADLINES = {
    "MOONPOOL_LOAD_TIMEOUT_S": "load_timeout_s",
    "MOONPOOL_FINALIZE_TIMEOUT_S": "finalize_timeout_s",
    # A model that needs memory waits so long for another one.
    "MOONPOOL_SLEEP_TIMEOUT_S": "sleep_timeout_s",
    "MOONPOOL_WAKE_TIMEOUT_S": "wake_timeout_s",
}
# Each limit with the one that it may not exceed. Tighter limits harm nobody.
_LIMITS = {
    **{key: (attribute, attribute) for key, attribute in _DEADLINES.items()},
    "MOONPOOL_MEMORY_LIMIT_BYTES": ("memory_limit_bytes", "memory_limit_bytes"),
    # The first region counts with all others of the model's instances, which could grow as far without this option.
    "MOONPOOL_REGION_BYTES": ("region_bytes", "region_limit_bytes"),
    "MOONPOOL_REGION_LIMIT_BYTES": ("region_limit_bytes", "region_limit_bytes"),
    "MOONPOOL_TASK_LIMIT": ("task_limit", "task_limit"),
    "MOONPOOL_OPEN_FILES": ("open_files", "open_files"),
    "MOONPOOL_SCRATCH_BYTES": ("scratch_bytes", "scratch_bytes"),
    "MOONPOOL_BACKLOG_BYTES": ("backlog_bytes", "backlog_bytes"),
    "MOONPOOL_CPU_WEIGHT": ("cpu_weight", "cpu_weight"),
    "MOONPOOL_LOG_LINES_PER_S": ("log_lines_per_s", "log_lines_per_s"),
    "MOONPOOL_STATE_LIMIT_BYTES": ("state_limit_bytes", "state_limit_bytes"),
    "MOONPOOL_MAX_RESTARTS": ("max_restarts", "max_restarts"),
    "MOONPOOL_CONCURRENT_BATCHES": ("concurrent_batches", "concurrent_batches"),
}
# Options that cost the runtime something if they are small, each with the least that it may be: restarts, starts after
# a sleep, and looks for batches that take too long. A short deadline of a load, an end, `sleep` or `wake` costs the
# model itself alone.
_FLOORS = {
    "MOONPOOL_RESTART_WINDOW_S": ("restart_window_s", ModelOptions().restart_window_s),
    "MOONPOOL_RESTART_BACKOFF_S": ("restart_backoff_s", ModelOptions().restart_backoff_s),
    "MOONPOOL_RESTART_BACKOFF_MAX_S": ("restart_backoff_max_s", ModelOptions().restart_backoff_max_s),
    "MOONPOOL_RECYCLE_REQUESTS": ("recycle_requests", 1000),
    "MOONPOOL_IDLE_S": ("idle_s", 60.0),
    "MOONPOOL_EXECUTE_TIMEOUT_S": ("execute_timeout_s", 0.1),
}
# Options that may have any value without a grant, since they give the model nothing that it lacks. Whatever is in none
# of these tables needs a grant, also an option that is yet to come.
HARMLESS = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "where inputs lie that it gets anyway",
    "MOONPOOL_SANDBOX": "a lower level than the operator's is not taken",
    "MOONPOOL_RETRY": "one more attempt for requests to itself",
    "MOONPOOL_LOG_ERRORS": "lines that it could log itself, which MOONPOOL_LOG_LINES_PER_S counts",
    "MOONPOOL_THREADS": "its own threads, which MOONPOOL_TASK_LIMIT counts",
    "MOONPOOL_INSTANCES_PER_PROCESS": "its own threads, which MOONPOOL_TASK_LIMIT counts",
    "MOONPOOL_STATE_SURVIVES": "states that MOONPOOL_STATE_LIMIT_BYTES counts",
    "MOONPOOL_GPU_AS_NUMPY": "its own memory",
    "MOONPOOL_AS_CPU": "no GPU",
    "MOONPOOL_INSTANCES": "no more instances than `instance_group` may have",
    TASK: "what it is asked for, and nothing that it gets",
    CHAT_TEMPLATE: "a file of its own, unless the path is absolute",
    "MOONPOOL_WAIT_TARGET_MS": "no more instances than `instance_group` may have, which stay for seconds",
}
# Fewer processors harm nobody, and no others need a grant unless a host policy says which the model has.
_CPUS = "MOONPOOL_CPUS"
# What a template does, and not how the process was started: a blank one gives a model nothing.
_ATTRIBUTES = {"MOONPOOL_PREFORK": "template"}
_GRANTS = {
    option.key: _ATTRIBUTES.get(option.key, option.attribute)
    for option in OPTIONS
    if option.key not in (*HARMLESS, *_LIMITS, *_FLOORS, _CPUS)
}
_MEMORY = "MOONPOOL_MEMORY_LIMIT_BYTES"
# A sequence keeps the model awake, and its state in the runtime, for so long after its last request.
_SEQUENCE_IDLE, _MOST_SEQUENCE_IDLE_US = "SEQUENCE_IDLE_US", 600_000_000
_SEQUENCE_IDLE_FIELD = "sequence_batching.max_sequence_idle_microseconds"
_GPUS = "GPUS"
_RESOURCES = "RESOURCES"
# The functions that read the values of grants, by key.
_GRANTABLE: dict[str, Callable[[str], object]] = {
    **{option.key: option.kind.read for option in OPTIONS if option.key not in HARMLESS},
    _GPUS: _read_gpus,
    _RESOURCES: _read_resources,
    _SEQUENCE_IDLE: _read_idle_us,
}
_EXAMPLES = {
    "EXECUTION_ENV_PATH": "/envs/one",
    "MOONPOOL_SANDBOX_PATHS": "/data",
    "MOONPOOL_SANDBOX_PORTS": "443",
    "MOONPOOL_MEMORY_LIMIT_BYTES": "64G",
    _GPUS: "0",
    _RESOURCES: "R1:4",
}
# The place at which the next grant for the same model begins.
_NEXT = re.compile(rf",(?=(?:{'|'.join(_GRANTABLE)})(?:=|,|$))")
_RESOURCE = re.compile(r"([^:,]+):([0-9]{1,10})(?::(global))?", re.ASCII)
# Only characters that read the same in a shell, in a variable with `;` between its values, and in a program.
_PASTABLE = re.compile(r"[A-Za-z0-9_./,:*+@%= $-]+")
