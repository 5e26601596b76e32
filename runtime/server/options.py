"""What may be set of a server; the table of the flags is in `option_table`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOptions:
    """All options after they were read, named as the flags; an empty text or tuple is "not set"."""

    id: str = "moonpool"
    exit_timeout_secs: int = 30
    allow_client_shm: bool = False
    frontends: int = 1
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
    load_model: tuple[str, ...] = ()
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    disable_auto_complete_config: bool = False
    backend_directory: str = ""
    model_config_limit: tuple[str, ...] = ()
    sandbox: str = ""
    sandbox_grants: tuple[str, ...] = ()
    allow_http: bool = True
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
    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_max_pings_without_data: int = 2
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int = 0
    grpc_max_connection_age_grace: int = 0
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
