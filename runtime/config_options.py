"""moonpool's own settings of a model: `parameters` of its configuration, in one table.

`python -m moonpool.runtime.config_options` prints the table for `docs/OPTIONS.md`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from moonpool.runtime.config import ModelConfig
from moonpool.runtime.config_shape import suggestion
from moonpool.runtime.config_values import (
    AS_NUMPY,
    COUNT,
    CPUS,
    LIMIT,
    NAMES,
    PATH,
    PATHS,
    PAUSE,
    PORTS,
    POSITIVE,
    PREFORK,
    SANDBOX,
    SECONDS,
    SIZE,
    SYSCALLS,
    THREADS,
    TIMEOUT,
    USUAL_WEIGHT,
    WEIGHT,
    YES_NO,
    Kind,
)

PREFIX = "MOONPOOL_"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the parameters of a model ask of the runtime; None is "no limit" or "not set"."""

    execution_env_path: str | None = None
    force_cpu_only_input_tensors: bool = True
    load_timeout_s: float | None = 120.0
    execute_timeout_s: float | None = None
    finalize_timeout_s: float | None = 30.0
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
    prefork: str = "no"
    region_bytes: int = 1 << 20
    region_limit_bytes: int | None = None
    log_lines_per_s: int = 1000
    threads: int | None = None
    concurrent_batches: int = 64
    environment: tuple[str, ...] = ()
    copies_gpu_to_numpy: bool = False

    @classmethod
    def from_parameters(cls, config: ModelConfig) -> ModelOptions:
        """Read the parameters of a model.

        Raises ConfigError for values that cannot be read and for unknown names with moonpool's
        prefix; other parameters are the model's own business.
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
                    raise config.source.error(field, what) from None
            elif key.upper().startswith(PREFIX):
                what = f"no such option for {config.name}{suggestion(key, known)}"
                raise config.source.error(field, what)
        options = cls(**values)  # type: ignore[arg-type]
        options._check(config)
        return options

    def _check(self, config: ModelConfig) -> None:
        if self.region_limit_bytes is not None and self.region_bytes > self.region_limit_bytes:
            what = f"is smaller than MOONPOOL_REGION_BYTES ({self.region_bytes}) for {config.name}"
            raise config.source.error("parameters[MOONPOOL_REGION_LIMIT_BYTES]", what)
        if self.restart_backoff_s > self.restart_backoff_max_s:
            what = f"is less than MOONPOOL_RESTART_BACKOFF_S ({self.restart_backoff_s:g} s)"
            raise config.source.error(
                "parameters[MOONPOOL_RESTART_BACKOFF_MAX_S]", f"{what} for {config.name}"
            )


@dataclass(frozen=True, slots=True)
class Option:
    """One line of the table; `attribute` is the field of ModelOptions, which has the default."""

    key: str
    attribute: str
    kind: Kind
    meaning: str

    @property
    def default(self) -> object:
        return getattr(ModelOptions(), self.attribute)

    def refusal(self, text: str) -> str:
        """The error text where Triton has one of its own (the stray quote is Triton's)."""
        if self.key == "FORCE_CPU_ONLY_INPUT_TENSORS":
            return f"Incorrect value for {self.key}: {text}'"
        return ""


OPTIONS = (
    Option(
        "EXECUTION_ENV_PATH",
        "execution_env_path",
        PATH,
        "The environment whose interpreter runs the model: a virtual environment, a conda"
        " environment, or one packed as .tar, .tar.gz or .zip. `$$TRITON_MODEL_DIRECTORY` at its"
        " start is the model's directory. Without it, moonpool's own interpreter.",
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
        "How long an instance may take from its start until it is ready.",
    ),
    Option(
        "MOONPOOL_EXECUTE_TIMEOUT_S",
        "execute_timeout_s",
        TIMEOUT,
        "How long one batch may take; then its requests fail and the instance is restarted.",
    ),
    Option(
        "MOONPOOL_FINALIZE_TIMEOUT_S",
        "finalize_timeout_s",
        TIMEOUT,
        "How long `finalize` may take before the process is ended.",
    ),
    Option(
        "MOONPOOL_SANDBOX",
        "sandbox",
        SANDBOX,
        "What the processes of the model are kept from; strict is for untrusted models. best-effort is"
        " strict without what this kernel refuses. See SANDBOX.md.",
    ),
    Option(
        "MOONPOOL_SANDBOX_PATHS",
        "sandbox_paths",
        PATHS,
        "Files and folders that a model at strict may read, beside its own; `rw:/data/out` may be"
        " written to, too.",
    ),
    Option(
        "MOONPOOL_SANDBOX_PORTS",
        "sandbox_ports",
        PORTS,
        "TCP ports, of any machine, that a model at strict may connect to; 53 finds names.",
    ),
    Option(
        "MOONPOOL_SANDBOX_SYSCALLS",
        "sandbox_syscalls",
        SYSCALLS,
        "System calls that a model at strict may make beside the usual ones; `fork` is all that it"
        " takes to have child processes, `locks` are those on parts of files.",
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
        "More restarts of an instance than this within the window make the model unavailable until somebody loads it again, or for a minute if nobody can.",
    ),
    Option(
        "MOONPOOL_RESTART_WINDOW_S",
        "restart_window_s",
        SECONDS,
        "The window in which restarts are counted.",
    ),
    Option(
        "MOONPOOL_RESTART_BACKOFF_S",
        "restart_backoff_s",
        PAUSE,
        "The pause before the second restart; it doubles with each further one. The first restart"
        " follows at once.",
    ),
    Option(
        "MOONPOOL_RESTART_BACKOFF_MAX_S",
        "restart_backoff_max_s",
        PAUSE,
        "The longest pause before a restart.",
    ),
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
    Option(
        "MOONPOOL_CPUS",
        "cpus",
        CPUS,
        "The processors that an instance may run on, such as 0-3,5.",
    ),
    Option(
        "MOONPOOL_CPU_WEIGHT",
        "cpu_weight",
        WEIGHT,
        "How much of a processor an instance gets where others want it, too; 100 is the usual.",
    ),
    Option(
        "MOONPOOL_SCRATCH_BYTES",
        "scratch_bytes",
        SIZE,
        "How much an instance at strict may have in its scratch folder, which is its HOME and TMPDIR.",
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
        "Fork instances from a template process of the model, made after its imports or after its"
        " `initialize`, instead of starting each anew. See PREFORK.md.",
    ),
    Option(
        "MOONPOOL_REGION_BYTES",
        "region_bytes",
        SIZE,
        "Shared memory that an instance starts with in each direction.",
    ),
    Option(
        "MOONPOOL_REGION_LIMIT_BYTES",
        "region_limit_bytes",
        LIMIT,
        "The most shared memory that an instance may come to have in each direction. At strict half of the machine's memory by default. See LIMITS.md.",
    ),
    Option(
        "MOONPOOL_LOG_LINES_PER_S",
        "log_lines_per_s",
        COUNT,
        "Lines that an instance may log in a second; the rest is counted and left out.",
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
        "How many batches of a model whose `execute` is a coroutine may run at the same time in an"
        " instance; the next one waits.",
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
        "What `as_numpy` of a tensor on a GPU does: raise, as in Triton, or return a copy in ordinary memory.",
    ),
)


def options_table() -> str:
    """All options as the page `docs/OPTIONS.md`."""
    lines = [
        "# Options of a model",
        "",
        "Set in the `parameters` of `config.pbtxt`:",
        "",
        "```",
        'parameters { key: "MOONPOOL_EXECUTE_TIMEOUT_S" value: { string_value: "2.5" } }',
        "```",
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
    lines += ["", "<!-- Made by `python -m moonpool.runtime.config_options`. -->", ""]
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


if __name__ == "__main__":
    sys.stdout.write(options_table())
