"""The command line of `moonpool bench`, checked."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.benchmarks.commands import compare
from moonpool.benchmarks.commands.load_options import (
    MANY,
    RequestSource,
    add_options,
    add_requests,
    add_sequences,
    add_windows,
    check_positive,
    check_windows,
    read_option,
    sequence_lengths,
    whole_numbers,
)
from moonpool.benchmarks.data import OPENAI
from moonpool.benchmarks.export import WRITERS
from moonpool.benchmarks.faults import Fault
from moonpool.benchmarks.hosts.hosts import HOSTS
from moonpool.benchmarks.loadgen import SCENARIOS, LoadGenPlan
from moonpool.benchmarks.loads import (
    DISTRIBUTIONS,
    BadLoad,
    Concurrency,
    Load,
    Rate,
    Schedule,
    Shape,
    seconds_of,
    share_of,
)
from moonpool.benchmarks.slo import Slo
from moonpool.ipc.policy import LEVELS
from moonpool.runtime.cli.inputs import parse_endpoint, parse_header
from moonpool.runtime.cli.shared import UsageError, add_hosting, hosting_of
from moonpool.runtime.client.request import Endpoint, Tls

_CONCURRENCY = "1,2,4,16"
# Requests in flight of LoadGen's scenarios: MultiStream has eight samples in a query.
_LOADGEN_THREADS, _LOADGEN_MANY = {"SingleStream": 1, "MultiStream": 8}, 16
# Longer than most deadlines for an execution.
_HANG_S = 10.0
# A label becomes a part of a file's name.
_LABEL = re.compile(r"[\w.+=@, -]{1,60}")


_LOADS = "--concurrency --request-rate --load-shape --schedule --replay"
_FAULTS = "--kill-every --stop-every --hang"
_SOURCES = "--input --input-data --replay"
_HOSTING = "--backend-directory --sandbox --sandbox-grants --model-option"


class Rule(NamedTuple):
    """Options, others that they need one of, or that they do not go together with, and the reason."""

    options: str
    others: str
    why: str = ""


NEEDS = (
    Rule("--overwrite --export", "--save"),
    Rule("--speed", "--schedule --replay"),
    Rule("--metrics-url", "--resources"),
    Rule("--server-pid", f"--resources {_FAULTS}"),
    Rule("--host-package", "--hosts"),
    Rule("--streaming --json-tensors --openai --shared-memory --model-version --header", "--url"),
    Rule("--load-shape --schedule --replay --sequences --cancel", "--url"),
    Rule("--processes", "--url --hosts"),
    # Callers in this process send a request after each answer.
    Rule("--request-rate", "--url --hosts --loadgen"),
    Rule("--json-tensors --openai", "http:// https://"),
    Rule("--ca --client-certificate --client-key", "https:// grpcs://"),
    Rule("--client-key", "--client-certificate"),
)
ONE_LOAD = Rule(_LOADS, _LOADS, "give one kind of load")
EXCLUDES = (
    Rule(f"--hosts --async --instances --isolation {_HOSTING}", "--url", "the server has the model"),
    ONE_LOAD,
    Rule(_FAULTS, _FAULTS, "give one kind of fault"),
    Rule(_SOURCES, _SOURCES, "give one source of requests"),
    Rule("--isolation", f"--sandbox --against {_FAULTS}"),
    Rule("--hosts", "--against --isolation --async"),
    Rule(_FAULTS, "--against", "faults are for one side"),
    Rule("--timeline", "--against --isolation --hosts --loadgen", "it shows one side"),
    Rule("--timeline", "--streaming", "it is for requests with one response"),
    Rule("--loadgen", "--load-shape --schedule --replay --against --hosts --isolation --sequences"),
    Rule("--loadgen", "--cancel --streaming --async --resources --export"),
    Rule("--openai", "--model-version --shared-memory --json-tensors --streaming --sequences --replay --shape --batch"),
    Rule("--openai", "--timeline --loadgen"),
    Rule("--shared-memory", "--input-data --replay --sequences --streaming --json-tensors"),
)


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
    # Empty if the highest rate that keeps `slo` is to be found.
    loads: list[Load]
    distribution: str
    slo: Slo | None
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
    # An endpoint of OpenAI's API, in place of KServe's.
    openai: str | None
    instances: int | None
    is_async: bool
    # Levels of the sandbox to measure in turns.
    isolation: list[str]
    # Hosts to measure in turns, and packages that the model needs in them.
    hosts: list[str]
    host_packages: list[str]
    requests: RequestSource
    # A capture of a server, in place of `requests`.
    replay: Path | None
    speed: float
    # A share of the requests that is cancelled, and after how many seconds.
    cancelled: tuple[float, float] | None
    # The least and the greatest length of sequences.
    sequences: tuple[int, int] | None
    save: Path | None
    label: str | None
    overwrite: bool
    resources: bool
    server_pid: int | None
    metrics_url: str | None
    fault: Fault | None
    # A scenario of LoadGen, in place of the other loads.
    loadgen: LoadGenPlan | None
    # How often everything is measured, and the formats of further files.
    runs: int
    export: list[str]
    # A file for what each request did, in its caller and in the server.
    timeline: Path | None
    verbose: bool

    @property
    def file_name(self) -> str:
        """The name of the result's files, without their endings."""
        return f"{self.model}-{self.label}" if self.label else self.model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # The list of all options would hide the error about the command line.
    parser.usage = (
        "moonpool bench REPO MODEL [--FLAG VALUE ...]\n       moonpool bench MODEL --url URL [--FLAG VALUE ...]"
        "\n       moonpool bench REPO MODEL --hosts HOST,HOST [--FLAG VALUE ...]"
        "\n       moonpool bench compare A.json [B.json] [--fail-if CONDITION ...]"
    )
    add = parser.add_argument
    add("repository", metavar="REPO", nargs="?", help="the directory of the models; not with --url")
    add("model", metavar="MODEL", help="the model's name")
    # The second file of `compare`.
    add("second", nargs="?", help=argparse.SUPPRESS)
    _add_subject(parser.add_argument_group("what is measured"))
    _add_load(parser.add_argument_group("the load"))
    _add_measurement(parser.add_argument_group("the measurement"))
    _add_request(parser.add_argument_group("the request"))
    _add_observation(parser.add_argument_group("resources and faults"))
    _add_results(parser.add_argument_group("the results"))
    compare.add_arguments(parser.add_argument_group("comparing two results"))


