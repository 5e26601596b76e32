"""The command line of `moonpool bench`, checked."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.runtime.bench.request import BadAddress, Endpoint
from moonpool.runtime.bench.windows import DISTRIBUTIONS, Concurrency, Load, Rate
from moonpool.runtime.cli.inputs import parse_inputs
from moonpool.runtime.cli.shared import UsageError, add_hosting, check_no_hosting, hosting_of

_CONCURRENCY = "1,2,4,16"
# A label becomes a part of a file's name.
_LABEL = re.compile(r"[\w.+=@, -]{1,60}")


@dataclass(frozen=True, slots=True)
class Options:
    """Options that fit together: there is either a repository or an endpoint, and rates only for endpoints."""

    repository: str | None
    # How the models of the repository are hosted.
    hosting: dict[str, Any]
    model: str
    version: str
    endpoint: Endpoint | None
    against: Endpoint | None
    against_file: Path | None
    loads: list[Load]
    seconds: float
    warm_up_s: float
    most_windows: int
    stable_percent: float
    timeout_s: float
    processes: int
    most_connections: int
    headers: list[tuple[str, str]]
    shared_memory: bool
    is_stream: bool
    is_json: bool
    instances: int | None
    is_async: bool
    values: dict[str, object]
    shapes: dict[str, tuple[int, ...]]
    batch: int
    save: Path | None
    label: str | None
    overwrite: bool
    verbose: bool

    @property
    def file_name(self) -> str:
        """The name of the result's files, without their endings."""
        return f"{self.model}-{self.label}" if self.label else self.model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # The list of all options would hide the error about the command line.
    parser.usage = "moonpool bench REPO MODEL [--FLAG VALUE ...]\n       moonpool bench MODEL --url URL [--FLAG VALUE ...]"
    add = parser.add_argument
    add("repository", metavar="REPO", nargs="?", help="the directory of the models; not with --url")
    add("model", metavar="MODEL", help="the model's name")
    _add_subject(parser.add_argument_group("what is measured"))
    _add_load(parser.add_argument_group("how hard"))
    _add_request(parser.add_argument_group("the request"))
    add(
        "--save",
        metavar="DIR",
        type=Path,
        help="write the result to DIR/MODEL.json and DIR/MODEL.csv, and to DIR/MODEL.png if matplotlib is installed",
    )
    add(
        "--label",
        metavar="TEXT",
        help="name this result, in its tables and its files: DIR/MODEL-TEXT.json and so on",
    )
    add("--overwrite", action="store_true", help="with --save: replace a result of that name")


