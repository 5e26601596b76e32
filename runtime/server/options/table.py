"""Every option of `moonpool serve`, once: the command line, the environment, the file and the page are made from this
table.

An option is a line of `_TABLE` and a field of `ServerOptions`, which has its default.
`python -m moonpool.runtime.server.options.table` prints the page `docs/SERVE_OPTIONS.md`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields

from moonpool.ipc.policy import LEVELS
from moonpool.runtime.isolation.spares import MOST as SPARES
from moonpool.runtime.model.config.options import (
    ModelOption,
    OptionKind,
    parse_size,
    read_host_policies,
    read_model_option,
)
from moonpool.runtime.repository.grants import read_grant
from moonpool.runtime.schedule.rate_limiter import read_resources


@dataclass(frozen=True)
class ServerOptions:
    """The values of all options, by the names of their flags. An empty text or tuple means that the option is not
    set.
    """

    # Example clients of Triton check for its name.
    id: str = "triton"
    exit_timeout_secs: int = 30
    max_connections: int | None = None
    allow_client_shm: bool = False
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: str = "default"
    log_file: str = ""
    model_repository: tuple[str, ...] = ()
    exit_on_error: bool = True
    strict_readiness: bool = True
    model_control_mode: str = "none"
    repository_poll_secs: int = 15
    resident_models: int | None = None
    resident_memory: int | None = None
    resident_gpu_memory: int | None = None
    load_model: tuple[str, ...] = ()
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    disable_auto_complete_config: bool = False
    backend_directory: str = ""
    model_config_limit: tuple[str, ...] = ()
    model_config_name: str = ""
    cache_config: tuple[str, ...] = ()
    response_cache_byte_size: int | None = None
    host_policy: tuple[str, ...] = ()
    rate_limit: str = ""
    rate_limit_resource: tuple[str, ...] = ()
    sandbox: str = ""
    sandbox_grants: tuple[str, ...] = ()
    spares: int | None = None
    model_option: tuple[ModelOption, ...] = ()
    allow_http: bool = True
    allow_openai: bool = True
    openai_port: int | None = None
    openai_address: str = ""
    openai_restricted_api: tuple[tuple[str, str, str], ...] = ()
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    reuse_http_port: bool = False
    http_restricted_api: tuple[str, ...] = ()
    http_header_forward_pattern: str = ""
    http_server_cert: str = ""
    http_server_key: str = ""
    http_max_input_size: int | None = None
    http_max_body_bytes: int = 2**31 - 1
    http_max_inflated_bytes: int = 1 << 30
    http_max_json_bytes: int = 64 << 20
    http_max_connections: int = 16384
    http_allowed_origin: tuple[str, ...] = ()
    control_token_file: str = ""
    allow_grpc: bool = True
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_header_forward_pattern: str = ""
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: str = ""
    grpc_server_key: str = ""
    grpc_root_cert: str = ""
    grpc_infer_response_compression_level: str = "none"
    grpc_max_connections: int = 8192
    grpc_write_timeout: int = 600_000
    grpc_read_timeout: int = 60_000
    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: int = 2
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int = 0
    grpc_max_connection_age_grace: int = 0
    grpc_reflection: bool = False
    grpc_restricted_protocol: tuple[str, ...] = ()
    allow_metrics: bool = True
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True
    metrics_address: str = ""
    metrics_port: int = 8002
    metrics_interval_ms: float = 2000.0
    metrics_config: tuple[str, ...] = ()
    trace_config: tuple[str, ...] = ()
    trace_file: str = ""
    trace_level: tuple[str, ...] = ()
    trace_rate: int | None = None
    trace_count: int | None = None
    trace_log_frequency: int | None = None
    capture: str = ""
    capture_rate: int = 1
    capture_byte_size: int = 1 << 30


_TRUE, _FALSE = ("true", "1", "on"), ("false", "0", "off")


def _boolean(text: str) -> bool:
    lower = text.lower()
    if lower not in _TRUE + _FALSE:
        raise ValueError("must be true or false")
    return lower in _TRUE


def _whole(most: float = math.inf, what: str = "a whole number from 0 on", least: int = 0) -> Callable[[str], int]:
    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) < 20
        if not (is_number and least <= int(text) <= most):
            raise ValueError(f"must be {what}")
        return int(text)

    return read


def _signed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("must be a number above 0")
    return value


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("must have no NUL character")
    return text


def _file_name(text: str) -> str:
    if text and (not re.fullmatch(r"[\w.-]+", text, re.ASCII) or text.startswith(".")):
        raise ValueError("must be a name of letters, digits, '_', '.' and '-', without spaces")
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    return text


def _choice(*words: str) -> OptionKind:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return OptionKind("\\|".join(words), read)


def _rate_limit(text: str) -> str:
    if text not in ("off", "execution_count"):
        raise ValueError("must be off or execution_count")
    return "" if text == "off" else text


def _restricted(text: str) -> tuple[str, str, str]:
    apis, _, pair = text.partition(" ")
    header, _, value = pair.partition(" ")
    if not (apis and header and value):
        raise ValueError("must be names of APIs with commas, the name of a header and its value")
    return apis, header, value


def _host_policy(text: str) -> str:
    read_host_policies([text])
    return text


def _resource(text: str) -> str:
    read_resources([text])
    return text


# The kinds of options by name. A switch is a boolean that needs no value on the command line.
KINDS = {
    "text": OptionKind("text", _text),
    "regex": OptionKind("pattern", _regex),
    "path": OptionKind("path", _text),
    "name": OptionKind("name", _file_name),
    "boolean": OptionKind("true\\|false", _boolean),
    "switch": OptionKind("", _boolean),
    "whole": OptionKind("number", _whole()),
    "spares": OptionKind("number", _whole(SPARES, f"a number from 0 to {SPARES}")),
    "positive": OptionKind("number", _whole(what="a whole number from 1 on", least=1)),
    "signed": OptionKind("number", _signed),
    "port": OptionKind("port", _whole(65535, "a port: a number from 0 (any that is free) to 65535")),
    "number": OptionKind("number", _number),
    # Off is as no rate limiter, which is the default.
    "rate_limit": OptionKind("off\\|execution_count", _rate_limit),
    "host_policy": OptionKind("POLICY,SETTING=VALUE", _host_policy),
    "restricted": OptionKind("APIS HEADER VALUE", _restricted),
    "resource": OptionKind("NAME:COUNT[:DEVICE]", _resource),
    "mode": _choice("none", "poll", "explicit", "demand"),
    "size": OptionKind("size", parse_size),
    "log_format": _choice("default", "ISO8601", "json"),
    "level": _choice("none", "low", "medium", "high"),
    "sandbox": _choice(*LEVELS),
    "grant": OptionKind("MODEL[:KEY=VALUE,…]", read_grant),
    "model_option": OptionKind("MODEL:KEY=VALUE", read_model_option),
}


PREFIX = "MOONPOOL_SERVE_"
# Each line has a flag, its kind (with a * if it may be given many times) and its meaning. A line that begins with
# blanks continues the one before. A `#` begins a group.
_TABLE = """
# Server
id text: The name of this server in its metadata.
exit-timeout-secs whole: Seconds to wait at shutdown for requests in flight.
max-connections positive: The most connections at the same time of all ports; an eighth of them, but not more than an
  eighth of `--http-max-connections`, are kept for metrics. Without this option, each port has its own limit.
