"""Tables and remarks for the log of a server that starts, in Triton's form where it has one."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence

from moonpool.ipc.policy import STANDARD
from moonpool.runtime.hosting.model_statuses import ModelStatus
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.process.terminal import harmless, one_line
from moonpool.runtime.server.listening import connections, wanted
from moonpool.runtime.server.metadata import EXTENSIONS
from moonpool.runtime.server.options.table import ServerOptions
from moonpool.runtime.version import VERSION

# The most models, and characters of a reason, in one line of the log.
_MOST_MODELS, _MOST_REASON = 8, 300
_END = "\n"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def model_table(statuses: Mapping[str, ModelStatus]) -> str:
    """Return a table with a line for each version: model, version, status with the reason.

    It has a column for the sandbox if not all models have the usual one.
    """
    rows = []
    for name, status in sorted(statuses.items()):
        for version in status.versions:
            reason = f": {version.reason}" if version.reason else ""
            rows.append([name, str(version.version), f"{version.state}{reason}", version.sandbox])
        if not status.versions and status.failure is not None:
            rows.append([name, "-", f"Not loaded: {status.failure.text}", ""])
    # Triton's table has three columns. If no sandbox is set, the table stays as it is.
    columns = 3 if {row[3] for row in rows} <= {"", STANDARD} else 4
    head = ["Model", "Version", "Status", "Sandbox"]
    return ascii_table(head[:columns], [row[:columns] for row in rows])


def option_table(options: ServerOptions) -> str:
    """Return a table of the server's options, in Triton's words."""
    paths = {f"model_repository_path[{number}]": path for number, path in enumerate(options.model_repository)}
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
    """List remarks for the person who starts the server, each with its level."""
    yield from _too_few_files(options)
    served = {
        "--http-address": options.http_address if options.allow_http or options.openai_port is not None else None,
        "--openai-address": (options.openai_address or None) if options.openai_port is not None else None,
        "--grpc-address": options.grpc_address if options.allow_grpc else None,
    }
    places = {flag: address for flag, address in served.items() if address is not None}
    if all(address in _LOOPBACK for address in places.values()):
        flags = " ".join(f"{flag}=0.0.0.0" for flag in places)
        yield logging.INFO, f"Only this machine is served; {flags} would open the server to others."
    elif options.model_control_mode in ("explicit", "demand") and not options.control_token_file:
        yield (
            logging.WARNING,
            "A client that reaches the server can make it load models, and so run code on this machine; "
            "--control-token-file makes the server require a token.",
        )


def not_ready(missing: Sequence[tuple[str, int, str]]) -> str:
    """Say that the server listens and is not ready, with the reasons. `missing` is that of `Metadata`."""
    named = [
        f"model '{one_line(name)}' version {version} is not: {one_line(reason.partition(_END)[0][:_MOST_REASON])}"
        for name, version, reason in missing[:_MOST_MODELS]
    ]
    if len(missing) > _MOST_MODELS:
        named.append(f"{len(missing) - _MOST_MODELS} more are not")
    return (
        f"Listening, but not ready: {'; '.join(named)}. With --strict-readiness=false, models that could not be loaded "
        "do not count."
    )


def no_such_models(names: Sequence[str]) -> str:
    """Say in Triton's words that these models are in no repository."""
    texts = []
    for name in names:
        if not name:
            texts.append("Invalid model name ''")
            continue
        text = f"failed to poll model {name!r:.200}: model not found in any model repository"
        if "/" in name or name == "..":
            text += (
                f"; Poll failed for model directory {name!r:.200}, which is not one of a repository, and "
                "at least one version must be available under the version policy"
            )
        texts.append(text)
    return f"creating server: Internal - {'; '.join(texts)}"


def not_all_loaded(options: ServerOptions, statuses: Mapping[str, ModelStatus]) -> str:
    """Say in Triton's words that the server ends, and how to serve the models that could be loaded."""
    text = "creating server: Internal - failed to load all models; see the table above for the reasons. "
    loaded = sorted(
        name
        for name, status in statuses.items()
        if any(version.state is ModelState.READY for version in status.versions)
    )
    text += "To serve the others, add --exit-on-error=false"
    if options.model_control_mode != "explicit" and 0 < len(loaded) <= _MOST_MODELS:
        names = " ".join(f"--load-model={shlex.quote(name)}" for name in loaded)
        text += f"; to load no others, --model-control-mode=explicit {names}"
    return f"{one_line(text)}."


def _too_few_files(options: ServerOptions) -> Iterator[tuple[int, str]]:
    asked, allowed = wanted(options), connections(options)
    flags = {"http": options.allow_http, "grpc": options.allow_grpc}
    reduced = [
        (f"--{protocol}-max-connections", getattr(asked, protocol), getattr(allowed, protocol))
        for protocol, is_served in flags.items()
        if is_served
    ]
    if options.max_connections is not None:
        most = allowed.together + allowed.metrics
        reduced = [("--max-connections", options.max_connections, most)]
    for flag, most_asked, most_allowed in reduced:
        if most_allowed < most_asked:
            text = f"{flag} is {most_asked}, and the limit of open files (ulimit -n) allows {most_allowed}"
            yield logging.INFO, text


def ascii_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Draw a table with lines around it. A cell may have several lines."""
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
