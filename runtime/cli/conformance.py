"""`moonpool conformance`: how like a tritonserver any server of KServe v2 answers."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.inputs import parse_endpoint
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.terminal import harmless

HELP = "compare a server's answers with a tritonserver's, or with OpenAI's reference"
DESCRIPTION = """\
Send about nine hundred requests to a server, over HTTP and gRPC, and compare its answers with those that a tritonserver
gave: status, headers, values, texts, streams. `--models` writes the repository that the server has to serve, and prints
how to serve it.

Start the server anew before each run: some answers depend on what was asked before.

With `--chat`, `--completions` or `--embeddings`, send about a hundred to a server of OpenAI's API instead, and compare
form and status of its answers with the reference of that API.

A request is `same` if nothing differs, `differs` if it only succeeded or failed as it should, and else `fails`.
"""
EXAMPLES = """\
examples:
  moonpool conformance --models repository
  moonpool conformance http://localhost:8000 --grpc localhost:8001
  moonpool conformance http://localhost:8000 --only "shared memory" --details
  moonpool conformance http://localhost:8000 --chat tiny_chat --embeddings embedder
"""
_MODELS = Path(__file__).resolve().parents[1] / "conformance/models"
# Those that a server has loaded before the first request.
LOADED = ("add_sub", "batched", "every", "fails", "repeat", "says", "sums", "told")
_OPENING_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", help="the server's address for HTTP: http://HOST:PORT")
    parser.add_argument("--grpc", metavar="HOST:PORT", help="its address for gRPC; without it, only HTTP is compared")
    parser.add_argument("--models", metavar="FOLDER", type=Path, help="write the repository to a new folder, and end")
    parser.add_argument("--only", metavar="EXTENSION", help="the requests of one extension, as the table names it")
    for endpoint in ("chat", "completions", "embeddings"):
        parser.add_argument(f"--{endpoint}", metavar="MODEL", help=f"ask this model of OpenAI's API for {endpoint}")
    parser.add_argument("--details", action="store_true", help="print each answer that is not the same")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all outcomes to a file")


def run(options: argparse.Namespace) -> int:
    if options.models is not None:
        return _write(options.models)
    if options.url is None:
        raise UsageError("say where the server is: http://HOST:PORT")
    endpoint = parse_endpoint("URL", options.url)
    if endpoint.scheme != "http" or endpoint.tls or endpoint.path:
        raise UsageError("URL is http://HOST:PORT; the address for gRPC is that of --grpc HOST:PORT")
    from moonpool.runtime.conformance import report

    found = []
    asks = _openai if options.chat or options.completions or options.embeddings else _triton
    for outcome in asks(endpoint, options):
        found.append(outcome)
        if options.details and outcome.verdict != "same":
            print(*map(harmless, outcome.lines()), sep="\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(found), indent=1), encoding="utf-8")
    print("\n".join(report.table(found)))
    return int(any(each.verdict == "fails" for each in found))


def _openai(endpoint: Any, options: argparse.Namespace) -> Iterator[Any]:
    if options.grpc is not None:
        raise UsageError("OpenAI's API has no --grpc")
    from moonpool.runtime.conformance import openai
    from moonpool.runtime.conformance.asking import AskedServer

    server = AskedServer(endpoint.host, endpoint.port, None)
    yield from openai.outcomes(server, options.chat, options.completions, options.embeddings, options.only)


def _triton(endpoint: Any, options: argparse.Namespace) -> Iterator[Any]:
    from moonpool.runtime.conformance import cases, comparing, report
    from moonpool.runtime.conformance.asking import AskedServer, region

    chosen = [
        each
        for each in cases.all_cases()
        if (options.grpc or each.protocol == "HTTP") and options.only in (None, each.extension)
    ]
    if not chosen:
        known = sorted({each.extension for each in cases.all_cases()})
        raise UsageError(f"there are no requests for {options.only!r}, but for {', '.join(known)}")
    with _channel(options.grpc) as channel, region() as clear:
        server = AskedServer(endpoint.host, endpoint.port, channel)
        _check_models(server)
        yield from report.outcomes(server, chosen, comparing.read_expected(), clear)


def _write(folder: Path) -> int:
    try:
        shutil.copytree(_MODELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise UsageError(f"--models: {folder} is there already; name a new folder") from None
    flags = " ".join(["--model-control-mode=explicit", *(f"--load-model={name}" for name in LOADED)])
    print(f"tritonserver --model-repository={folder} --strict-readiness=false {flags}")
    # Clients' shared memory is off there unless somebody wants it.
    print(f"moonpool serve --model-repository={folder} --strict-readiness=false --allow-client-shm=true {flags}")
    return 0


@contextlib.contextmanager
def _channel(address: str | None) -> Iterator[Any]:
    if address is None:
        yield None
        return
    try:
        import grpc
    except ImportError:
        raise MoonpoolError(f"--grpc needs grpcio: {how_to_install('grpc')}") from None
    with grpc.insecure_channel(parse_endpoint("--grpc", f"grpc://{address}").authority) as channel:
        try:
            grpc.channel_ready_future(channel).result(_OPENING_S)
        except grpc.FutureTimeoutError:
            raise MoonpoolError(f"nobody answers over gRPC at {address}") from None
        yield channel


def _check_models(server: Any) -> None:
    """Raise `MoonpoolError` if the server has not loaded the models."""
    from moonpool.runtime.conformance.wire import get

    try:
        lacking = [name for name in LOADED if server.send(get(f"/v2/models/{name}/ready")).status != 200]
    except OSError as error:
        raise MoonpoolError(f"nobody answers over HTTP at {server.host}:{server.http_port}: {error}") from error
    if lacking:
        raise MoonpoolError(
            f"the server has not loaded {', '.join(lacking)}; `moonpool conformance --models FOLDER` writes them"
        )