def _add_observation(group: argparse._ArgumentGroup) -> None:
    add_options(
        group,
        {
            "--resources": "measure processor time and memory of the model's and the server's processes, on this "
            "machine",
            "--server-pid PID": "with --url, for --resources and faults: the server's process on this machine, if it "
            "is not a moonpool server",
            "--metrics-url URL": "with --resources: the address of the server's metrics, for figures of GPUs: "
            "http://HOST:8002/metrics",
            "--kill-every TIME": "kill an instance of the model every so often, as 10s: in this process, or of a "
            "server on this machine, moonpool's or (with --server-pid) Triton's",
            "--stop-every TIME": "likewise, stop one (SIGSTOP), so that it hangs; the model should have a deadline "
            "for execute",
            "--hang SHARE[@TIME]": "likewise, stop one for TIME each time that a further SHARE of the requests was "
            "answered, as 1%%@5s; default 10s",
        },
        {"--server-pid": {"type": int}},
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add_options(
        group,
        {
            "--save DIR": "write the result to DIR/MODEL.json and DIR/MODEL.csv, and to DIR/MODEL.png if matplotlib "
            "is installed",
            "--label TEXT": "name this result, in its tables and its files: DIR/MODEL-TEXT.json and so on",
            "--overwrite": "with --save: replace a result of that name",
            "--export FORMAT,…": "with --save: write more files: jsonl or parquet with each request, hgrm with "
            "HdrHistogram's percentiles, trace for Perfetto, html with a page",
            "--timeline FILE": "write a trace for Perfetto with each request and its batch, in its caller and in the "
            "server; a server must have --trace-config=triton,file=FILE",
        },
        {"--save": {"type": Path}, "--export": {"default": ""}, "--timeline": {"type": Path}},
    )


def _add_subject(group: argparse._ArgumentGroup) -> None:
    add_options(
        group,
        {
            "--url URL": "measure at this server: http://HOST:PORT or grpc://HOST:PORT, or with TLS https:// or "
            "grpcs://",
            "--against URL|FILE": "compare with another server, measured in turns, or with a result that --save wrote",
            "--model-version N": "with --url: the version of the model; by default the server chooses it",
            "--header NAME=VALUE": "with --url: send this header with each request; may be given many times",
            "--timeout S": "the deadline of each request, in seconds after it was sent; default %(default)s",
            "--ca FILE": "with TLS: the root certificates of servers, in PEM form; by default those of the system",
            "--client-certificate FILE": "with TLS: our own certificate, in PEM form",
            "--client-key FILE": "its key, if it is in another file",
        },
        {"--model-version": {"default": ""}, "--header": MANY, "--timeout": {"type": float, "default": 60.0}},
    )
    _add_hosts(group)


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add_hosting(group)
    add_options(
        group,
        {
            "--instances N": "in process: load this many instances, in place of the configuration's",
            "--isolation LEVEL,LEVEL": "in process: measure with these sandbox levels in turns, with ratios over the "
            f"first one; {', '.join(LEVELS)}",
            "--hosts HOST,HOST": "measure the model of REPO in several hosts in turns, each started for it, with "
            f"ratios over the first one: {', '.join(HOSTS)}",
            "--host-package PACKAGE": "with --hosts: a package that the model needs there beside numpy, as "
            "torch==2.13.0; may be given many times",
            "--async": "in process: call from tasks of an event loop, not from threads",
        },
        {"--instances": {"type": int}, "--host-package": MANY, "--async": {"dest": "is_async"}},
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add_options(
        group,
        {
            "--concurrency N,N,…": "numbers of callers, each of which sends a request after each answer; default "
            f"{_CONCURRENCY}",
            "--request-rate N,N,…": "requests a second, sent at planned times, in place of --concurrency; latency "
            "counts from the planned time",
            "--distribution": "with --request-rate: the distribution of the times; default %(default)s",
            "--load-shape SHAPE": "requests at a rate that changes: ramp:LOW-HIGH over a window, "
            "periodic:LOW-HIGH/PERIOD, or burst:LOW-HIGH/PERIOD/SHARE, as in burst:100-1000/5s/20%%",
            "--schedule FILE": "send requests at the times in FILE, one in seconds on each line",
            "--speed N": "with --schedule and --replay: replay this many times as fast; default 1",
            "--loadgen SCENARIO": "let MLPerf's LoadGen send the requests, for at least --seconds, in one of its "
            f"scenarios: {', '.join(SCENARIOS)}; --concurrency is the most in flight, and Server has a --request-rate "
            "and a limit as --slo p99=20ms",
            "--cancel SHARE[@TIME]": "cancel a share of the requests, as 5%% or 5%%@20ms, that time after they were "
            "sent; by default at once",
            "--slo FIGURE=TIME,…": "limits such as p99=20ms,first=5ms: find the highest request rate that keeps "
            "them, or say for each given load if it does; FIGURE is p50, p90, p95, p99, max, mean, or in streams "
            "first or between",
            "--processes N": "with --url: the processes of the load generator; default 1",
            "--max-connections N": "with --request-rate: the most requests in flight; default %(default)s",
        },
        {
            "--distribution": {"choices": DISTRIBUTIONS, "default": "poisson"},
            "--schedule": {"type": Path},
            "--speed": {"type": float, "default": 1.0},
            "--loadgen": {"choices": SCENARIOS},
            "--processes": {"type": int, "default": 1},
            "--max-connections": {"type": int, "default": 256},
        },
    )
    add_sequences(group)


def _add_measurement(group: argparse._ArgumentGroup) -> None:
    add_windows(group, seconds=1.0, windows=10)
    add_options(
        group,
        {
            "--runs N": "measure all loads this many times, one run after the other, for figures with 95 %% "
            "confidence intervals; default 1"
        },
        {"--runs": {"type": int, "default": 1}},
    )


def _add_request(group: argparse._ArgumentGroup) -> None:
    add_requests(group)
    add_options(
        group,
        {
            "--replay FILE": "send captured requests at their times: a JSON object on each line, as docs/BENCH.md "
            "describes",
            "--shared-memory": "how tensors travel. system: in shared memory on this machine, which the server must "
            "allow (--allow-client-shm=true of moonpool serve and tritonserver)",
            "--json-tensors": "over HTTP: send tensors as JSON, for servers without the binary tensor extension",
            "--streaming": "count and time the responses of streams: over gRPC each caller opens one "
            "(ModelStreamInfer), over HTTP each request is answered by one (generate_stream)",
            "--openai ENDPOINT": f"over HTTP: send requests of OpenAI's API, {', '.join(OPENAI)}; by default chat. "
            "--input NAME=JSON sets a field. Chats and completions are streams, whose responses are the pieces of "
            "the answers",
        },
        {
            "--replay": {"type": Path},
            "--shared-memory": {"choices": ("none", "system"), "default": "none"},
            "--openai": {"nargs": "?", "const": "chat", "choices": OPENAI},
        },
    )


def checked(arguments: argparse.Namespace) -> Options:
    """Raises `UsageError`."""
    _check_values(arguments)
    _check_rules(arguments)
    endpoint, against, against_file = _places(arguments)
    slo = read_option("--slo", Slo.parse, arguments.slo)
    loads = _loads(arguments, is_search=slo is not None and endpoint is not None)
    if not loads and arguments.replay is None and arguments.against is not None:
        raise UsageError("--slo looks for a rate at one server: with --against, give --request-rate")
    return Options(
        repository=arguments.repository,
        hosting=hosting_of(arguments),
        model=arguments.model,
        version=arguments.model_version,
        endpoint=endpoint,
        against=against,
        against_file=against_file,
        loads=loads,
        distribution=arguments.distribution,
        slo=slo,
        seconds=arguments.seconds,
        warm_up_s=arguments.warm_up,
        most_windows=arguments.windows,
        stable_percent=arguments.stable,
        timeout_s=arguments.timeout,
        processes=arguments.processes,
        most_connections=_most_connections(loads, arguments.max_connections),
        headers=[parse_header(text) for text in arguments.header],
        shared_memory=arguments.shared_memory == "system",
        is_stream=arguments.streaming or arguments.openai in ("chat", "completions"),
        is_json=arguments.json_tensors,
        openai=arguments.openai,
        instances=arguments.instances,
        is_async=arguments.is_async,
        isolation=_isolation(arguments),
        hosts=_hosts(arguments),
        host_packages=arguments.host_package,
        requests=RequestSource.of(arguments),
        replay=arguments.replay,
        speed=arguments.speed,
        cancelled=read_option("--cancel", _cancelled, arguments.cancel),
        sequences=sequence_lengths(arguments.sequences),
        save=arguments.save,
        label=arguments.label,
        overwrite=arguments.overwrite,
        export=_export(arguments),
        timeline=arguments.timeline,
        resources=arguments.resources,
        server_pid=arguments.server_pid,
        metrics_url=arguments.metrics_url,
        fault=_fault(arguments),
        loadgen=None if arguments.loadgen is None else _loadgen(arguments, slo),
        runs=arguments.runs,
        verbose=arguments.verbose,
    )


def _check_values(arguments: argparse.Namespace) -> None:
    check_windows(arguments)
    check_positive(arguments, ("processes", "max_connections", "timeout", "speed", "runs"))
    if arguments.instances is not None and arguments.instances < 1:
        raise UsageError("--instances must be more than 0")
    if arguments.label is not None and not _LABEL.fullmatch(arguments.label):
        raise UsageError(
            "--label must be letters, digits, spaces and any of . _ + = @ , -, at most 60 of them, not "
            f"{arguments.label!r}"
        )


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    """Return True for an option that is not at its default, and for the beginning of an address that is."""
    if name.endswith("://"):
        return any(str(text).startswith(name) for text in (arguments.url, arguments.against))
    action = arguments.parser._option_string_actions[name]
    return bool(getattr(arguments, action.dest) != action.default)


def _check_rules(arguments: argparse.Namespace) -> None:
    """Refuse options without what they need, and options that do not go together, rather than ignore them."""
    if arguments.second is not None:
        raise UsageError("two names at most; three are for `compare A.json B.json`")
    if arguments.fail_if:
        raise UsageError("--fail-if is for `compare`")
    if arguments.url is None and arguments.repository is None:
        raise UsageError("say where the model is: REPO MODEL, or MODEL --url URL")
    if arguments.url is not None and arguments.repository is not None:
        raise UsageError("with --url the server has the model: leave out the repository")
    for rule in NEEDS:
        others = rule.others.split()
        for option in rule.options.split():
            if _is_given(arguments, option) and not any(_is_given(arguments, o) for o in others):
                *some, last = others
                words = f"{', '.join(some)} or {last}" if some else last
                raise UsageError(f"{option} needs {words}")
    for rule in EXCLUDES:
        # LoadGen has so many in flight, at that rate.
        if rule is ONE_LOAD and arguments.loadgen is not None:
            continue
        given = [name for name in rule.options.split() if _is_given(arguments, name)]
        others = [name for name in rule.others.split() if _is_given(arguments, name)]
        for option, other in itertools.product(given, others):
            if option != other:
                why = f": {rule.why}" if rule.why else ""
                raise UsageError(f"{option} and {other} do not go together{why}")


def _loadgen(arguments: argparse.Namespace, slo: Slo | None) -> LoadGenPlan:
    """Check the options of LoadGen's scenarios."""
    threads = _LOADGEN_THREADS.get(arguments.loadgen, _LOADGEN_MANY)
    if arguments.concurrency is not None:
        threads = max(whole_numbers("--concurrency", arguments.concurrency, least=1))
    bound: dict[str, float] = {}
    if arguments.loadgen == "Server":
        if arguments.request_rate is None:
            raise UsageError("--loadgen Server needs --request-rate, the rate that it tries")
        [rate, *more] = _rates(arguments.request_rate)
        if more:
            raise UsageError("--loadgen Server tries one --request-rate")
        bound["rate_per_s"] = rate
        if slo is not None:
            [(figure, limit_us), *rest] = slo.limits_us.items()
            if rest or figure not in ("p50", "p90", "p95", "p99"):
                raise UsageError("--loadgen Server has one limit of p50, p90, p95 or p99")
            bound |= {"latency_us": limit_us, "percentile": float(figure[1:])}
    elif arguments.request_rate is not None or slo is not None:
        raise UsageError("--request-rate and --slo are for --loadgen Server")
    return LoadGenPlan(arguments.loadgen, threads, arguments.seconds, **bound)


def _isolation(arguments: argparse.Namespace) -> list[str]:
    """Check and return the levels that are measured in turns; none without --isolation."""
    if arguments.isolation is None:
        return []
    levels: list[str] = arguments.isolation.split(",")
    if len(levels) < 2 or len(set(levels)) < len(levels) or not set(levels) <= set(LEVELS):
        raise UsageError(f"--isolation must be two or more of {', '.join(LEVELS)}, not {arguments.isolation!r}")
    return levels


def _hosts(arguments: argparse.Namespace) -> list[str]:
    """Check and return the hosts that are measured in turns; none without --hosts."""
    if arguments.hosts is None:
        return []
    hosts: list[str] = arguments.hosts.split(",")
    if len(set(hosts)) < len(hosts) or not set(hosts) <= set(HOSTS):
        raise UsageError(f"--hosts must be some of {', '.join(HOSTS)}, not {arguments.hosts!r}")
    given = [name for name in _FAULTS.split() if _is_given(arguments, name)]
    if given and hosts not in (["moonpool"], ["triton"]):
        raise UsageError(f"{given[0]} harms one host: give --hosts moonpool or --hosts triton")
    return hosts


def _fault(arguments: argparse.Namespace) -> Fault | None:
    """Return the fault, if there is one."""
    texts = {name: getattr(arguments, name) for name in ("kill_every", "stop_every", "hang")}
    faults = {name: text for name, text in texts.items() if text is not None}
    if not faults:
        return None
    [(name, text)] = faults.items()
    if name == "hang":
        return read_option("--hang", _hanging, text)
    every_s = read_option(f"--{name.replace('_', '-')}", seconds_of, text)
    if not every_s:
        raise UsageError("the time between two faults must be more than 0")
    return Fault("killed" if name == "kill_every" else "stopped", every_s=every_s)


def _hanging(text: str) -> Fault:
    share, _, time = text.partition("@")
    for_s = seconds_of(time) if time else _HANG_S
    if not for_s:
        raise BadLoad(f"{text!r}: an instance must hang for more than 0 s")
    return Fault("stopped", share=share_of(share), for_s=for_s)


def _export(arguments: argparse.Namespace) -> list[str]:
    formats = [part for part in arguments.export.split(",") if part]
    known = [*WRITERS, "html"]
    if unknown := [each for each in formats if each not in known]:
        raise UsageError(f"--export {unknown[0]}: the formats are {', '.join(known)}")
    return formats


def _cancelled(text: str) -> tuple[float, float]:
    share, _, time = text.partition("@")
    return share_of(share), seconds_of(time) if time else 0.0


def _places(arguments: argparse.Namespace) -> tuple[Endpoint | None, Endpoint | None, Path | None]:
    """Return the server, and the server or the file that it is compared with."""
    tls = Tls(arguments.ca, arguments.client_certificate, arguments.client_key)
    found: list[Endpoint | None] = []
    for option, text in (("--url", arguments.url), ("--against", arguments.against)):
        is_server = text is not None and (option == "--url" or "://" in text)
        endpoint = parse_endpoint(option, text) if is_server else None
        if endpoint is not None and endpoint.tls is not None:
            endpoint = endpoint._replace(tls=tls)
        found.append(endpoint)
    url, against = found
    is_file = against is None and arguments.against is not None
    if url is not None and url.scheme == "http" and arguments.streaming:
        for name in ("--sequences", "--batch", "--json-tensors"):
            if _is_given(arguments, name):
                raise UsageError(f"{name} and streams over HTTP (generate_stream) do not go together")
    return url, against, Path(arguments.against) if is_file else None


def _loads(arguments: argparse.Namespace, *, is_search: bool) -> list[Load]:
    if arguments.loadgen is not None:
        return [Concurrency(1)]
    given = [name for name in _LOADS.split() if _is_given(arguments, name)]
    if (given and given[0] == "--replay") or (not given and is_search):
        # The load comes from the captured file, or from a search.
        return []
    if arguments.schedule is not None:
        return [_schedule(arguments.schedule, arguments.speed)]
    if arguments.load_shape is not None:
        return [_load_shape(arguments)]
    if arguments.request_rate is None:
        texts = _CONCURRENCY if arguments.concurrency is None else arguments.concurrency
        return [Concurrency(callers) for callers in whole_numbers("--concurrency", texts, least=1)]
    return [Rate(rate, arguments.distribution) for rate in _rates(arguments.request_rate)]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"--request-rate must be numbers of more than 0, separated by commas, not {text!r}")
    return rates


def _schedule(path: Path, speed: float) -> Schedule:
    try:
        return Schedule.read(path, speed)
    except BadLoad as error:
        raise UsageError(f"--schedule: {error}") from error


def _load_shape(arguments: argparse.Namespace) -> Shape:
    try:
        shape = Shape.parse(arguments.load_shape, arguments.distribution)
    except BadLoad as error:
        raise UsageError(f"--load-shape: {error}") from error
    if arguments.seconds < shape.least_s:
        raise UsageError(f"a window must have a whole period of {shape.text}: --seconds of at least {shape.least_s:g}")
    return shape


def _most_connections(loads: Sequence[Load], most: int) -> int:
    callers = [load.callers for load in loads if isinstance(load, Concurrency)]
    return max(callers) if callers else most
