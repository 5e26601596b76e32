"""Every option of `moonpool serve`, once: the command line, the environment, the file and the page derive from here.

`python -m moonpool.runtime.server.option_table` prints the page `docs/SERVE_OPTIONS.md`.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

from moonpool.runtime.server.option_kinds import KINDS
from moonpool.runtime.server.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonpool.runtime.config_values import Kind

PREFIX = "MOONPOOL_SERVE_"
# A flag, its kind (with a * where it may be given many times), and what it means. Below a `#` the members of a group.
_TABLE = """
# Server
id text: The name of this server in its metadata.
exit-timeout-secs whole: How long requests that are there when the server is told to end may take.
allow-client-shm boolean: Let clients on the same machine register shared memory and have tensors read from it and written to it.
frontends whole: Processes that share the ports and feed the same models.

# Log
log-verbose whole: From 1 on, verbose messages are logged.
log-info boolean: Log information.
log-warning boolean: Log warnings.
log-error boolean: Log errors.
log-format log_format: Triton's lines (`I1121 14:45:39.210248 4680 file:line] text`), the same with an ISO 8601 time, or JSON objects.
log-file path: Append the log to this file instead of writing it to stderr.

# Models
model-repository path*: A directory of models. A model that is in two of them is served from neither.
exit-on-error boolean: End with exit code 1 if a model cannot be loaded at the start.
strict-readiness boolean: `/v2/health/ready` says ready only while every version that was to be loaded serves.
model-control-mode mode: `none`: load everything at the start. `poll`: also keep up with changes of the repositories. `explicit`: load what `--load-model` says, and what clients and models ask for.
repository-poll-secs whole: The pause between two polls; with 0, only SIGHUP polls.
load-model text*: With `explicit`, a model to load at the start; `*` alone is all of them. Ignored in other modes.
model-load-thread-count whole: Models that are loaded at the same time.
model-load-retry-count whole: How often a load that failed at the start is tried again.
disable-auto-complete-config switch: Do not ask models to complete their configuration; it must be whole.
backend-directory path: Where Python-based backends are, each as `<name>/model.py`.
model-config-limit text*: `<limit>=<number>`: the most that the configuration of a model may ask for. The limits are config_bytes (1048576), instances (1024, of all versions), versions (256), inputs (4096), outputs (4096), priority_levels (1024), items (4096, of any other list).
sandbox sandbox: What all models are kept from at least; `MOONPOOL_SANDBOX` of a model may say more. Without this, a model may say anything, and is in `standard` where it says nothing.
sandbox-grants text*: With `--sandbox best-effort` or `strict`, a model whose configuration may give it more than that: paths, ports, system calls, other models, variables, an interpreter, a GPU, larger limits, a template process.

# HTTP
allow-http boolean: Serve HTTP.
http-address text: The address to listen at; `0.0.0.0` is all of IPv4, `::` all of IPv6.
http-port port: The port; 0 takes one that is free.
reuse-http-port boolean: Several servers may listen on the same port.
http-restricted-api text*: `<api,api,…>:<header>=<value>`: requests for these APIs must have this header. The APIs are health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging.
http-header-forward-pattern regex: Headers whose whole name, in lower case, matches this regular expression become parameters of requests.
http-server-cert path: A certificate in PEM form; the port speaks TLS then.
http-server-key path: Its private key.
http-max-input-size positive: The largest body of a request, as it is sent and after decompression; larger ones are refused with Triton's text. JSON may be as large unless `--http-max-json-bytes` is given. Without this the next three hold.
http-max-body-bytes whole: The largest body of a request.
http-max-inflated-bytes whole: The largest body after decompression.
http-max-json-bytes whole: The largest JSON of a request, and the most bytes of outputs that a response has as JSON. Binary tensors are not counted.
http-max-connections whole: Connections at the same time, in each process of `--frontends`. The next one is refused. If the limit of open files has no room for the connections of all ports beside the models, the number is smaller.
http-allowed-origin text*: Pages of this origin, such as `https://example.org`, may drive the server from a browser, too.
control-token-file path: A file with a token. Requests that load, unload, register memory or change settings must bring it as `Authorization: Bearer <token>`, over HTTP and gRPC.

