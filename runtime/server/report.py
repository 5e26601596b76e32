"""What a server says of its models once they are loaded: Triton's table."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moonpool.ipc.policy import STANDARD
from moonpool.runtime.frontend.metadata import EXTENSIONS
from moonpool.runtime.output import harmless
from moonpool.runtime.server.descriptors import connections
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moonpool.runtime.model_statuses import ModelStatus
    from moonpool.runtime.server.options import ServerOptions

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def model_table(statuses: Mapping[str, ModelStatus]) -> str:
    """A line for each version: model, version, status with the reason; and its sandbox, if not all have the usual one."""
    rows = []
    for name, status in sorted(statuses.items()):
        for version in status.versions:
            reason = f": {version.reason}" if version.reason else ""
            rows.append([name, str(version.version), f"{version.state}{reason}", version.sandbox])
        if not status.versions and status.failure is not None:
            rows.append([name, "-", f"Not loaded: {status.failure}", ""])
    # Triton's table, which whoever does not ask for another sandbox shall find as it is there.
    columns = 3 if {row[3] for row in rows} <= {"", STANDARD} else 4
    head = ["Model", "Version", "Status", "Sandbox"]
    return ascii_table(head[:columns], [row[:columns] for row in rows])


def option_table(options: ServerOptions) -> str:
    """What server this is, in Triton's words."""
    paths = {
        f"model_repository_path[{number}]": path
        for number, path in enumerate(options.model_repository)
    }
    shown = {
        "server_id": options.id,
        "server_version": VERSION,
        "server_extensions": " ".join(EXTENSIONS),
        **paths,
        "model_control_mode": f"MODE_{options.model_control_mode.upper()}",
        "strict_model_config": str(int(options.disable_auto_complete_config)),
        "strict_readiness": str(int(options.strict_readiness)),
        "exit_timeout": str(options.exit_timeout_secs),
    }
    return ascii_table(["Option", "Value"], [list(pair) for pair in shown.items()])


def remarks(options: ServerOptions) -> Iterator[tuple[int, str]]:
    """What whoever starts a server should know; each with its level."""
    if options.load_model and options.model_control_mode != "explicit":
        yield logging.WARNING, "--load-model has no effect without --model-control-mode=explicit"
    room = connections(options)
    if options.allow_http and room.http < options.http_max_connections:
        yield logging.INFO, _no_room("http", options.http_max_connections, room.http)
    if options.allow_grpc and room.grpc < options.grpc_max_connections:
        yield logging.INFO, _no_room("grpc", options.grpc_max_connections, room.grpc)
    if options.frontends > 1 and any("summary_latencies=true" in e for e in options.metrics_config):
        what = (
            "with --frontends, latency summaries have only requests that the main process answers"
        )
        yield logging.WARNING, what
    served = {
        "--http-address": options.http_address if options.allow_http else None,
        "--grpc-address": options.grpc_address if options.allow_grpc else None,
    }
    places = {flag: address for flag, address in served.items() if address is not None}
    if all(address in _LOOPBACK for address in places.values()):
        flags = " ".join(f"{flag}=0.0.0.0" for flag in places)
        yield logging.INFO, f"Only this machine is served; {flags} would open the server to others."
    elif options.model_control_mode == "explicit" and not options.control_token_file:
        yield (
            logging.WARNING,
            "Whoever reaches the server can have it load models, which is to run code on this machine; "
            "--control-token-file asks them for a token.",
        )


def _no_room(protocol: str, wanted: int, room: int) -> str:
    return f"--{protocol}-max-connections is {wanted}, and the limit of open files (ulimit -n) has room for {room}"


def ascii_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with lines around it; a cell may have several lines."""
    cells = [[_lines(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(line) for row in cells for line in row[at]) for at in range(len(head))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    shown = [rule]
    for number, row in enumerate(cells):
        for at in range(max(len(cell) for cell in row)):
            texts = (cell[at] if at < len(cell) else "" for cell in row)
            padded = (f" {text:<{width}} " for text, width in zip(texts, widths, strict=True))
            shown.append("|" + "|".join(padded) + "|")
        if number == 0:
            shown.append(rule)
    return "\n".join([*shown, rule])


def _lines(cell: str) -> list[str]:
    return [harmless(line) for line in cell.rstrip("\n").split("\n")]
