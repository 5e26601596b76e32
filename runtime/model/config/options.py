"""moonpool's own options of a model, in one table.

They are `parameters` of the model's configuration. The operator may set them by the models' names, too, and then they
take precedence over those of the configurations. `python -m moonpool.runtime.model.config.options` prints the table for
`docs/OPTIONS.md`.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.ipc.extension import PURE, pure
from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime.arguments import LONGEST_S, Arguments
from moonpool.runtime.model.config.model import AS_CPU, ModelConfig
from moonpool.runtime.model.config.patterns import fits
from moonpool.runtime.model.config.schema import WrongPart, suggestion
from moonpool.runtime.model.config.source import ConfigError
from moonpool.runtime.process.usage import machine_memory_bytes

# Each range is taken apart into its numbers.
_MOST_RANGES = 1024


@dataclass(frozen=True, slots=True)
class OptionKind:
    """Reads the text of an option. `read` raises ValueError with what the text must be."""

    title: str
    read: Callable[[str], object]


def parse_size(text: str) -> int:
    """Read a number of bytes above 0 with an optional K, M, G or T (powers of 1024). Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise ValueError("must be a number of bytes, such as 1048576, 512K, 64M or 2G")
    number, suffix = match.groups()
    factor = 1 << (10 * " KMGT".index(suffix.upper() or " "))
    # Whole numbers stay whole, however large.
    size = int(number) * factor if number.isdigit() else int(float(number) * factor)
    if not 0 < size < 1 << 63:
        raise ValueError("must be a number of bytes above 0 and below 2^63")
    return size


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError("must be a number of seconds above 0")
    if value > LONGEST_S:
        raise ValueError(f"must be at most {LONGEST_S} seconds")
    return value


def _pause(text: str) -> float:
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else _seconds(text)


def _number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise ValueError(f"must be a whole number from {least} up")
        return int(text)

    return read


def _or_none(read: Callable[[str], object]) -> Callable[[str], object]:
    def read_or_none(text: str) -> object:
        if text.lower() == "none":
            return None
        try:
            return read(text)
        except ValueError as error:
            raise ValueError(f'{error}, or "none"') from None

    return read_or_none


