"""`moonpool serve`: runs a server of the KServe v2 protocol, in place of a tritonserver for Python models."""

from __future__ import annotations

import argparse
import os
import sys

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.model.gpus import EXPERIMENTAL
from moonpool.runtime.process.extras import EXTRAS, how_to_install, name_of
from moonpool.runtime.server.options.sources import CONFIG, CONFIG_VARIABLE, BadOption, add_flags, given, read_options
from moonpool.runtime.server.options.table import ServerOptions

HELP = "serve the models of repositories over HTTP and gRPC"
DESCRIPTION = f"""\
Serve the models of one or more repositories to every client of the KServe v2 protocol, with tritonserver's
ports and flags: HTTP at 8000, gRPC at 8001, metrics at 8002. A browser shows a page of the server on the port for
HTTP. tritonserver's other flags are accepted without effect; docs/SERVE_OPTIONS.md says why.

{EXPERIMENTAL}
"""
EXAMPLES = """\
examples:
  moonpool serve models
  moonpool serve models --http-port=9000 --allow-grpc=false
  moonpool serve --model-repository=models --model-control-mode=explicit --load-model=add_sub
  MOONPOOL_SERVE_LOG_FORMAT=json moonpool serve models --config=server.toml
"""
# By the names of the modules.
_EXTRA = {name_of(requirement) for requirement in EXTRAS["serve"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    # The list of all would hide what is wrong with a command line.
    parser.usage = "moonpool serve [REPO ...] [--FLAG=VALUE ...]"
    parser.add_argument(
        "repositories", metavar="REPO", nargs="*", default=[], help="the same as --model-repository=REPO"
    )
    parser.add_argument(
        f"--{CONFIG}",
        metavar="FILE",
        action="append",
        help=f"a TOML file with options by the names of their flags; also {CONFIG_VARIABLE}",
    )
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    arguments = given(options)
    if options.repositories:
        known = arguments.get("model-repository", [])
        arguments["model-repository"] = [*options.repositories, *known]
    if options.verbose:
        arguments.setdefault("log-verbose", ["1"])
    try:
        read, without_effect = read_options(arguments, os.environ)
        return _serve(read, without_effect)
    except BadOption as error:
        raise UsageError(str(error)) from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise MoonpoolError(f"the package {error.name} is not installed: {how_to_install('serve')}") from error


def _serve(options: ServerOptions, without_effect: dict[str, str]) -> int:
    # Imported here, so that no server is made if it is missing.
    import uvloop  # noqa: F401

    from moonpool.runtime.hosting.progress import Progress
    from moonpool.runtime.log import RuntimeLog
    from moonpool.runtime.process.event_loop import run
    from moonpool.runtime.process.terminal import Terminal
    from moonpool.runtime.server.listening import raise_limit
    from moonpool.runtime.server.log import LogOptions, ServerLog, logged
    from moonpool.runtime.server.process import Server

    raise_limit()
    progress = Progress() if Terminal(sys.stderr).is_terminal and not options.log_file else None
    log_options = LogOptions(
        log_file=options.log_file,
        log_info=options.log_info,
        log_warning=options.log_warning,
        log_error=options.log_error,
        log_verbose_level=options.log_verbose,
        log_format=options.log_format,
    )
    try:
        log = ServerLog(log_options, progress=progress)
    except OSError as error:
        raise BadOption(f"--log-file: {options.log_file}: {error.strerror}") from error
    with logged(log):
        for flag, why in without_effect.items():
            RuntimeLog("moonpool.server").warning("--%s has no effect here: %s", flag, why)
        server = Server(options, log, progress)
        return run(server.run())
