"""Makes the options of HTTP, gRPC, traces and the response cache from the options of a server, and checks the files
that they name.
"""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, Literal, cast

from moonpool.runtime.server.http.options import HttpLimits, HttpOptions
from moonpool.runtime.server.listening import connections
from moonpool.runtime.server.options.sources import BadOption
from moonpool.runtime.server.options.table import ServerOptions
from moonpool.runtime.server.restriction import APIS, OPENAI_APIS, Origins

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc.options import GrpcOptions


def http_options(options: ServerOptions) -> HttpOptions:
    """Return the options of HTTP. Raises `BadOption`."""
    if bool(options.http_server_cert) != bool(options.http_server_key):
        raise BadOption("--http-server-cert and --http-server-key are needed both, or none")
    if options.http_server_cert:
        _check_pair("http", options.http_server_cert, options.http_server_key)
    try:
        Origins(options.http_allowed_origin)
    except ValueError as error:
        raise BadOption(f"--http-allowed-origin: {error}") from None
    return HttpOptions(
        address=options.http_address,
        port=options.http_port if options.allow_http else None,
        metrics_address=options.metrics_address or options.http_address,
        metrics_port=options.metrics_port if options.allow_metrics else None,
        reuse_port=options.reuse_http_port,
        certificate=options.http_server_cert or None,
        private_key=options.http_server_key or None,
        allow_openai=options.allow_openai,
        openai_address=options.openai_address or options.http_address,
        openai_port=options.openai_port,
        openai_restricted=openai_restricted(options.openai_restricted_api),
        restricted=restricted("--http-restricted-api", options.http_restricted_api),
        control_token=control_token(options.control_token_file),
        allowed_origins=frozenset(options.http_allowed_origin),
        header_forward_pattern=options.http_header_forward_pattern,
        limits=_limits(options),
    )


def _limits(options: ServerOptions) -> HttpLimits:
    body_bytes, inflated_bytes = options.http_max_body_bytes, options.http_max_inflated_bytes
    json_bytes, input_bytes = options.http_max_json_bytes, options.http_max_input_size
    if input_bytes is not None:
        body_bytes, inflated_bytes = min(body_bytes, input_bytes), min(inflated_bytes, input_bytes)
        # Triton has one limit for all. An operator who raises it wants to allow JSON of that size, too.
        is_default = json_bytes == ServerOptions.http_max_json_bytes
        json_bytes = input_bytes if is_default else min(json_bytes, input_bytes)
    return HttpLimits(
        body_bytes=body_bytes,
        inflated_bytes=inflated_bytes,
        json_bytes=json_bytes,
        input_bytes=input_bytes,
        connections=connections(options).http,
        metrics_connections=connections(options).metrics,
    )


