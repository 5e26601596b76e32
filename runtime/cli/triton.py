"""`moonpool triton`: moonpool as a backend of a tritonserver."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moonpool.runtime.cli.shared import UsageError, table
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.triton import install

HELP = "run models in a tritonserver, as one of its backends"
DESCRIPTION = """\
Have a tritonserver run its Python models in moonpool's stubs. BACKENDS is the directory in which the server has its
backends, often /opt/tritonserver/backends. docs/TRITON_BACKEND.md has the rest.

  install     put the backend `moonpool` beside the others, for models with  backend: "moonpool"
  overlay     make a directory in which moonpool is the backend `python`, and print its path;
              nothing in BACKENDS is changed
  check       tell if it will work, with one line for each requirement; exits with 1 if not
  uninstall   remove what install and overlay made for BACKENDS; for an overlay that was made with
              --into DIR, give DIR as BACKENDS

The server will start stubs with the interpreter that runs this command.
"""
EXAMPLES = """\
examples:
  moonpool triton install /opt/tritonserver/backends
  tritonserver --backend-directory=$(moonpool triton overlay /opt/tritonserver/backends) ...
"""
_SHOWN = {True: ("yes", ""), False: ("no", "red"), None: ("?", "yellow")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=("install", "overlay", "check", "uninstall"),
        help="install, overlay, check or uninstall",
    )
    parser.add_argument("backends", type=Path, metavar="BACKENDS", help="the server's directory of backends")
    parser.add_argument(
        "--into", type=Path, metavar="DIR", help="with overlay: the directory to make; default one in ~/.cache"
    )
    parser.add_argument("--library", type=Path, metavar="FILE", help="use this library and not moonpool's own")
    parser.add_argument("--server", type=Path, metavar="FILE", help="with check: the server's libtritonserver.so")


def run(options: argparse.Namespace) -> int:
    for name, action in (("into", "overlay"), ("server", "check")):
        if getattr(options, name) is not None and options.action != action:
            raise UsageError(f"--{name} is for {action}")
    backends: Path = options.backends.absolute()
    if options.action == "check":
        return _check(backends, options.library, options.server)
    terminal = Terminal(sys.stdout)
    if options.action == "uninstall":
        removed = install.uninstall(backends)
        for folder in removed:
            terminal.line(harmless(f"removed {folder}"))
        if not removed:
            terminal.line(harmless(f"there is nothing of moonpool's for {backends}"))
        return 0
    library = options.library or install.find_library()
    if options.action == "install":
        folder = install.install(backends, library)
        terminal.line(f'models with  backend: "moonpool"  are run by {harmless(str(folder))}')
    else:
        into = options.into and options.into.absolute()
        terminal.line(str(install.overlay(backends, library, into)))
    return 0


def _check(backends: Path, library: Path | None, server: Path | None) -> int:
    found = list(install.findings(backends, library, server))
    rows = [[each.subject, _SHOWN[each.works][0], harmless(each.what)] for each in found]
    terminal = Terminal(sys.stdout)
    for line, finding in zip(table(rows, align="<<<"), found, strict=True):
        style = _SHOWN[finding.works][1]
        terminal.line(terminal.paint(line, style) if style else line)
    return 1 if any(finding.works is False for finding in found) else 0