allow-client-shm boolean: Let clients on the same machine register shared memory, from which tensors are read and to
  which they are written.

# Log
log-verbose whole: Log verbose messages from 1 on.
log-info boolean: Log information.
log-warning boolean: Log warnings.
log-error boolean: Log errors.
log-format log_format: Triton's lines (`I1121 14:45:39.210248 4680 file:line] text`), the same with an ISO 8601 time, or
  JSON objects.
log-file path: Append the log to this file instead of writing it to stderr.

# Models
model-repository path*: A directory of models, or an [address](CLOUD.md) of one, such as `s3://bucket/models`. A model
  that is in two of them is served from neither.
exit-on-error boolean: End with exit code 1 if a model cannot be loaded at the start.
strict-readiness boolean: `/v2/health/ready` answers ready only while every version that should be loaded is served.
model-control-mode mode: `none`: load all models at the start. `poll`: also follow changes of the repositories.
  `explicit`: load the models of `--load-model`, and those that clients and models ask for. `demand`: register all
  models, and [load each when a request arrives](RESIDENCY.md).
repository-poll-secs whole: Seconds between two polls; with 0, only SIGHUP polls.
resident-models positive: With `demand`, the most models in memory. Unused ones are put to sleep to make room.
resident-memory size: With `demand`, the most memory that the processes of models take together, as the kernel measures
  it, such as `8G`.