def grpc_options(options: ServerOptions) -> GrpcOptions:
    """Return the options of gRPC. Raises `BadOption`."""
    from moonpool.runtime.server.grpc.options import GrpcOptions

    tls = options.grpc_use_ssl or options.grpc_use_ssl_mutual
    if tls and not (options.grpc_server_cert and options.grpc_server_key):
        raise BadOption("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if options.grpc_use_ssl_mutual and not options.grpc_root_cert:
        raise BadOption("--grpc-use-ssl-mutual needs --grpc-root-cert")
    if tls:
        _check_pair("grpc", options.grpc_server_cert, options.grpc_server_key)
    if options.grpc_use_ssl_mutual:
        _check_root(options.grpc_root_cert)
    level = cast("Literal['none', 'low', 'medium', 'high']", options.grpc_infer_response_compression_level)
    return GrpcOptions(
        address=options.grpc_address,
        port=options.grpc_port,
        reuse_port=options.reuse_grpc_port,
        use_ssl=options.grpc_use_ssl,
        use_ssl_mutual=options.grpc_use_ssl_mutual,
        server_cert=options.grpc_server_cert,
        server_key=options.grpc_server_key,
        root_cert=options.grpc_root_cert,
        infer_response_compression_level=level,
        header_forward_pattern=options.grpc_header_forward_pattern,
        keepalive_time_ms=options.grpc_keepalive_time,
        keepalive_timeout_ms=options.grpc_keepalive_timeout,
        keepalive_permit_without_calls=options.grpc_keepalive_permit_without_calls,
        http2_max_pings_without_data=options.grpc_http2_max_pings_without_data,
        http2_min_recv_ping_interval_without_data_ms=options.grpc_http2_min_recv_ping_interval_without_data,
        http2_max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_connection_age_ms=options.grpc_max_connection_age,
        max_connection_age_grace_ms=options.grpc_max_connection_age_grace,
        reflection=options.grpc_reflection,
        restricted=restricted("--grpc-restricted-protocol", options.grpc_restricted_protocol),
        control_token=control_token(options.control_token_file),
        max_connections=connections(options).grpc,
        write_timeout_ms=options.grpc_write_timeout,
        read_timeout_ms=options.grpc_read_timeout,
    )


def _check_pair(protocol: str, certificate: str, key: str) -> None:
    """Raise `BadOption` for a certificate and key that do not work. The libraries that use them say less."""
    flags = {f"--{protocol}-server-cert": certificate, f"--{protocol}-server-key": key}
    for flag, path in flags.items():
        _check_readable(flag, path)
    try:
        # A server cannot ask for a password.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        given = " and ".join(f"{flag} ({path})" for flag, path in flags.items())
        raise BadOption(
            f"{given} must be a certificate and its private key in PEM form, without a password "
            f"({error.reason or error})"
        ) from error


def _check_root(path: str) -> None:
    _check_readable("--grpc-root-cert", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as error:
        raise BadOption(
            f"--grpc-root-cert ({path}) must be a certificate in PEM form ({error.reason or error})"
        ) from error


def _check_readable(flag: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise BadOption(f"{flag}: {path}: {error.strerror}") from error


def restricted(flag: str, texts: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Read texts `<api,api>:<header>=<value>`: header and value by API. Raises `BadOption`."""
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        apis, colon, pair = text.partition(":")
        header, equals, value = pair.partition("=")
        if not (colon and equals and header and value):
            raise BadOption(f"{flag} must be <api,api>:<header>=<value>, not {text!r:.80}")
        for api in apis.split(","):
            if api not in APIS:
                raise BadOption(f"{flag}: unknown API {api!r:.40}; there are {', '.join(APIS)}")
            if api in found:
                raise BadOption(f"{flag}: the API {api} is restricted twice")
            found[api] = header, value
    return found


def openai_restricted(given: tuple[tuple[str, str, str], ...]) -> dict[str, tuple[str, str]]:
    """Return header and value by the group of OpenAI's API. Raises `BadOption`, with Triton's texts."""
    found: dict[str, tuple[str, str]] = {}
    for apis, header, value in given:
        for api in apis.split(","):
            if api not in OPENAI_APIS:
                raise BadOption(f"--openai-restricted-api: Unknown API {api!r:.40}; there are {', '.join(OPENAI_APIS)}")
            if api in found:
                raise BadOption(
                    f"--openai-restricted-api: restricted api '{api}' can not be specified in multiple config groups"
                )
            found[api] = header, value
    return found


def control_token(path: str) -> str | None:
    """Read the token in a file, without white space around it; None without a file. Raises `BadOption`."""
    if not path:
        return None
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        what = os.strerror(error.errno or 0) if isinstance(error, OSError) else "is not ASCII"
        raise BadOption(f"--control-token-file: {path}: {what}") from error
    if not token or any(character.isspace() for character in token):
        raise BadOption(f"--control-token-file: {path}: must have one token of at least one character")
    return token


def trace_flags(options: ServerOptions) -> list[str]:
    """Return the values of `--trace-config`, and the older flags in the same form."""
    flags = [f"level={level}" for level in options.trace_level]
    if options.trace_file:
        flags.append(f"triton,file={options.trace_file}")
    if options.trace_rate is not None:
        flags.append(f"rate={options.trace_rate}")
    if options.trace_count is not None:
        flags.append(f"count={options.trace_count}")
    if options.trace_log_frequency is not None:
        flags.append(f"triton,log-frequency={options.trace_log_frequency}")
    return [*flags, *options.trace_config]


def cache_bytes(options: ServerOptions) -> int | None:
    """Return the size of the response cache, None if there is none. Raises `BadOption`, with Triton's texts where it
    has some.
    """
    size = options.response_cache_byte_size
    if not options.cache_config:
        return size
    if size is not None:
        raise BadOption(
            "Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide one or the "
            "other."
        )
    settings: dict[str, str] = {}
    for text in options.cache_config:
        name, comma, pair = text.partition(",")
        key, equals, value = pair.partition("=")
        if not comma or not equals:
            raise BadOption(
                f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text:.80}"
            )
        if name != "local":
            raise BadOption(f"--cache-config: there is no cache {name!r:.40}, only 'local'")
        settings[key] = value
    if settings.keys() != {"size"}:
        raise BadOption("--cache-config: the cache 'local' has the setting 'size', and no other")
    value = settings["size"]
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value)):
        raise BadOption(f"--cache-config: size must be a number of bytes above 0, not {value!r:.40}")
    return int(value)