def _choice(meanings: Mapping[str, object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text not in meanings:
            raise ValueError("must be " + " or ".join(f'"{word}"' for word in meanings))
        return meanings[text]

    return read


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must be the path of an environment or of a packed one")
    return text


def _file(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must be the path of a file")
    return text


def _paths(text: str) -> tuple[tuple[str, bool], ...]:
    """Read paths, each with True if it may be written to."""
    paths = []
    for part in _names(text):
        path = part[3:].strip() if part.startswith(("rw:", "ro:")) else part
        # Two slashes at the beginning are a path of their own for `normpath`.
        is_plain = path.startswith("/") and not path.startswith("//")
        if not is_plain or "\0" in path or os.path.normpath(path) != path:
            raise ValueError(
                "must be absolute paths without '..', '//' or a '/' at the end, with rw: before those to write to"
            )
        paths.append((path, part.startswith("rw:")))
    return tuple(paths)


def _ports(text: str) -> tuple[int, ...]:
    ports = _names(text)
    if not all(re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536 for port in ports):
        raise ValueError("must be numbers of TCP ports, from 1 to 65535")
    return tuple(map(int, ports))


def _calls(text: str) -> tuple[str, ...]:
    if not all(re.fullmatch(r"[a-z0-9_]+", name) for name in _names(text)):
        raise ValueError("must be names of system calls, such as fork or memfd_create")
    return _names(text)


def _cpus(text: str) -> tuple[int, ...]:
    cpus: set[int] = set()
    parts = _names(text)
    if len(parts) > _MOST_RANGES:
        raise ValueError(f"must be at most {_MOST_RANGES} numbers and ranges of processors")
    for part in parts:
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        if match is None:
            raise ValueError("must be numbers of processors, such as 0-3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def listed(cpus: Sequence[int]) -> str:
    """Return processors as text, such as `0-3, 5`."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ", ".join("-".join(map(str, each)) for each in ranges)


# Processors by the name of a policy.
HostPolicies = Mapping[str, tuple[int, ...]]
_NODE = "/sys/devices/system/node/node{}/cpulist"


def read_host_policies(texts: Iterable[str]) -> HostPolicies:
    """Read `<policy>,<setting>=<value>`: the processors `cpu-cores`, or those of the `numa-node`. Raises ValueError.

    If a policy has both, those of its cores that the node has.
    """
    policies: dict[str, set[int]] = {}
    allowed = os.sched_getaffinity(0)
    for text in texts:
        name, _, rest = text.partition(",")
        setting, equals, value = rest.partition("=")
        if not (name and equals and value):
            raise ValueError(f"must be <policy>,<setting>=<value>, such as cpu,cpu-cores=0-3, not {text!r:.80}")
        if setting not in ("cpu-cores", "numa-node"):
            raise ValueError(f"has the settings cpu-cores and numa-node, not {setting!r:.60}")
        cpus = set(_cpus(value) if setting == "cpu-cores" else _of_node(value))
        policies[name] = policies.get(name, cpus) & cpus
        if not policies[name] or not policies[name] <= allowed:
            raise ValueError(
                f"{text!r:.80} leaves processors {sorted(policies[name])}, and the server may run on {sorted(allowed)}"
            )
    return {name: tuple(sorted(cpus)) for name, cpus in policies.items()}


def _of_node(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]{1,4}", text):
        raise ValueError(f"must have a number as numa-node, not {text!r:.60}")
    try:
        return _cpus(Path(_NODE.format(int(text))).read_text(encoding="ascii").strip())
    except OSError as error:
        raise ValueError(f"names NUMA node {text}, which this machine does not have") from error


def policy_of(host_policy: str, kind: str, device_id: int) -> str:
    """Return the name of the policy of an instance. As in Triton, a group without one has that of its kind."""
    return host_policy or (f"gpu_{device_id}" if kind == "GPU" else kind.lower())


def _weight(text: str) -> int:
    weight = _number(1)(text)
    if weight > 10_000:
        raise ValueError("must be a weight from 1 to 10000")
    return weight


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})\s*\.\.\s*([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("must be two numbers of instances from 1 up, such as 1..8")
    return int(match[1]), int(match[2])


def _milliseconds(text: str) -> float:
    try:
        return 1e3 * _seconds(str(float(text) / 1e3))
    except ValueError:
        raise ValueError("must be a number of milliseconds above 0") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _commits(text: str) -> tuple[str, ...]:
    commits = _names(text)
    if not commits or not all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits):
        raise ValueError("must be whole commits, of 40 digits")
    return commits


YES_NO = OptionKind("yes, no", _choice({"yes": True, "no": False}))
SANDBOX = OptionKind(", ".join(LEVELS), _choice({level: level for level in LEVELS}))
TIMEOUT = OptionKind("seconds, none", _or_none(_seconds))
SECONDS = OptionKind("seconds", _seconds)
PAUSE = OptionKind("seconds", _pause)
SIZE = OptionKind("size", parse_size)
LIMIT = OptionKind("size, none", _or_none(parse_size))
COUNT = OptionKind("number", _number(0))
THREADS = OptionKind("number, none", _or_none(_number(1)))
POSITIVE = OptionKind("number", _number(1))
PATH = OptionKind("path", _path)
FILE = OptionKind("path", _file)
NAMES = OptionKind("names, separated by commas", _names)
PATHS = OptionKind("paths, separated by commas", _paths)
PORTS = OptionKind("ports, separated by commas", _ports)
SYSCALLS = OptionKind("names, separated by commas", _calls)
CPUS = OptionKind("numbers and ranges", _cpus)
# The weight of a process by default: `cpu.weight` of cgroups, `nice` 0.
USUAL_WEIGHT = 100
WEIGHT = OptionKind("1 to 10000", _weight)
AS_NUMPY = OptionKind("error, copy", _choice({"error": False, "copy": True}))
RANGE = OptionKind("range, none", _or_none(_range))
COMMITS = OptionKind("commits, separated by commas", _commits)
TASK_NAME = OptionKind("name", str)
LOG_ERRORS = OptionKind("full, line", _choice({"full": "full", "line": "line"}))
MILLISECONDS = OptionKind("milliseconds", _milliseconds)
PREFORK = OptionKind(
    "no, blank, imports, initialize", _choice({word: word for word in ("no", "blank", "imports", "initialize")})
)


PREFIX = "MOONPOOL_"
CHAT_TEMPLATE = "MOONPOOL_CHAT_TEMPLATE"
# Of a model that is a repository of the Hugging Face Hub.
TASK, REMOTE_CODE, PICKLED_WEIGHTS = "MOONPOOL_TASK", "MOONPOOL_REMOTE_CODE", "MOONPOOL_PICKLED_WEIGHTS"
# The memory for states of a model that sets no limit.
USUAL_STATE_BYTES = 1 << 30
# The limits of a contained model that sets none.
_CONTAINED_TASKS = 512
# Each may hold some hundred kilobytes of kernel memory, which no other limit counts.
_CONTAINED_OPEN_FILES = 256
# The number of checks within the time limit of an execution. One over the limit is noticed with the next check.
_CHECKS_PER_LIMIT = 20
# A model may have any limit, and must not have the reactor, which works for all models, check all the time.
_LEAST_CHECK_S = 0.005


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of a model. None is "no limit" or "not set"."""

    execution_env_path: str | None = None
    force_cpu_only_input_tensors: bool = True
    load_timeout_s: float | None = 120.0
    execute_timeout_s: float | None = None
    finalize_timeout_s: float | None = 30.0
    sleep_timeout_s: float | None = 30.0
    wake_timeout_s: float | None = 30.0
    sandbox: str = "standard"
    # Each path, and whether it may be written to.
    sandbox_paths: tuple[tuple[str, bool], ...] = ()
    sandbox_ports: tuple[int, ...] = ()
    sandbox_syscalls: tuple[str, ...] = ()
    sandbox_models: tuple[str, ...] = ()
    max_restarts: int = 5
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.1
    restart_backoff_max_s: float = 60.0
    retry: bool = False
    memory_limit_bytes: int | None = None
    task_limit: int | None = None
    open_files: int | None = None
    cpus: tuple[int, ...] = ()
    cpu_weight: int = USUAL_WEIGHT
    scratch_bytes: int = 64 << 20
    recycle_requests: int | None = None
    recycle_rss_bytes: int | None = None
    prefork: str = "blank"
    compile_cache: bool = False
    region_bytes: int = 1 << 20
    region_limit_bytes: int | None = None
    backlog_bytes: int = 64 << 20
    log_lines_per_s: int = 1000
    log_errors: str | None = None
    threads: int | None = None
    concurrent_batches: int = 64
    state_survives: bool = False
    state_limit_bytes: int | None = None
    instances_per_process: int = 1
    environment: tuple[str, ...] = ()
    copies_gpu_to_numpy: bool = False
    as_cpu: bool = False
    pin: bool = False
    idle_s: float | None = None
    instances: tuple[int, int] | None = None
    wait_target_ms: float = 10.0
    chat_template: str | None = None
    task: str | None = None
    remote_code: tuple[str, ...] = ()
    pickled_weights: tuple[str, ...] = ()

    @classmethod
    def from_parameters(cls, config: ModelConfig) -> ModelOptions:
        """Read the options among the parameters of a model.

        Raises ConfigError for values that cannot be read, and for unknown names with moonpool's prefix. Other
        parameters are for the model itself.
        """
        values: dict[str, object] = {}
        known = {option.key: option for option in OPTIONS}
        for key, text in config.parameters.items():
            field = f"parameters[{key}]"
            option = known.get(key)
            if option is not None:
                try:
                    values[option.attribute] = option.kind.read(text.strip())
                except ValueError as error:
                    what = option.refusal(text) or f"{error}, not {text!r}, for {config.name}"
                    config.source.mistake(field, what)
            elif key.upper().startswith(PREFIX):
                what = f"no such option for {config.name}{suggestion(key, known)}"
                config.source.mistake(field, what)
        options = cls(**values)  # type: ignore[arg-type]
        options.check(config)
        return options

    @property
    def logs_errors_briefly(self) -> bool:
        """True if an exception in a request is logged in one line.

        A contained model's may be a stranger's, who chooses the text.
        """
        return self.log_errors == "line" or (self.log_errors is None and is_contained(self.sandbox))

    def overdue_pause_s(self, *, is_idle: bool) -> float:
        """Return the time until somebody looks again for a batch that takes longer than `execute_timeout_s`.

        While there is none, nothing can be late before another whole limit is over. One second is the most, as the
        limit may change.
        """
        limit_s = self.execute_timeout_s or math.inf
        return max(_LEAST_CHECK_S, limit_s / _CHECKS_PER_LIMIT, min(limit_s, 1.0) if is_idle else 0.0)

    @property
    def template(self) -> str:
        """Return what the model's own template does: "imports", "initialize", or "no" if there is none. A blank one
        gives a model nothing.
        """
        return "no" if self.prefork == "blank" else self.prefork

    @property
    def has_template(self) -> bool:
        """True if the instances are forked from a template of the model's own."""
        return self.template != "no"

    def check(self, config: ModelConfig) -> None:
        """Raise `ConfigError` for options that fit neither each other nor the configuration."""
        if self.region_limit_bytes is not None and self.region_bytes > self.region_limit_bytes:
            what = f"is smaller than MOONPOOL_REGION_BYTES ({self.region_bytes}) for {config.name}"
            config.source.mistake("parameters[MOONPOOL_REGION_LIMIT_BYTES]", what)
        if self.instances_per_process > 1 and config.sequence_batching is not None:
            what = f"cannot be above 1 for {config.name}, whose sequences belong to one instance each"
            config.source.mistake("parameters[MOONPOOL_INSTANCES_PER_PROCESS]", what)
        if self.restart_backoff_s > self.restart_backoff_max_s:
            what = f"is less than MOONPOOL_RESTART_BACKOFF_S ({self.restart_backoff_s:g} s)"
            config.source.mistake("parameters[MOONPOOL_RESTART_BACKOFF_MAX_S]", f"{what} for {config.name}")


@dataclass(frozen=True, slots=True)
class Option:
    """One line of the table. `attribute` is the field of ModelOptions, which has the default."""

    key: str
    attribute: str
    kind: OptionKind
    meaning: str

    @property
    def default(self) -> object:
        return getattr(ModelOptions(), self.attribute)

    def refusal(self, text: str) -> str:
        """Return the error text if Triton has one of its own (the stray quote is Triton's), else ""."""
        if self.key == "FORCE_CPU_ONLY_INPUT_TENSORS":
            return f"Incorrect value for {self.key}: {text}'"
        return ""


OPTIONS = (
    Option(
        "EXECUTION_ENV_PATH",
        "execution_env_path",
        PATH,
        "The environment whose interpreter runs the model: a virtual environment, a conda"
        " environment, one packed as .tar, .tar.gz or .zip, or a list of packages to build one of (.txt, .py,"
        " pyproject.toml, uv.lock). `$$TRITON_MODEL_DIRECTORY` at its start is the model's directory."
        " Without it, moonpool's own interpreter.",
    ),
    Option(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "force_cpu_only_input_tensors",
        YES_NO,
        "Copy inputs that lie on a GPU to the CPU before the model sees them.",
    ),
    Option(
        "MOONPOOL_LOAD_TIMEOUT_S",
        "load_timeout_s",
        TIMEOUT,
        "The time from the start of an instance until it must be ready.",
    ),
    Option(
        "MOONPOOL_EXECUTE_TIMEOUT_S",
        "execute_timeout_s",
        TIMEOUT,
        "The time that one batch may take. After it, the requests fail and the instance is restarted; so is one that "
        "keeps nothing but requests whose callers have left for that long.",
    ),
    Option(
        "MOONPOOL_FINALIZE_TIMEOUT_S",
        "finalize_timeout_s",
        TIMEOUT,
        "The time that `finalize` may take before the process is ended.",
    ),
    Option(
        "MOONPOOL_SLEEP_TIMEOUT_S",
        "sleep_timeout_s",
        TIMEOUT,
        "The time that the model's `sleep` may take before the process is ended. See RESIDENCY.md.",
    ),
    Option(
        "MOONPOOL_WAKE_TIMEOUT_S",
        "wake_timeout_s",
        TIMEOUT,
        "The time that the model's `wake` may take before the process is started anew.",
    ),
    Option(
        "MOONPOOL_SANDBOX",
        "sandbox",
        SANDBOX,
        "The level of the sandbox. Use strict for untrusted models. best-effort is strict without the layers that"
        " this kernel refuses. See SANDBOX.md.",
    ),
    Option(
        "MOONPOOL_SANDBOX_PATHS",
        "sandbox_paths",
        PATHS,
        "Files and folders that a model at strict may read, beside its own; `rw:/data/out` may be"
        " written to, too. `ro:/data/in` is the same as `/data/in`.",
    ),
    Option(
        "MOONPOOL_SANDBOX_PORTS",
        "sandbox_ports",
        PORTS,
        "TCP ports, of any machine, that a model at strict may connect to. Port 53 is for looking up names.",
    ),
    Option(
        "MOONPOOL_SANDBOX_SYSCALLS",
        "sandbox_syscalls",
        SYSCALLS,
        "System calls that a model at strict may make beside the usual ones. `fork` allows all"
        " calls for forked processes, `locks` the locks on parts of files, and `unix` Unix sockets, those of other "
        "programs included.",
    ),
    Option(
        "MOONPOOL_SANDBOX_MODELS",
        "sandbox_models",
        NAMES,
        "Other models that a model at strict may ask, load and unload; `*` stands for any characters.",
    ),
    Option(
        "MOONPOOL_MAX_RESTARTS",
        "max_restarts",
        COUNT,
        "More restarts of an instance than this within the window make the model unavailable until somebody loads it "
        "again, or for a minute if nobody can.",
    ),
    Option("MOONPOOL_RESTART_WINDOW_S", "restart_window_s", SECONDS, "The window in which restarts are counted."),
    Option(
        "MOONPOOL_RESTART_BACKOFF_S",
        "restart_backoff_s",
        PAUSE,
        "The pause before the second restart; it doubles with each further one. The first restart follows at once.",
    ),
    Option("MOONPOOL_RESTART_BACKOFF_MAX_S", "restart_backoff_max_s", PAUSE, "The longest pause before a restart."),
    Option(
        "MOONPOOL_RETRY",
        "retry",
        YES_NO,
        "The model is idempotent: requests inside an instance that dies are tried once more.",
    ),
    Option(
        "MOONPOOL_MEMORY_LIMIT_BYTES",
        "memory_limit_bytes",
        LIMIT,
        "The most memory of an instance's process: of its cgroup where there is one, of its address space"
        " otherwise. At strict half of the machine's by default.",
    ),
    Option(
        "MOONPOOL_TASK_LIMIT",
        "task_limit",
        THREADS,
        "The most processes and threads of an instance, all together. At strict 512 by default.",
    ),
    Option(
        "MOONPOOL_OPEN_FILES",
        "open_files",
        THREADS,
        "The most descriptors that an instance's process may have open. At strict 256 by default.",
    ),
    Option("MOONPOOL_CPUS", "cpus", CPUS, "The processors that an instance may run on, such as 0-3,5."),
    Option(
        "MOONPOOL_CPU_WEIGHT",
        "cpu_weight",
        WEIGHT,
        "The share of a processor that an instance gets if others want it, too. 100 is the kernel's default.",
    ),
    Option(
        "MOONPOOL_SCRATCH_BYTES",
        "scratch_bytes",
        SIZE,
        "The size of the scratch folder of an instance at strict, which is its HOME and TMPDIR.",
    ),
    Option(
        "MOONPOOL_RECYCLE_REQUESTS",
        "recycle_requests",
        THREADS,
        "After so many requests an instance is finalized and started anew. See LIMITS.md.",
    ),
    Option(
        "MOONPOOL_RECYCLE_RSS_BYTES",
        "recycle_rss_bytes",
        LIMIT,
        "An instance whose process has more resident memory than this, without what it shares with the"
        " runtime, is finalized and started anew.",
    ),
    Option(
        "MOONPOOL_PREFORK",
        "prefork",
        PREFORK,
        "Fork instances from a process that has imported numpy (in a sandbox from best-effort on: start them from a"
        " spare, see SANDBOX.md), or from one of the model, made after its imports or after its `initialize`, instead"
        " of starting each anew. See PREFORK.md.",
    ),
    Option(
        "MOONPOOL_COMPILE_CACHE",
        "compile_cache",
        YES_NO,
        "Keep what PyTorch, Triton, Numba and CUDA compile for the next process of the same version of the model. See"
        " ENVIRONMENTS.md.",
    ),
    Option(
        "MOONPOOL_REGION_BYTES", "region_bytes", SIZE, "Shared memory that an instance starts with in each direction."
    ),
    Option(
        "MOONPOOL_REGION_LIMIT_BYTES",
        "region_limit_bytes",
        LIMIT,
        "The most shared memory that an instance may have in each direction; at strict the instances of a model "
        "together, and by default as much as `MOONPOOL_MEMORY_LIMIT_BYTES` says for one of them. See LIMITS.md.",
    ),
    Option(
        "MOONPOOL_BACKLOG_BYTES",
        "backlog_bytes",
        SIZE,
        "The most memory of the runtime for responses to one request that wait for a slow reader: a client, or the "
        "next step of an ensemble. Each counts some 2 KiB, beside the memory of the instance. Beyond it the request "
        "ends. See LIMITS.md.",
    ),
    Option(
        "MOONPOOL_LOG_LINES_PER_S",
        "log_lines_per_s",
        COUNT,
        "Lines that an instance may log in a second; the rest is counted and left out.",
    ),
    Option(
        "MOONPOOL_LOG_ERRORS",
        "log_errors",
        LOG_ERRORS,
        "What is logged of an exception in a request, which its caller gets: the `full` traceback, or one `line` with "
        "type, message and place. By default one line at best-effort and strict, else the traceback.",
    ),
    Option(
        "MOONPOOL_THREADS",
        "threads",
        THREADS,
        "Threads of the numeric libraries in an instance (OMP_NUM_THREADS and its like).",
    ),
    Option(
        "MOONPOOL_CONCURRENT_BATCHES",
        "concurrent_batches",
        POSITIVE,
        "If `execute` of a model is a coroutine: the number of batches that may run in an instance at the same time. "
        "The next one waits.",
    ),
    Option(
        "MOONPOOL_STATE_SURVIVES",
        "state_survives",
        YES_NO,
        "Sequences whose states the runtime keeps (`sequence_batching.state`) go on in another process when their"
        " instance dies, with the states after the last answer. The request that it was executing fails.",
    ),
    Option(
        "MOONPOOL_STATE_LIMIT_BYTES",
        "state_limit_bytes",
        SIZE,
        "The most memory for the states of all sequences of a model, in all its versions, 1 GiB by default; at strict "
        "no more than `MOONPOOL_MEMORY_LIMIT_BYTES`. A response with states beyond it becomes an error.",
    ),
    Option(
        "MOONPOOL_INSTANCES_PER_PROCESS",
        "instances_per_process",
        POSITIVE,
        "The number of instances that share a process, each on a thread of its own; `count` of `instance_group` counts "
        "the processes then. See TRITON_MODELS.md.",
    ),
    Option(
        "MOONPOOL_ENVIRONMENT",
        "environment",
        NAMES,
        "At best-effort and strict: environment variables of the runtime that an instance may see beside the"
        " harmless ones (PATH, HOME, LANG, PYTHON*, OMP_*, CUDA_* and their like); `*` stands for any characters."
        " Below these levels an instance sees all.",
    ),
    Option(
        "MOONPOOL_GPU_AS_NUMPY",
        "copies_gpu_to_numpy",
        AS_NUMPY,
        "The result of `as_numpy` for a tensor on a GPU: an error, as in Triton, or a copy in ordinary memory.",
    ),
    Option(
        AS_CPU,
        "as_cpu",
        YES_NO,
        "Place the instances on the CPU, also those of `KIND_GPU`, of which there are `count` in all then. For "
        "machines that lack the GPUs.",
    ),
    Option(
        "MOONPOOL_PIN",
        "pin",
        YES_NO,
        "Keep the model in memory: it never sleeps, and is loaded at the start in any mode. See RESIDENCY.md.",
    ),
    Option(
        "MOONPOOL_IDLE_S",
        "idle_s",
        TIMEOUT,
        "After so long without requests, the model's instances end; the next request starts them. See RESIDENCY.md.",
    ),
    Option(
        "MOONPOOL_INSTANCES",
        "instances",
        RANGE,
        "The least and the greatest number of instances, such as `1..8`: it follows the time that requests wait. It "
        "takes the place of the `count` of the"
        " model's instance group, of which there must be one. See RESIDENCY.md.",
    ),
    Option(
        "MOONPOOL_WAIT_TARGET_MS",
        "wait_target_ms",
        MILLISECONDS,
        "The time for which requests may wait before there are more instances, with `MOONPOOL_INSTANCES`.",
    ),
    Option(
        CHAT_TEMPLATE,
        "chat_template",
        FILE,
        "The chat template of a model of Triton's kind with the input `text_input`: a template of Jinja, a"
        " `tokenizer_config.json`, or a folder with both. A relative path is one in the model's folder. See OPENAI.md.",
    ),
    Option(
        TASK,
        "task",
        TASK_NAME,
        "What a model at `hf://owner/model` is served for, in place of what its files say. See STRANGERS.md.",
    ),
    Option(
        REMOTE_CODE,
        "remote_code",
        COMMITS,
        "The commit of a model at `hf://owner/model` whose own code may run, in the model's process. See STRANGERS.md.",
    ),
    Option(
        PICKLED_WEIGHTS,
        "pickled_weights",
        COMMITS,
        "The commit of a model at `hf://owner/model` whose weights may be pickles, read by the model's process."
        " See STRANGERS.md.",
    ),
)


@functools.cache
def default_memory_bytes() -> int:
    """Return the memory limit of a contained instance that sets none: half of the machine's memory."""
    return machine_memory_bytes() // 2


def hardened(options: ModelOptions) -> ModelOptions:
    """Return the options. A contained model that sets no limits gets those of `strict`."""
    if not is_contained(options.sandbox):
        return options
    # What the runtime keeps for the model follows the limit of its process, or an operator's limit would be none.
    memory_bytes = options.memory_limit_bytes or default_memory_bytes()
    return replace(
        options,
        memory_limit_bytes=memory_bytes,
        region_limit_bytes=options.region_limit_bytes or max(memory_bytes, options.region_bytes),
        state_limit_bytes=options.state_limit_bytes or min(memory_bytes, USUAL_STATE_BYTES),
        task_limit=options.task_limit or _CONTAINED_TASKS,
        open_files=options.open_files or _CONTAINED_OPEN_FILES,
    )


# Variables of the runtime's environment, for all models. How many microseconds a side looks for the next packet before
# it blocks.
LOOK_US = "MOONPOOL_LOOK_US"
_MOST_LOOK_US = 1000


def is_compiled(options: ModelOptions) -> bool:
    """Return True if compiled code may serve the model, where there is any. Raises `ConfigError` for a wrong value of
    MOONPOOL_PURE.
    """
    value = _pure()
    return value == "0" or (value == "contained" and not is_contained(options.sandbox))


def spares_contained() -> bool:
    """Return True if what contained models say is read by Python alone. Raises `ConfigError` for a wrong value of
    MOONPOOL_PURE.
    """
    return _pure() == "contained"


def _pure() -> str:
    try:
        return pure()
    except ValueError as error:
        raise ConfigError(str(error), field=PURE) from None


def look_us() -> int:
    """Return for how long a side looks for the next packet. Raises `ConfigError` for a wrong value of
    MOONPOOL_LOOK_US.
    """
    text = os.environ.get(LOOK_US) or "30"
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) > _MOST_LOOK_US:
        raise ConfigError(f"must be a number from 0 to {_MOST_LOOK_US}, not {text!r}", field=LOOK_US)
    return int(text)


def options_table() -> str:
    """Write all options as the page `docs/OPTIONS.md`."""
    lines = [
        "# Options of a model",
        "",
        "Set in the `parameters` of `config.pbtxt`:",
        "",
        "```pbtxt",
        'parameters { key: "MOONPOOL_EXECUTE_TIMEOUT_S" value: { string_value: "2.5" } }',
        "```",
        "",
        "The host of a model overrides its configuration, on the command line or in a program:",
        "`moonpool serve models --model-option=MODEL:MOONPOOL_EXECUTE_TIMEOUT_S=2.5`, or",
        '`Runtime.load(name, options={"MOONPOOL_EXECUTE_TIMEOUT_S": "2.5"})`.',
        "[SERVING](SERVING.md#options-of-its-models) has the details.",
        "",
        "Sizes are bytes with an optional K, M, G or T (powers of 1024). A name that begins with",
        "`MOONPOOL_` and is not in this table is an error.",
        "",
        "| Name | Value | Default | Meaning |",
        "| --- | --- | --- | --- |",
    ]
    for option in OPTIONS:
        shown = f"`{option.key}` | {option.kind.title} | {_shown(option)} | {option.meaning}"
        lines.append(f"| {shown} |")
    lines += [
        "",
        "## Variables of the runtime",
        "",
        "These are read from the environment of the process that hosts the models.",
        "",
        "| Name | Value | Default | Meaning |",
        "| --- | --- | --- | --- |",
        f"| `{PURE}` | 0, 1, contained | 0 | Work without compiled code of moonpool: nowhere, everywhere (1), or in"
        " processes of models at best-effort and strict and where their messages are read. An installation without a"
        " compiler has none. |",
        f"| `{LOOK_US}` | microseconds, 0 to {_MOST_LOOK_US} | 30 | The time for which a process looks for the next"
        " message before it sleeps, if the last one came from another processor and looking has helped lately. The "
        "first looks after a pause take up to 125 µs longer. 0 switches it off. |",
    ]
    lines += ["", "<!-- Made by `python -m moonpool.runtime.model.config.options`. -->", ""]
    return "\n".join(lines)


def _shown(option: Option) -> str:
    default = option.default
    if option.kind is AS_NUMPY:
        return "copy" if default else "error"
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, float):
        return f"{default:g}"
    if option.kind is SIZE and isinstance(default, int):
        return f"{default >> 20}M"
    return "none" if default in (None, ()) else str(default)


SANDBOX_KEY = "MOONPOOL_SANDBOX"
OF_LOAD = Arguments(lambda name, what: ConfigError(what, field=name))
_BY_KEY = {option.key: option for option in OPTIONS}
# A colon ends the name, and a star makes a pattern, which also fits names with `:`, `,` or `=`.
_PATTERN = re.compile(r"[A-Za-z0-9_.+@*-]+")


@dataclass(frozen=True, slots=True)
class ModelOption:
    """An option for one model, or for all models whose names fit a pattern. `*` stands for any characters."""

    pattern: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.pattern}:{self.key}={self.value}"

    def is_for(self, name: str) -> bool:
        """Return True if it is for the model of this name."""
        return fits(self.pattern, name)

    @property
    def rank(self) -> tuple[bool, int]:
        """A key for sorting. The option with the larger one counts: a name over a pattern, a longer pattern over a
        shorter.
        """
        return "*" not in self.pattern, len(self.pattern.replace("*", ""))


def read_model_option(text: str) -> ModelOption:
    """Read `MODEL:OPTION=VALUE`. Raises ValueError."""
    pattern, colon, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    if not (colon and equals and pattern):
        raise ValueError("must be MODEL:OPTION=VALUE")
    return model_option(pattern, key, value)


def model_option(pattern: str, key: str, value: str) -> ModelOption:
    """Check the parts of an option. Raises ValueError."""
    if not _PATTERN.fullmatch(pattern):
        raise ValueError("must begin with the name of a model, in which * stands for any characters")
    check_option(key, value)
    return ModelOption(pattern, key, value.strip())


def check_option(key: str, value: str) -> None:
    """Raise ValueError unless moonpool has this option and can read its value."""
    option = _BY_KEY.get(key)
    if option is None:
        raise WrongPart(f"there is no option {key!r:.80} of a model{_near(key)}")
    try:
        option.kind.read(value.strip())
    except ValueError as error:
        raise WrongPart(f"{key} {error}, not {value!r:.80}") from None


def _near(key: str) -> str:
    """Suggest the option that a key may mean. People also write keys without the prefix, or in small letters."""
    full = key.upper().replace("-", "_")
    if PREFIX + full in _BY_KEY:
        full = PREFIX + full
    return suggestion(full, _BY_KEY)


def check_level(level: str | None) -> str | None:
    """Return a level of the sandbox, or None for no level. Raises ValueError if there is no such level."""
    if level is not None and level not in LEVELS:
        raise ValueError(f"sandbox must be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, not {level!r:.80}")
    return level


class OperatorOptions:
    """All options that an operator has set by name or pattern. Immutable."""

    def __init__(self, given: Iterable[ModelOption] = ()) -> None:
        """Take options in order. The later of two for the same pattern and key counts."""
        latest = {(option.pattern, option.key): option for option in given}
        # In `of`, options of a higher rank overwrite the others.
        self._given = sorted(latest.values(), key=lambda option: option.rank)

    @classmethod
    def by_model(cls, models: Mapping[str, Mapping[str, object]]) -> OperatorOptions:
        """Take options by model or pattern, then by key, as a program gives them. Raises `ConfigError`."""
        given = []
        for pattern, options in OF_LOAD.map("model_options", models, "a map of models to their options").items():
            for key, value in _texts(f"model_options[{pattern}]", options).items():
                try:
                    given.append(model_option(pattern, key, value))
                except ValueError as error:
                    raise ConfigError(str(error), field=f"model_options[{pattern}]") from None
        return cls(given)

    def also(self, given: Iterable[ModelOption]) -> OperatorOptions:
        """Return these options and further ones, which are the later ones."""
        return OperatorOptions([*self._given, *given])

    def of(self, name: str) -> dict[str, str]:
        """Return the options of a model, by key."""
        return {option.key: option.value for option in self._given if option.is_for(name)}

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the names and patterns that fit none of these models."""
        known = list(names)
        unfit = (o.pattern for o in self._given if not any(o.is_for(name) for name in known))
        return list(dict.fromkeys(unfit))


def by_pattern(given: Iterable[ModelOption]) -> dict[str, dict[str, str]]:
    """Return options by model or pattern, then by key, as `Runtime` takes them. The later of two counts."""
    models: dict[str, dict[str, str]] = {}
    for option in given:
        models.setdefault(option.pattern, {})[option.key] = option.value
    return models


def said_in_a_load(
    sandbox: str | None, options: Mapping[str, object] | None, parameters: Mapping[str, object] | None
) -> dict[str, str] | None:
    """Join the options and parameters that a program gives in a load; None if it gives none. Raises `ConfigError`."""
    if sandbox is None and options is None and parameters is None:
        return None
    given = _texts("options", {} if options is None else options)
    if sandbox is not None and sandbox not in LEVELS:
        OF_LOAD.refuse("sandbox", f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}", sandbox)
    if sandbox is not None and given.setdefault(SANDBOX_KEY, sandbox) != sandbox:
        what = f"is {given[SANDBOX_KEY]!r:.80}, and sandbox= is {sandbox!r:.80}: give one of them"
        raise ConfigError(what, field=f"options[{SANDBOX_KEY}]")
    for key, value in given.items():
        try:
            check_option(key, value)
        except ValueError as error:
            raise ConfigError(str(error), field=f"options[{key}]") from None
    own = _texts("parameters", {} if parameters is None else parameters)
    for key in own:
        if key in _BY_KEY or key.upper().startswith(PREFIX):
            what = "is an option of moonpool and no parameter of the model's own: give it in options="
            raise ConfigError(what, field=f"parameters[{key}]")
    return own | given


def _texts(field: str, given: Mapping[str, object]) -> dict[str, str]:
    """Return the values as texts, which a configuration has."""
    texts = {}
    for key, value in OF_LOAD.map(field, given, "a map of texts to texts or numbers").items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            OF_LOAD.refuse(f"{field}[{key}]", "a text or a number", value)
        texts[key] = str(value)
    return texts


if __name__ == "__main__":
    sys.stdout.write(options_table())
