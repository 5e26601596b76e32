"""Options of a server: one table, three places, and errors that name the place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from moonpool.runtime.server.options.protocols import control_token, restricted, trace_flags
from moonpool.runtime.server.options.sources import BadOption, read_options
from moonpool.runtime.server.options.table import KNOWN, OPTIONS, SYNONYMS, ServerOptions, page

# The options of tritonserver 2.51, and those that came until 26.x; see its --help.
TRITON = [
    "allow-client-shm",
    "allow-cpu-metrics",
    "allow-gpu-metrics",
    "allow-grpc",
    "allow-http",
    "allow-metrics",
    "allow-sagemaker",
    "allow-vertex-ai",
    "backend-config",
    "backend-directory",
    "buffer-manager-thread-count",
    "cache-config",
    "cache-directory",
    "cuda-memory-pool-byte-size",
    "cuda-virtual-address-size",
    "disable-auto-complete-config",
    "enable-peer-access",
    "exit-on-error",
    "exit-timeout-secs",
    "grpc-address",
    "grpc-header-forward-pattern",
    "grpc-http2-max-ping-strikes",
    "grpc-http2-max-pings-without-data",
    "grpc-http2-min-recv-ping-interval-without-data",
    "grpc-infer-allocation-pool-size",
    "grpc-infer-response-compression-level",
    "grpc-infer-thread-count",
    "grpc-keepalive-permit-without-calls",
    "grpc-keepalive-time",
    "grpc-keepalive-timeout",
    "grpc-max-connection-age",
    "grpc-max-connection-age-grace",
    "grpc-max-response-pool-size",
    "grpc-port",
    "grpc-restricted-protocol",
    "grpc-root-cert",
    "grpc-server-cert",
    "grpc-server-key",
    "grpc-use-ssl",
    "grpc-use-ssl-mutual",
    "host-policy",
    "http-address",
    "http-header-forward-pattern",
    "http-max-input-size",
    "http-port",
    "http-restricted-api",
    "http-thread-count",
    "id",
    "load-model",
    "log-error",
    "log-file",
    "log-format",
    "log-info",
    "log-verbose",
    "log-warning",
    "metrics-address",
    "metrics-config",
    "metrics-interval-ms",
    "metrics-port",
    "min-supported-compute-capability",
    "model-config-name",
    "model-control-mode",
    "model-load-gpu-limit",
    "model-load-retry-count",
    "model-load-thread-count",
    "model-namespacing",
    "model-repository",
    "model-store",
    "pinned-memory-pool-byte-size",
    "rate-limit",
    "rate-limit-resource",
    "repoagent-directory",
    "repository-poll-secs",
    "response-cache-byte-size",
    "reuse-grpc-port",
    "reuse-http-port",
    "sagemaker-port",
    "sagemaker-safe-port-range",
    "sagemaker-thread-count",
    "strict-model-config",
    "strict-readiness",
    "trace-config",
    "trace-count",
    "trace-file",
    "trace-level",
    "trace-log-frequency",
    "trace-rate",
    "vertex-ai-default-model",
    "vertex-ai-port",
    "vertex-ai-thread-count",
]


def read(
    arguments: Mapping[str, list[str]] | None = None, environment: Mapping[str, str] | None = None
) -> ServerOptions:
    return read_options(arguments or {}, environment or {})[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Every flag of tritonserver is known: it works as there, or it has no effect and the "
    "log says why once, or it is refused.",
)
def test_every_flag_of_tritonserver_is_known() -> None:
    assert [flag for flag in TRITON if flag not in KNOWN and flag not in SYNONYMS] == []


def test_the_table_and_the_options_are_the_same() -> None:
    assert [option.attribute for option in OPTIONS.values()] == [field.name for field in fields(ServerOptions)]


def test_the_page_has_every_option_as_it_is() -> None:
    file = Path(__file__).parents[2] / "docs" / "SERVE_OPTIONS.md"
    if not file.is_file():
        pytest.skip("only the tests are here, without the documents")

    assert file.read_text() == page()


def test_the_examples_in_the_document_on_serving_are_right(file: Path) -> None:
    document = Path(__file__).parents[2] / "docs" / "SERVING.md"
    if not document.is_file():
        pytest.skip("only the tests are here, without the documents")
    text = document.read_text()
    shown, of_models = re.findall(r"^```toml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    file.write_text(shown)
    assert read({"config": [str(file)]}).model_control_mode == "poll"
    file.write_text(of_models)
    assert [str(option) for option in read({"config": [str(file)]}).model_option] == [
        "*:MOONPOOL_MEMORY_LIMIT_BYTES=1G",
        "primes:MOONPOOL_THREADS=4",
    ]

    texts = [document.with_name(f"{name}.md").read_text() for name in ("OPERATING", "SECURING")]
    lines = "\n".join([text, *texts]).splitlines()
    of_moonpool = "\n".join(line for line in lines if not line.startswith("docker "))
    flags = set(re.findall(r"--([a-z][a-z0-9-]+[a-z0-9])", of_moonpool))
    # The rest are options of other programs, and the one that names the file.
    assert flags - set(KNOWN) - set(SYNONYMS) == {"config", "shm-size"}


def test_nothing_said_is_every_default() -> None:
    assert read() == ServerOptions()


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Options come from the command line, the environment or a file. The command line overrides "
    "the environment, and that overrides the file.",
)
def test_the_command_line_overrides_the_environment_and_that_the_file(file: Path) -> None:
    file.write_text("http-port = 1\ngrpc_port = 1\nmetrics-port = 1\nallow-http = false\n")
    arguments = {"config": [str(file)], "http-port": ["3"]}
    found = read(arguments, {"MOONPOOL_SERVE_HTTP_PORT": "2", "MOONPOOL_SERVE_GRPC_PORT": "2"})

    assert (found.http_port, found.grpc_port, found.metrics_port) == (3, 2, 1)
    assert not found.allow_http
    from_environment = read({}, {"MOONPOOL_SERVE_CONFIG": str(file)})
    assert from_environment.http_port == 1


def test_an_option_may_have_many_values_wherever_it_stands(file: Path) -> None:
    file.write_text('model-repository = ["a", "b"]\nload-model = "x"')

    assert read({"config": [str(file)]}).model_repository == ("a", "b")
    assert read({"config": [str(file)]}).load_model == ("x",)
    assert read({}, {"MOONPOOL_SERVE_MODEL_REPOSITORY": "a;b"}).model_repository == ("a", "b")
    assert read({"model-store": ["a", "b"]}).model_repository == ("a", "b")
    assert read({"http-port": ["1", "2"]}).http_port == 2


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "on", "false", "False", "0", "off"])
def test_booleans_are_read_as_triton_reads_them(text: str) -> None:
    assert read({"allow-http": [text]}).allow_http == (text.lower() in ("true", "1", "on"))


@pytest.mark.parametrize(
    ("flag", "text", "what"),
    [
        ("http-port", "abc", "--http-port: must be a port: a number from 0"),
        ("http-port", "65536", "not '65536'"),
        ("http-port", "-1", "not '-1'"),
        ("http-max-input-size", "0", "--http-max-input-size: must be a whole number from 1 on"),
        ("allow-client-shm", "x", "--allow-client-shm: must be true or false"),
        ("allow-http", "maybe", "--allow-http: must be true or false, not 'maybe'"),
        ("model-control-mode", "x", "--model-control-mode: must be none, poll, explicit or demand"),
        ("metrics-interval-ms", "nan", "must be a number above 0"),
        ("exit-timeout-secs", "", "must be a whole number"),
        ("model-namespacing", "true", "--model-namespacing cannot be true: models of the same"),
        ("allow-sagemaker", "true", "there is no SageMaker endpoint"),
        ("rate-limit-resource", "R", "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or"),
        ("rate-limit", "always", "--rate-limit: must be off or execution_count"),
        ("http-header-forward-pattern", "(", "must be a regular expression"),
        ("sandbox", "x", "must be off, standard, best-effort or strict"),
    ],
)
def test_an_impossible_value_is_refused_with_its_place(flag: str, text: str, what: str) -> None:
    with pytest.raises(BadOption) as raised:
        read({flag: [text]})
    assert what in str(raised.value)
    with pytest.raises(BadOption, match=r"^MOONPOOL_SERVE_"):
        read({}, {"MOONPOOL_SERVE_" + flag.upper().replace("-", "_"): text})


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "An option that is misspelt or has an impossible value is an error that names its "
    "place. For a misspelt one, it names the nearest option.",
)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("http-prot = 1", 'http-prot: there is no such option; did you mean "http-port"?'),
        ("http-port = [1]", "http-port: must be a text, a number, true or false"),
        ("http-port = 'x'", "http-port: must be a port"),
        ("[http]\nport = 1", "http: there is no such option"),
        ("a = ", "Invalid value"),
        ("\udcff", "utf-8"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_key(file: Path, text: str, what: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadOption) as raised:
        read({"config": [str(file)]})
    assert str(raised.value).startswith(f"{file}: ")
    assert what in str(raised.value)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(BadOption, match=r"/nowhere/x\.toml: No such file"):
        read({"config": ["/nowhere/x.toml"]})


def test_a_variable_that_is_misspelt_is_an_error() -> None:
    with pytest.raises(BadOption, match=r'MOONPOOL_SERVE_HTTP_PROT: .* did you mean "HTTP_PORT"'):
        read({}, {"MOONPOOL_SERVE_HTTP_PROT": "1"})


def test_options_without_effect_are_reported_with_the_reason() -> None:
    said = {"backend-config": ["python,shm-default-byte-size=1"], "allow-vertex-ai": ["false"]}
    refused = {"model-namespacing": ["false"]}
    _, without_effect = read_options({**said, **refused}, {})

    assert list(without_effect) == ["backend-config"]


def test_restrictions_name_apis_a_header_and_its_value() -> None:
    assert restricted("--f", ("health,trace:key=value=x",)) == {
        "health": ("key", "value=x"),
        "trace": ("key", "value=x"),
    }
    for text in ("health", "health:key", "healthy:key=value", "health,health:key=value"):
        with pytest.raises(BadOption, match="--f"):
            restricted("--f", (text,))


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  s3cret\n")
    assert control_token(str(file)) == "s3cret"
    assert control_token("") is None
    for content in (b"", b"\n", b"two words", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(BadOption, match="--control-token-file"):
            control_token(str(file))
    with pytest.raises(BadOption, match="No such file"):
        control_token(str(tmp_path / "missing"))


def test_the_older_flags_of_traces_are_the_newer_ones() -> None:
    options = read(
        {
            "trace-level": ["TIMESTAMPS"],
            "trace-rate": ["7"],
            "trace-count": ["-1"],
            "trace-file": ["t.json"],
            "trace-log-frequency": ["3"],
        }
    )

    assert trace_flags(options) == [
        "level=TIMESTAMPS",
        "triton,file=t.json",
        "rate=7",
        "count=-1",
        "triton,log-frequency=3",
    ]