# gRPC
allow-grpc boolean: Serve gRPC.
grpc-address text: The address to listen at.
grpc-port port: The port; 0 takes one that is free.
reuse-grpc-port boolean: Several servers may listen on the same port.
grpc-header-forward-pattern regex: Headers whose whole name matches this regular expression become parameters of requests.
grpc-use-ssl boolean: Speak TLS.
grpc-use-ssl-mutual boolean: Speak TLS, and ask clients for certificates.
grpc-server-cert path: The certificate in PEM form.
grpc-server-key path: Its private key.
grpc-root-cert path: The certificate that vouches for those of clients.
grpc-infer-response-compression-level level: How much responses are compressed.
grpc-max-connections whole: Connections at the same time, as `--http-max-connections`. The next one is closed.
grpc-keepalive-time whole: Milliseconds without traffic after which a connection is probed.
grpc-keepalive-timeout whole: Milliseconds that the other side has to answer.
grpc-keepalive-permit-without-calls boolean: Probe connections without calls, too.
grpc-http2-max-pings-without-data whole: Probes in a row without data; 0 is any number.
grpc-http2-min-recv-ping-interval-without-data whole: Milliseconds that a client has to leave between its probes.
grpc-http2-max-ping-strikes whole: Probes that come too early until a connection is ended; 0 is any number.
grpc-max-connection-age whole: Milliseconds that a connection may live; 0 is any time.
grpc-max-connection-age-grace whole: Milliseconds that its calls may take beyond that; 0 is any time.
grpc-restricted-protocol text*: `<protocol,…>:<header>=<value>`, as `--http-restricted-api`.

# Metrics
allow-metrics boolean: Serve metrics for Prometheus.
allow-gpu-metrics boolean: With those of GPUs.
allow-cpu-metrics boolean: With those of the processor.
metrics-address text: The address to listen at; that of HTTP where it is left out.
metrics-port port: The port; 0 takes one that is free.
metrics-interval-ms number: How often figures of the machine are taken.
metrics-config text*: `<setting>=<value>`: `counter_latencies`, `histogram_latencies`, `summary_latencies`, `summary_quantiles`.

# Traces
trace-config text*: `<mode>,<setting>=<value>` or `<setting>=<value>`, such as `level=TIMESTAMPS`, `rate=100`, `triton,file=traces.json`.
trace-file path: The same as `--trace-config=triton,file=…`.
trace-level text*: The same as `--trace-config=level=…`.
trace-rate whole: The same as `--trace-config=rate=…`.
trace-count signed: The same as `--trace-config=count=…`.
trace-log-frequency whole: The same as `--trace-config=triton,log-frequency=…`.
"""
# What tritonserver has and moonpool accepts, to say once why it does nothing.
_WITHOUT_EFFECT = """
backend-config text*: the settings of a model's processes are in its config.pbtxt: docs/OPTIONS.md
http-thread-count whole: one event loop serves all of HTTP; --frontends has several
grpc-infer-thread-count whole: the gRPC library manages its threads itself
grpc-infer-allocation-pool-size whole: there are no objects to keep
grpc-max-response-pool-size whole: what waits for a client that does not read has limits in bytes: docs/SERVING.md
enable-peer-access boolean: the server itself uses no GPU
repoagent-directory path: there are no repository agents
cache-config text*: there is no response cache
cache-directory path: there is no response cache
response-cache-byte-size whole: there is no response cache
rate-limit text: instances are not limited in their rate
rate-limit-resource text*: instances are not limited in their rate
pinned-memory-pool-byte-size whole: the server itself uses no GPU
cuda-memory-pool-byte-size text*: the server itself uses no GPU
cuda-virtual-address-size text*: the server itself uses no GPU
min-supported-compute-capability number: the server itself uses no GPU
buffer-manager-thread-count whole: copies are made where the request is
host-policy text*: processes are not pinned to processors
model-load-gpu-limit text*: the server itself uses no GPU
sagemaker-port port: there is no SageMaker endpoint
sagemaker-safe-port-range text: there is no SageMaker endpoint
sagemaker-thread-count whole: there is no SageMaker endpoint
vertex-ai-port port: there is no Vertex AI endpoint
vertex-ai-thread-count whole: there is no Vertex AI endpoint
vertex-ai-default-model text: there is no Vertex AI endpoint
"""
# What would be served wrongly if it were ignored: refused unless it is false or empty.
_REFUSED = """
model-namespacing boolean: models of the same name cannot be served side by side: rename one
model-config-name text: a model has one configuration, config.pbtxt
allow-sagemaker boolean: there is no SageMaker endpoint
allow-vertex-ai boolean: there is no Vertex AI endpoint
"""
# Older names of tritonserver's, with the option that they mean.
SYNONYMS = {
    "model-store": "model-repository",
    "strict-model-config": "disable-auto-complete-config",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One line of the tables; for an option that does nothing, `meaning` says why."""

    flag: str
    kind_name: str
    is_many: bool
    group: str
    meaning: str

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]

    @property
    def attribute(self) -> str:
        """The field of `ServerOptions`, which has the default."""
        return self.flag.replace("-", "_")

    @property
    def needs_value(self) -> bool:
        return self.kind_name != "switch"