resident-gpu-memory size: With `demand`, the most memory of GPUs that they take together, as the driver measures it.
load-model text*: With `explicit`, a model to load at the start; `*` alone loads all of them.
model-load-thread-count whole: The number of models that are loaded at the same time.
model-load-retry-count whole: The number of further tries for a load that fails at the start.
disable-auto-complete-config switch: Do not ask models to complete their configuration. It must be complete.
backend-directory path: The directory of Python-based backends, each as `<name>/model.py`.
model-config-limit text*: `<limit>=<number>`: a limit for the configurations of models. The limits are config_bytes
  (1048576), instances (1024, of all versions), versions (256), inputs (4096), outputs (4096), priority_levels (1024),
  sequences (65536, of an instance), ensemble_requests (4096), items (4096, of any other list).
model-config-name name: A model whose folder has the file `configs/<name>.pbtxt` is configured by that file in place of
  `config.pbtxt`. All other models have `config.pbtxt`.
cache-config text*: `local,size=<bytes>`: keep responses of models with `response_cache { enable: true }`, in at most so
  many bytes together, and answer equal requests with them.
response-cache-byte-size positive: The same as `--cache-config=local,size=…`.
host-policy host_policy*: `<policy>,cpu-cores=<numbers and ranges>`: instances whose group has this
  [`host_policy`](TRITON_MODELS.md#host-policies) run on these processors. `<policy>,numa-node=<number>`: on those of
  this node, whose memory the kernel gives them first. A group without one has the policy `cpu`, `model`, or
  `gpu_<number>`.
rate-limit rate_limit: `execution_count`: an instance executes only while the
  [resources](TRITON_MODELS.md#the-rate-limiter) that its `rate_limiter` names are free; of those that wait, the one
  that has executed least runs first. `off`: without limits.
rate-limit-resource resource*: `<name>:<count>` or `<name>:<count>:<device>`: the count of a resource, on each device or
  on one. Without this option, there are as many as the instance has that needs most. Has no effect without
  `--rate-limit=execution_count`.
sandbox sandbox: The least sandbox of all models; `MOONPOOL_SANDBOX` of a model may name a stricter one. Without this
  option, a model may name any, and has `standard` if it names none.
sandbox-grants grant*: With `best-effort` or `strict`, allows a model's configuration to give the model more than that:
  paths, ports, system calls, other models, variables, an interpreter, a GPU, larger limits, a template process.
  `MODEL:KEY=VALUE` grants this value and no other; `MODEL` grants all that the configuration asks for, now and later.
  `moonpool check REPO --sandbox strict` prints what models ask for in this form.
spares spares: The number of [processes that are kept ready](SANDBOX.md#spares) for models at `best-effort` or `strict`,
  of each kind that was used in the last ten minutes; 4 at most together. With 0 there is none, and without this option
  one, or what the variable `MOONPOOL_SPARES` says.
model-option model_option*: Sets an option of a model, by the model's name. `*` in the name stands for any characters; a
  name takes precedence over a pattern, and a longer pattern over a shorter one. The option overrides the model's
  configuration and the configurations that clients load, and counts as granted. `MOONPOOL_SANDBOX` is the model's least
  level, in place of `--sandbox`; a lower one does not hold for files and configurations that clients bring. In the
  file: a table `[models.NAME]`. [OPTIONS](OPTIONS.md) has all keys.

# HTTP
allow-http boolean: Serve HTTP.
allow-openai boolean: Serve [OpenAI's API](OPENAI.md) under `/v1` on the port for HTTP.
openai-port port: A port that serves OpenAI's API alone, with `/health/ready` and `/metrics`; 0 takes a free one. TLS,
  limits and restrictions are those of the port for HTTP.
openai-address text: The address of that port, by default that of HTTP.
openai-restricted-api restricted*: `"<api,…>" <header> <value>`: requests of OpenAI's API must have this header, else
  they get 401. The APIs are inference, model-repository (also the list of models), metrics and health. `Authorization
  "Bearer <key>"` is what OpenAI's clients send for an `api_key`.
http-address text: The address to listen at; `0.0.0.0` is all of IPv4, `::` all of IPv6.
http-port port: The port; 0 takes a free one.
reuse-http-port boolean: Let several servers listen at the same port.
http-restricted-api text*: `<api,api,…>:<header>=<value>`: requests for these APIs must have this header. The APIs are
  health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging.
http-header-forward-pattern regex: Headers whose name matches this regular expression, in any case and in any part,
  become parameters of requests. Names of Triton's own parameters are refused.
http-server-cert path: A certificate in PEM form. With it, the port speaks TLS.
http-server-key path: The private key of the certificate.
http-max-input-size positive: The largest body of a request, before and after decompression. Larger ones are refused
  with Triton's text. JSON may be as large, unless `--http-max-json-bytes` is given. Without this option the next three
  limits apply.
http-max-body-bytes whole: The largest body of a request.
http-max-inflated-bytes whole: The largest body after decompression.
http-max-json-bytes whole: The largest JSON of a request, and the most bytes of outputs that a response carries as JSON.
  Binary tensors do not count.
http-max-connections whole: The most connections at the same time. Further ones are refused. If the limit of open files
  is too low for the connections of all ports and for the models, the number is reduced.
http-allowed-origin text*: Let pages of this origin, such as `https://example.org`, use the server from a browser.
control-token-file path: A file with a token. Requests that load, unload, register memory or change settings must bring
  it as `Authorization: Bearer <token>`, over HTTP and gRPC.

# gRPC
allow-grpc boolean: Serve gRPC.
grpc-address text: The address to listen at.
grpc-port port: The port; 0 takes a free one.
reuse-grpc-port boolean: Let several servers listen at the same port.
grpc-header-forward-pattern regex: Headers whose name matches this regular expression, in any case and in any part,
  become parameters of requests. Names of Triton's own parameters are refused.
grpc-use-ssl boolean: Speak TLS.
grpc-use-ssl-mutual boolean: Speak TLS, and require certificates of clients.
grpc-server-cert path: The certificate in PEM form.
grpc-server-key path: The private key of the certificate.
grpc-root-cert path: The root certificate for the certificates of clients.
grpc-infer-response-compression-level level: The compression of responses.
grpc-max-connections whole: The most connections at the same time, as with `--http-max-connections`. Further ones are
  closed.
grpc-write-timeout whole: A connection is ended after so many milliseconds in which its client reads none of the bytes
  that wait for it; 0 sets no limit.
grpc-read-timeout whole: Milliseconds in which a large request must arrive, in addition to the time that its bytes take
  at 16 KiB a second; then its call is ended; 0 sets no limit.
grpc-keepalive-time whole: Milliseconds without traffic after which a connection is probed.
grpc-keepalive-timeout whole: Milliseconds to wait for the answer to a probe.
grpc-keepalive-permit-without-calls boolean: Probe connections without calls, too.
grpc-http2-max-pings-without-data whole: The most probes in a row without data; 0 sets no limit.
grpc-http2-min-recv-ping-interval-without-data whole: The least milliseconds between two probes of a client.
grpc-http2-max-ping-strikes whole: The number of early probes after which a connection is ended; 0 sets no limit.
grpc-max-connection-age whole: Milliseconds after which a connection is ended; 0 sets no limit.
grpc-max-connection-age-grace whole: Milliseconds that calls may take beyond that age; 0 sets no limit.
grpc-reflection boolean: Describe services, methods and messages to clients that ask, such as grpcurl. Triton does not.
grpc-restricted-protocol text*: `<protocol,…>:<header>=<value>`, as `--http-restricted-api`.

# Metrics
allow-metrics boolean: Serve metrics for Prometheus.
allow-gpu-metrics boolean: Include metrics of GPUs.
allow-cpu-metrics boolean: Include metrics of processors and memory.
metrics-address text: The address to listen at, by default that of HTTP.
metrics-port port: The port; 0 takes a free one.
metrics-interval-ms number: Milliseconds between two readings of the machine's figures.
metrics-config text*: `<setting>=<value>`: `counter_latencies`, `histogram_latencies`, `summary_latencies`,
  `summary_quantiles`.

# Traces
trace-config text*: `<mode>,<setting>=<value>` or `<setting>=<value>`, such as `level=TIMESTAMPS`, `rate=100`,
  `triton,file=traces.json`.
trace-file path: The same as `--trace-config=triton,file=…`.
trace-level text*: The same as `--trace-config=level=…`.
trace-rate whole: The same as `--trace-config=rate=…`.
trace-count signed: The same as `--trace-config=count=…`.
trace-log-frequency whole: The same as `--trace-config=triton,log-frequency=…`.

# Captured requests
capture path: Write the inputs of requests to this new file, for [`moonpool bench
  --replay`](BENCH.md#captured-requests). The file contains all that clients sent, also secrets; only this user may read
  it.
capture-rate positive: Capture one of this many requests.
capture-byte-size size: The largest size of the file in bytes. Capturing stops there.
"""
# Options of tritonserver that moonpool accepts and ignores. The log says once why each has no effect.
_WITHOUT_EFFECT = """
backend-config text*: the settings of a model's processes are in its config.pbtxt: docs/OPTIONS.md
http-thread-count whole: one event loop serves all of HTTP; see --reuse-http-port for more than one core
grpc-infer-thread-count whole: one event loop serves all calls
grpc-infer-allocation-pool-size whole: there are no objects to keep
grpc-max-response-pool-size whole: what waits for a client that does not read has limits in bytes: docs/OPERATING.md
enable-peer-access boolean: the server itself uses no GPU
repoagent-directory path: the agent checksum is part of moonpool, and models with another one are refused
cache-directory path: the cache local is part of moonpool
pinned-memory-pool-byte-size whole: the server itself uses no GPU
cuda-memory-pool-byte-size text*: the server itself uses no GPU
cuda-virtual-address-size text*: the server itself uses no GPU
min-supported-compute-capability number: the server itself uses no GPU
buffer-manager-thread-count whole: copies are made where the request is
model-load-gpu-limit text*: the server itself uses no GPU
sagemaker-port port: there is no SageMaker endpoint
sagemaker-safe-port-range text: there is no SageMaker endpoint
sagemaker-thread-count whole: there is no SageMaker endpoint
vertex-ai-port port: there is no Vertex AI endpoint
vertex-ai-thread-count whole: there is no Vertex AI endpoint
vertex-ai-default-model text: there is no Vertex AI endpoint
"""
# Options that would change what is served, or when. They are refused unless they are false, off or empty.
_REFUSED = """
model-namespacing boolean: models of the same name cannot be served side by side: rename one
allow-sagemaker boolean: there is no SageMaker endpoint
allow-vertex-ai boolean: there is no Vertex AI endpoint
"""
# Older names of tritonserver's options, with the present ones.
SYNONYMS = {"model-store": "model-repository", "strict-model-config": "disable-auto-complete-config"}


@dataclass(frozen=True, slots=True)
class ServerOption:
    """One line of the tables. If the option has no effect, `meaning` says why."""

    flag: str
    kind_name: str
    is_many: bool
    group: str
    meaning: str

    @property
    def kind(self) -> OptionKind:
        return KINDS[self.kind_name]

    @property
    def attribute(self) -> str:
        """Return the name of the field of `ServerOptions`, which has the default."""
        return self.flag.replace("-", "_")

    @property
    def needs_value(self) -> bool:
        return self.kind_name != "switch"


def _read(table: str) -> Iterator[ServerOption]:
    group = ""
    for line in table.replace("\n  ", " ").strip().splitlines():
        if line.startswith("# "):
            group = line[2:]
        elif line:
            head, _, meaning = line.partition(": ")
            flag, kind = head.split()
            yield ServerOption(flag, kind.rstrip("*"), kind.endswith("*"), group, meaning)


OPTIONS = {option.flag: option for option in _read(_TABLE)}
WITHOUT_EFFECT = {option.flag: option for option in _read(_WITHOUT_EFFECT)}
REFUSED = {option.flag: option for option in _read(_REFUSED)}
KNOWN = {**OPTIONS, **WITHOUT_EFFECT, **REFUSED}


def page() -> str:
    """Return the text of the page `docs/SERVE_OPTIONS.md`."""
    lines = [
        "# Options of `moonpool serve`",
        "",
        "A flag of tritonserver has the same name here. Set an option on the command line (`--http-port=9000` or",
        f"`--http-port 9000`), in the environment (`{PREFIX}HTTP_PORT=9000`), or in the TOML file that `--config`",
        f"or `{PREFIX}CONFIG` names (`http-port = 9000`). The command line overrides the environment, which overrides",
        "the file. An option marked *many* may be given several times on the command line; in the environment its",
        "values are separated by `;`, in the file they are an array. Values from two places are not joined, but for",
        "`--model-option`. A misspelt option is an error in every place. [SERVING](SERVING.md) shows how they are",
        "used.",
    ]
    defaults = {field.name: field.default for field in fields(ServerOptions)}
    group = ""
    for option in OPTIONS.values():
        if option.group != group:
            group = option.group
            lines += ["", f"## {group}", ""]
            lines += ["| Flag | Value | Default | Meaning |", "| --- | --- | --- | --- |"]
        default = defaults[option.attribute]
        value = option.kind.title + (", many" if option.is_many else "")
        lines.append(f"| `--{option.flag}` | {value or '(none)'} | {shown(default)} | {option.meaning} |")
    lines += ["", "## Other names", ""]
    lines += [f"- `--{old}` is `--{new}`{_INVERSE.get(old, '')}." for old, new in SYNONYMS.items()]
    lines += ["", "## Accepted, without effect", ""]
    lines += [
        "These are accepted so that command lines of tritonserver work. The log says once why each has no effect.",
        "",
    ]
    lines += reasons(WITHOUT_EFFECT)
    lines += ["", "## Refused", ""]
    lines += [
        "These are refused unless they are false, off or empty. Without them, the server would serve something else.",
        "",
    ]
    lines += reasons(REFUSED)
    lines += ["", "<!-- Made by `python -m moonpool.runtime.server.options.table`. -->", ""]
    return "\n".join(lines)


def reasons(options: Mapping[str, ServerOption]) -> list[str]:
    """Write a table of options, with one row for those that have the same reason."""
    flags: dict[str, list[str]] = {}
    for option in options.values():
        flags.setdefault(option.meaning, []).append(f"`--{option.flag}`")
    return ["| Flags | Why |", "| --- | --- |", *(f"| {', '.join(names)} | {why} |" for why, names in flags.items())]


_INVERSE = {"strict-model-config": " (with a value, true or false)"}


def shown(default: object) -> str:
    """Write a default as a user would write the value."""
    if isinstance(default, bool):
        return "true" if default else "false"
    if default in ("", (), None) or default is MISSING:
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    sys.stdout.write(page())