def _add_subject(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", metavar="URL", help="measure at this server: http://HOST:PORT or grpc://HOST:PORT")
    add(
        "--against",
        metavar="URL|FILE",
        help="compare with another server, measured in turns, or with a result that --save wrote",
    )
    add(
        "--model-version",
        metavar="N",
        default="",
        help="with --url: the version of the model; by default the server chooses it",
    )
    add(
        "--header",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="with --url: send this header with each request; may be given many times",
    )
    add(
        "--timeout",
        metavar="S",
        type=float,
        default=60.0,
        help="wait at most so many seconds for an answer; default %(default)s",
    )
    add_hosting(group)
    add(
        "--instances",
        metavar="N",
        type=int,
        help="in process: load so many instances, whatever the configuration says",
    )
    add(
        "--async",
        dest="is_async",
        action="store_true",
        help="in process: call from tasks of an event loop, not from threads",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        metavar="N,N,…",
        help=f"numbers of callers, each of which sends a request after each answer; default {_CONCURRENCY}",
    )
    add(
        "--request-rate",
        metavar="N,N,…",
        help="requests a second, sent at planned times, in place of --concurrency; latency counts from the planned time",
    )
    add(
        "--distribution",
        choices=DISTRIBUTIONS,
        default="poisson",
        help="with --request-rate: the distribution of the times; default %(default)s",
    )
    add(
        "--seconds",
        metavar="S",
        type=float,
        default=1.0,
        help="the length of a window; default %(default)s",
    )
    add(
        "--warm-up",
        metavar="S",
        type=float,
        default=0.3,
        help="the seconds before the first window, which do not count; default %(default)s",
    )
    add(
        "--windows",
        metavar="N",
        type=int,
        default=10,
        help="the most windows of a load; default %(default)s",
    )
    add(
        "--stable",
        metavar="PERCENT",
        type=float,
        default=10.0,
        help="how far the last three windows may differ from their mean; default %(default)s",
    )
    add(
        "--processes",
        metavar="N",
        type=int,
        default=1,
        help="with --url: the processes of the load generator; default 1",
    )
    add(
        "--max-connections",
        metavar="N",
        type=int,
        default=256,
        help="with --request-rate: the most requests in flight; default %(default)s",
    )


def _add_request(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="the value of an input, as NAME=JSON or NAME=@FILE.npy; by default moonpool makes inputs up from the model's metadata",
    )
    add(
        "--shape",
        metavar="NAME=N,N",
        action="append",
        default=[],
        help="the size of a made-up input, without the batch dimension",
    )
    add(
        "--batch",
        metavar="N",
        type=int,
        default=1,
        help="the number of rows in a made-up request; default 1",
    )
    add(
        "--shared-memory",
        choices=("none", "system"),
        default="none",
        help="how tensors travel. system: in shared memory on this machine, which the server must allow "
        "(--allow-client-shm=true of moonpool serve and tritonserver)",
    )
    add(
        "--json-tensors",
        action="store_true",
        help="over HTTP: send tensors as JSON, for servers without the binary tensor extension",
    )
    add(
        "--streaming",
        action="store_true",
        help="over gRPC: open a stream for each caller, and count and time its responses",
    )


def checked(arguments: argparse.Namespace) -> Options:
    """Raises `UsageError`."""
    _check_numbers(arguments)
    _check_files(arguments)
    endpoint = parse_endpoint("--url", arguments.url) if arguments.url is not None else None
    _check_subject(arguments, endpoint)
    against, against_file = _against(arguments.against)
    if arguments.streaming and against is not None and against.scheme != "grpc":
        raise UsageError("--streaming needs grpc://, for --against, too")
    loads = _loads(arguments)
    if arguments.repository is not None and isinstance(loads[0], Rate):
        raise UsageError(
            "--request-rate needs --url: callers in this process send a request after each answer"
        )
    shapes = dict(_shape(text) for text in arguments.shape)
    values = parse_inputs(arguments.input)
    if values and shapes:
        raise UsageError("--shape is for made-up inputs; leave it out with --input")
    return Options(
        repository=arguments.repository,
        hosting=hosting_of(arguments),
        model=arguments.model,
        version=arguments.model_version,
        endpoint=endpoint,
        against=against,
        against_file=against_file,
        loads=loads,
        seconds=arguments.seconds,
        warm_up_s=arguments.warm_up,
        most_windows=arguments.windows,
        stable_percent=arguments.stable,
        timeout_s=arguments.timeout,
        processes=arguments.processes,
        most_connections=_most_connections(loads, arguments.max_connections),
        headers=[parse_header(text) for text in arguments.header],
        shared_memory=arguments.shared_memory == "system",
        is_stream=arguments.streaming,
        is_json=arguments.json_tensors,
        instances=arguments.instances,
        is_async=arguments.is_async,
        values=values,
        shapes=shapes,
        batch=arguments.batch,
        save=arguments.save,
        label=arguments.label,
        overwrite=arguments.overwrite,
        verbose=arguments.verbose,
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in (
        "seconds",
        "batch",
        "windows",
        "stable",
        "processes",
        "max_connections",
        "timeout",
    ):
        value = getattr(arguments, name)
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, not {value}")
    if not 0 <= arguments.warm_up < math.inf:
        raise UsageError(f"--warm-up must be 0 or more, not {arguments.warm_up}")
    if arguments.instances is not None and arguments.instances < 1:
        raise UsageError("--instances must be more than 0")


def _check_files(arguments: argparse.Namespace) -> None:
    if arguments.label is not None and not _LABEL.fullmatch(arguments.label):
        raise UsageError(
            f"--label must be letters, digits, spaces and any of . _ + = @ , -, at most 60 of them, not {arguments.label!r}"
        )
    if arguments.overwrite and arguments.save is None:
        raise UsageError("--overwrite needs --save")


def _check_subject(arguments: argparse.Namespace, endpoint: Endpoint | None) -> None:
    """Refuse options for servers without --url, and options for this process with it, rather than ignore them."""
    if endpoint is None and arguments.repository is None:
        raise UsageError("say where the model is: REPO MODEL, or MODEL --url URL")
    if endpoint is not None and arguments.repository is not None:
        raise UsageError("with --url the server has the model: leave out the repository")
    if endpoint is None:
        remote = {
            "--streaming": arguments.streaming,
            "--json-tensors": arguments.json_tensors,
            "--shared-memory": arguments.shared_memory != "none",
            "--model-version": arguments.model_version,
            "--header": arguments.header,
            "--processes": arguments.processes > 1,
        }
        if given := [name for name, is_given in remote.items() if is_given]:
            raise UsageError(f"{given[0]} needs --url")
        return
    local = {
        "--async": arguments.is_async,
        "--instances": arguments.instances is not None,
    }
    if given := [name for name, is_given in local.items() if is_given]:
        raise UsageError(f"{given[0]} is for models in this process, not for --url")
    check_no_hosting(arguments)
    if arguments.streaming and endpoint.scheme != "grpc":
        raise UsageError("--streaming needs grpc://: the protocol has no such streams over HTTP")
    if arguments.json_tensors and (endpoint.scheme != "http" or arguments.shared_memory != "none"):
        raise UsageError("--json-tensors is for http://, and not for --shared-memory")
    if arguments.streaming and arguments.shared_memory != "none":
        raise UsageError("--streaming and --shared-memory cannot be measured together")


def _against(text: str | None) -> tuple[Endpoint | None, Path | None]:
    if text is None:
        return None, None
    return (parse_endpoint("--against", text), None) if "://" in text else (None, Path(text))


def parse_endpoint(option: str, text: str) -> Endpoint:
    """Read the address in an option. Raises `UsageError`."""
    try:
        return Endpoint.parse(text)
    except BadAddress as error:
        raise UsageError(f"{option}: {error}") from error


def _loads(arguments: argparse.Namespace) -> list[Load]:
    if arguments.request_rate is None:
        texts = _CONCURRENCY if arguments.concurrency is None else arguments.concurrency
        return [Concurrency(callers) for callers in _numbers("--concurrency", texts, least=1)]
    if arguments.concurrency is not None:
        raise UsageError("--concurrency and --request-rate are two kinds of load; give one")
    try:
        rates = [float(part) for part in arguments.request_rate.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise UsageError(
            "--request-rate must be numbers of more than 0, separated by commas, not "
            f"{arguments.request_rate!r}"
        )
    return [Rate(rate, arguments.distribution) for rate in rates]


def _most_connections(loads: Sequence[Load], most: int) -> int:
    callers = [load.callers for load in loads if isinstance(load, Concurrency)]
    return max(callers) if callers else most


def _numbers(option: str, text: str, *, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(
            f"{option} must be whole numbers of at least {least}, separated by commas, not {text!r}"
        )
    return numbers


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.partition("=")
    if not (name and equals):
        raise UsageError(f"--shape must be NAME=N,N, not {text!r}")
    return name, tuple(_numbers(f"--shape {name}", sizes, least=0))


def parse_header(text: str) -> tuple[str, str]:
    """Read `NAME=VALUE` of an option --header. Raises `UsageError`."""
    name, equals, value = text.partition("=")
    if not (name and equals) or not (text.isascii() and text.isprintable()) or " " in name:
        raise UsageError(f"--header must be NAME=VALUE, not {text!r}")
    return name, value