def _read(table: str) -> Iterator[Option]:
    group = ""
    for line in table.strip().splitlines():
        if line.startswith("# "):
            group = line[2:]
        elif line:
            head, _, meaning = line.partition(": ")
            flag, kind = head.split()
            yield Option(flag, kind.rstrip("*"), kind.endswith("*"), group, meaning)


OPTIONS = {option.flag: option for option in _read(_TABLE)}
WITHOUT_EFFECT = {option.flag: option for option in _read(_WITHOUT_EFFECT)}
REFUSED = {option.flag: option for option in _read(_REFUSED)}
KNOWN = {**OPTIONS, **WITHOUT_EFFECT, **REFUSED}


def page() -> str:
    """All options as the page `docs/SERVE_OPTIONS.md`."""
    lines = [
        "# Options of `moonpool serve`",
        "",
        "The flags are those of tritonserver, where moonpool has what they are for. Each option can be set in three places, of",
        "which the first that says something counts: the command line (`--http-port=9000` or `--http-port 9000`), the",
        f"environment (`{PREFIX}HTTP_PORT=9000`), and the TOML file that `--config` or `{PREFIX}CONFIG`",
        "names (`http-port = 9000`). An option marked *many* may be given several times on the command line; in the",
        "environment its values are separated by `;`, in the file they are an array. A place replaces what a lower one says;",
        "nothing is joined. What is misspelt is an error, wherever it stands. [SERVING](SERVING.md) shows how they are used.",
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
        lines.append(
            f"| `--{option.flag}` | {value or '(none)'} | {shown(default)} | {option.meaning} |"
        )
    lines += ["", "## Other names", ""]
    lines += [f"- `--{old}` is `--{new}`{_INVERSE.get(old, '')}." for old, new in SYNONYMS.items()]
    lines += ["", "## Accepted, without effect", ""]
    lines += [
        "So that command lines of tritonserver work; the log says once why each does nothing.",
        "",
    ]
    lines += ["| Flag | Why |", "| --- | --- |"]
    lines += [f"| `--{option.flag}` | {option.meaning} |" for option in WITHOUT_EFFECT.values()]
    lines += ["", "## Refused", ""]
    lines += [
        "Unless they are false or empty: to ignore them would be to serve something else.",
        "",
    ]
    lines += ["| Flag | Why |", "| --- | --- |"]
    lines += [f"| `--{option.flag}` | {option.meaning} |" for option in REFUSED.values()]
    lines += ["", "<!-- Made by `python -m moonpool.runtime.server.option_table`. -->", ""]
    return "\n".join(lines)


_INVERSE = {"strict-model-config": " (with a value, true or false)"}


def shown(default: object) -> str:
    """A default as it is written."""
    if isinstance(default, bool):
        return "true" if default else "false"
    if default in ("", (), None) or default is MISSING:
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    sys.stdout.write(page())
