"""`moonpool bench --url`: a server that is not moonpool's, over HTTP and gRPC."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.benchmarks.conftest import Kserve, kserve
from tests.runtime.cli.shell import MODELS, CommandLine
from tests.waiting import wait_until

from moonpool.benchmarks.commands.report import warnings

__all__ = ["kserve"]

QUICK = ("--seconds", "0.05", "--warm-up", "0", "--windows", "3")
SHAPES = ("--shape", "INPUT0=4", "--shape", "INPUT1=4")


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, kserve: Kserve) -> str:
    return kserve.endpoint(request.param).url


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Any KServe v2 server can be measured over HTTP and gRPC. The report includes the server's "
    "own figures of where the time went.",
)
def test_a_server_is_measured_with_what_it_says_itself(cli: CommandLine, url: str) -> None:
    ended = cli(
        "bench", "add_sub", "--url", url, "--concurrency", "1,3", *QUICK, *SHAPES,
        "--processes", "2", "--batch", "2", "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    report = json.loads((cli.folder / "add_sub.json").read_text())
    assert report["where"] == url
    assert report["inputs"] == {"INPUT0": ["FP32", 2, 4], "INPUT1": ["FP32", 2, 4]}
    assert [point["concurrency"] for point in report["series"]] == [1, 3]
    for point in report["series"]:
        assert point["failed"] == 0
        assert point["requests"] == point["server"]["requests"] > 0
        assert point["rows_per_batch"] == 2
        assert point["generator_share"] > 0
        split = {part: point["server"][f"{part}_us"] for part in ("queue", "compute_infer")}
        assert split == {"queue": 1.0, "compute_infer": 3.0}
    rows = list(csv.DictReader(io.StringIO((cli.folder / "add_sub.csv").read_text())))
    assert [row["server_compute_output_us"] for row in rows] == ["4.0", "4.0"]


@pytest.mark.promise("Measuring (`moonpool bench`)", "The latency of a planned …")
def test_a_rate_is_asked_for_and_what_came_late_is_said(cli: CommandLine, url: str) -> None:
    ended = cli(
        "bench", "add_sub", "--url", url, "--request-rate", "100,1000000", *QUICK, *SHAPES,
        "--distribution", "constant", "--save", ".", "--max-connections", "4",
    )  # fmt: skip

    modest, absurd = json.loads((cli.folder / "add_sub.json").read_text())["series"]
    assert modest["request_rate"] == 100
    assert modest["requests"] + modest["unsent"] == 15
    assert absurd["delayed"] > 0.05 * absurd["requests"]
    late = re.search(r"1e\+06/s: \d+ of \d+ requests were sent more than 1 ms late.*", ended.stderr)
    assert late is not None
    assert ("could not keep up" in late[0]) == (absurd["unsent"] > 0)


@pytest.mark.parametrize("unsent", [0, 3])
def test_only_a_load_with_requests_that_were_never_sent_could_not_be_kept_up_with(unsent: int) -> None:
    point = {
        "request_rate": 26.0, "requests": 42 - unsent, "failed": 0, "unsent": unsent, "delayed": 33, "stable": True,
        "generator_share": None,
    }  # fmt: skip

    [told] = warnings({"where": "here", "series": [point], "processes": 1})

    never = ", and 3 were never sent: it could not keep up" if unsent else ""
    assert told == f"here, 26/s: 33 of 42 requests were sent more than 1 ms late{never}"


@pytest.mark.promise(
    "Measuring (`moonpool bench`)", "Requests can go in sequences, each on one connection from its start to its end."
)
def test_requests_go_in_sequences(cli: CommandLine, url: str) -> None:
    ended = cli(
        "bench", "sequence", "--url", url, "--concurrency", "3", "--sequences", "1-4", *QUICK, *SHAPES,
        "--processes", "2",
    )  # fmt: skip

    # The server refuses a request that does not begin, continue or end its sequence.
    assert ended.returncode == 0, ended.stderr
    assert "in sequences of 1 to 4" in ended.stdout


@pytest.mark.promise(
    "Measuring (`moonpool bench`)", "A share of the requests can be cancelled; these are counted by themselves."
)
def test_a_share_of_the_requests_is_cancelled(cli: CommandLine, url: str) -> None:
    ended = cli(
        "bench", "add_sub", "--url", url, "--concurrency", "2", "--cancel", "50%", *QUICK, *SHAPES,
        "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((cli.folder / "add_sub.json").read_text())["series"]
    assert point["failed"] == 0
    assert point["cancelled"] > 0
    assert point["requests"] > 0
    assert "cancelled" in ended.stdout


def test_faults_and_resources_need_a_server_that_tells_its_processes(cli: CommandLine, url: str) -> None:
    for option in (["--resources"], ["--kill-every", "0.01"]):
        ended = cli("bench", "add_sub", "--url", url, "--concurrency", "1", *option, *QUICK, *SHAPES)

        assert ended.returncode == 1
        assert "error" in ended.stderr


def test_loads_have_shapes_and_schedules(cli: CommandLine, url: str) -> None:
    (cli.folder / "times").write_text("5\n5.01\n5.02\n")
    bench = ("bench", "add_sub", "--url", url, *QUICK, *SHAPES, "--save", ".", "--overwrite")

    ended = cli(*bench, "--schedule", "times", "--speed", "2")
    [point] = json.loads((cli.folder / "add_sub.json").read_text())["series"]
    assert point["schedule"] == "times at speed 2"
    assert point["requests"] + point["unsent"] == 9
    assert ended.returncode == 0, ended.stderr

    ended = cli(*bench, "--load-shape", "ramp:100-300", "--distribution", "constant")
    [point] = json.loads((cli.folder / "add_sub.json").read_text())["series"]
    assert point["load_shape"] == "ramp:100-300"
    assert point["requests"] + point["unsent"] == 30
    assert ended.returncode == 0, ended.stderr


def write_data(cli: CommandLine, output: float) -> str:
    """A file in perf_analyzer's form with two requests to add_sub, one of which has an expected answer."""
    data = [{"INPUT0": [1, 2, 3, 4], "INPUT1": {"content": [1, 1, 1, 1], "shape": [4]}}] * 2
    wanted = [{"OUTPUT0": [2, 3, 4, output]}, {}]
    (cli.folder / "data.json").write_text(json.dumps({"data": data, "validation_data": wanted}))
    return "data.json"


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "perf_analyzer's `--input-data` works as it is; answers that differ from its `validation_data` "
    "end the command before it measures.",
)
def test_data_of_perf_analyzer_is_sent_and_checked(cli: CommandLine, url: str) -> None:
    where = (["add_sub", "--url", url], [MODELS, "add_sub"])
    for subject in where:
        bench = ("bench", *subject, "--concurrency", "1", *QUICK, "--input-data")
        ended = cli(*bench, write_data(cli, 5))
        assert ended.returncode == 0, ended.stderr
        assert "the first of 2" in ended.stdout

        ended = cli(*bench, write_data(cli, 6))
        assert ended.returncode == 1
        assert "output 'OUTPUT0' is [2.0, 3.0, 4.0, 5.0]" in ended.stderr


def test_captured_requests_are_sent_again(cli: CommandLine, url: str) -> None:
    def line(at_s: float, value: float, model: str = "add_sub") -> str:
        data = base64.b64encode(np.full(4, value, np.float32).tobytes()).decode()
        inputs = [{"name": f"INPUT{i}", "datatype": "FP32", "shape": [1, 4], "b64": data} for i in range(2)]
        return json.dumps({"at_s": at_s, "model": model, "version": "1", "inputs": inputs})

    lines = ['{"format": 1}', line(0, 1), line(0.03, 2), line(0.02, 1), line(0.05, 1, "other")]
    (cli.folder / "capture").write_text("\n".join(lines) + "\n")
    ended = cli("bench", "add_sub", "--url", url, "--replay", "capture", *QUICK, "--save", ".")

    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((cli.folder / "add_sub.json").read_text())["series"]
    assert point["requests"] + point["unsent"] == 9
    assert "the first of 2" in ended.stdout


def test_loads_are_judged_by_limits(cli: CommandLine, url: str) -> None:
    ended = cli(
        "bench", "add_sub", "--url", url, "--concurrency", "1", "--slo", "max=60s", *QUICK, *SHAPES,
        "--save", ".", "--stable", "10000",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    report = json.loads((cli.folder / "add_sub.json").read_text())
    [point] = report["series"]
    assert report["slo"]["limits_us"] == {"max": 60e6}
    assert point["broken"] is None
    assert point["goodput_per_s"] == pytest.approx(point["requests_per_s"])


def test_the_highest_rate_is_looked_for(cli: CommandLine, url: str) -> None:
    ended = cli("bench", "add_sub", "--url", url, "--slo", "p50=1ns", *QUICK, *SHAPES)
    assert ended.returncode == 2
    assert "'1ns' is not a time" in ended.stderr

    ended = cli("bench", "add_sub", "--url", url, "--slo", "p50=0.001us", *QUICK, *SHAPES)
    assert ended.returncode == 0, ended.stderr
    assert "no rate holds p50 0.001 µs" in ended.stdout


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Two servers are measured in turns, and their ratios are those of the pairs; an earlier "
    "result can be compared with.",
)
@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "A comparison shows both tables, and calls a ratio better or worse only if all windows agree.",
)
def test_two_servers_are_measured_in_turns(cli: CommandLine, kserve: Kserve) -> None:
    ended = cli(
        "bench", "add_sub", "--url", kserve.http.url, "--against", kserve.grpc.url,
        "--concurrency", "1", *QUICK, *SHAPES, "--save", ".",
    )  # fmt: skip

    report = json.loads((cli.folder / "add_sub.json").read_text())
    [point], [other] = report["series"], report["against"]["series"]
    assert report["against"]["where"] == kserve.grpc.url
    pairs = zip(point["windows"], other["windows"], strict=True)
    quotients = sorted(a["requests_per_s"] / b["requests_per_s"] for a, b in pairs)
    ratio = point["ratios"]["requests_per_s"]
    assert (ratio["least"], ratio["median"], ratio["most"]) == pytest.approx(quotients)
    # Both servers' tables come first, then the ratios.
    headings = [line for line in ended.stdout.splitlines() if line.endswith(":")]
    ours, theirs = kserve.http.url, kserve.grpc.url
    assert headings == [f"{ours}:", f"{theirs}:", f"{ours} over {theirs}:"]
    assert ended.stdout.count("queue µs") == 2
    assert re.search(r"\) (better|worse|alike)", ended.stdout)
    assert "the two differ" not in ended.stderr
    assert report["requests_digest"] == report["against"]["requests_digest"]


@pytest.mark.promise("Measuring (`moonpool bench`)", "Two servers are measured in turns, …")
def test_a_result_is_compared_with_an_earlier_one(cli: CommandLine, url: str) -> None:
    bench = ("bench", "add_sub", "--url", url, *QUICK, *SHAPES)
    cli(*bench, "--concurrency", "1", "--save", ".")
    ended = cli(*bench, "--concurrency", "1,2", "--against", "add_sub.json", "--save", "new")

    first, second = json.loads((cli.folder / "new" / "add_sub.json").read_text())["series"]
    assert first["ratios"].keys() == {"requests_per_s", "p50", "p99"}
    assert "ratios" not in second
    assert "not measured there" in ended.stdout


@pytest.mark.promise("Measuring (`moonpool bench`)", "Two servers that were measured in turns …")
def test_the_two_sides_of_one_result_are_compared(cli: CommandLine, kserve: Kserve) -> None:
    url = kserve.http.url
    bench = ("bench", "add_sub", "--url", url, "--concurrency", "1", *QUICK, *SHAPES, "--save")
    cli(*bench, "both", "--against", url)
    cli(*bench, "one")

    ended = cli("bench", "compare", "both/add_sub.json", "--fail-if", "failed>0")
    assert ended.returncode == 0, ended.stderr
    assert "3 pairs of windows in turns" in ended.stdout
    ended = cli("bench", "compare", "both/add_sub.json", "--fail-if", "requests_per_s>0")
    assert ended.returncode == 1
    ended = cli("bench", "compare", "one/add_sub.json")
    assert ended.returncode == 2
    assert "has one side" in ended.stderr


def test_a_model_in_process_is_compared_with_a_server(cli: CommandLine, kserve: Kserve) -> None:
    ended = cli("bench", MODELS, "add_sub", "--against", kserve.http.url, "--concurrency", "1", *QUICK)

    assert ended.returncode == 0, ended.stderr
    assert f"over {kserve.http.url}:" in ended.stdout


def test_a_stream_has_first_responses_and_later_ones(cli: CommandLine, kserve: Kserve) -> None:
    ended = cli(
        "bench", "repeat", "--url", kserve.grpc.url, "--streaming", "--input", "COUNT=[5]",
        "--concurrency", "2", *QUICK, "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((cli.folder / "repeat.json").read_text())["series"]
    assert point["responses"] == 5 * point["requests"]
    assert point["first_response_us"]["p50"] <= point["latency_us"]["max"]
    assert "first p50 µs" in ended.stdout


def test_requests_that_fail_are_told_by_the_server_s_words(cli: CommandLine, url: str) -> None:
    ended = cli("bench", "fails", "--url", url, "--concurrency", "1", *QUICK)

    assert ended.returncode == 1
    assert "no luck today" in ended.stderr


def test_a_header_goes_with_each_request(cli: CommandLine, url: str) -> None:
    ended = cli("bench", "add_sub", "--url", url, *QUICK, *SHAPES, "--header", "X-Secret=no")

    assert ended.returncode == 1
    assert "who are you?" in ended.stderr


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_where_there_is_no_server_it_is_said_at_once(cli: CommandLine, scheme: str) -> None:
    ended = cli("bench", "add_sub", "--url", f"{scheme}://127.0.0.1:1")

    assert ended.returncode == 1
    assert f"no server answers at {scheme}://127.0.0.1:1" in ended.stderr


def test_a_model_that_is_not_there_is_said(cli: CommandLine, url: str) -> None:
    ended = cli("bench", "nope", "--url", url)

    assert ended.returncode == 1
    assert "'nope'" in ended.stderr


@pytest.mark.promise("Measuring (`moonpool bench`)", "Options that do not fit together are refused.")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["m"], "say where the model is"),
        (["models", "m", "--url", "http://a"], "leave out the repository"),
        (["models", "m", "--streaming"], "--streaming needs --url"),
        (["models", "m", "--request-rate", "5"], "--request-rate needs --url"),
        (["m", "--url", "http://a", "--ca", "x"], "--ca needs https:// or grpcs://"),
        (["m", "--url", "https://a", "--client-key", "x"], "--client-key needs --client-cert"),
        (["m", "--url", "https://a", "--hosts", "ray"], "--hosts and --url do not go together"),
        (["models", "m", "--hosts", "moonpool,nowhere"], "--hosts must be some of moonpool,"),
        (["models", "m", "--hosts", "moonpool,triton", "--hang", "1%"], "--hang harms one host"),
        (["models", "m", "--hosts", "processpool", "--kill-every", "1s"], "--kill-every harms one"),
        (["models", "m", "--host-package", "torch"], "--host-package needs --hosts"),
        (["models", "m", "--hang", "2%@0"], "must hang for more than 0 s"),
        (["models", "m", "--hang", "1%", "--kill-every", "1"], "give one kind of fault"),
        (["models", "m", "--loadgen", "Server"], "needs --request-rate"),
        (["models", "m", "--loadgen", "Offline", "--slo", "p99=1ms"], "are for --loadgen Server"),
        (["models", "m", "--loadgen", "Offline", "--async"], "--loadgen and --async do not go"),
        (["compare", "a.json", "--fail-if", "p99"], "--fail-if"),
        (["m", "--url", "http://a", "--async"], "--async and --url do not go together"),
        (["m", "--url", "http://a", "--streaming", "--batch", "2"], "--batch and streams over HTTP"),
        (["m", "--url", "http://a", "--request-rate", "0"], "--request-rate must be numbers"),
        (["m", "--url", "http://a", "--request-rate", "1", "--concurrency", "1"], "give one kind"),
        (["m", "--url", "http://a", "--slo", "p99=1ms", "--against", "a"], "give --request-rate"),
        (["m", "--url", "http://a", "--slo", "p99"], "FIGURE=TIME"),
        (["models", "m", "--isolation", "off"], "two or more of off"),
        (["models", "m", "--isolation", "off,strict", "--sandbox", "off"], "and --sandbox do not go"),
        (["m", "--url", "http://a", "--isolation", "off,strict"], "--isolation and --url do not"),
        (["models", "m", "--kill-every", "1s", "--stop-every", "1s"], "give one kind of fault"),
        (["models", "m", "--kill-every", "soon"], "'soon' is not a time"),
        (["models", "m", "--kill-every", "0"], "must be more than 0"),
        (["models", "m", "--kill-every", "1", "--against", "a"], "faults are for one side"),
        (["models", "m", "--metrics-url", "http://a"], "--metrics-url needs --resources"),
        (["m", "--url", "http://a", "--export", "jsonl"], "--export needs --save"),
        (["m", "--url", "http://a", "--save", ".", "--export", "pdf"], "the formats are"),
        (["m", "--url", "http://a", "--sequences", "0"], "--sequences must be lengths"),
        (["m", "--url", "http://a", "--sequences", "3-1"], "--sequences must be lengths"),
        (["m", "--url", "http://a", "--cancel", "2"], "'2' is not a share"),
        (["m", "--url", "http://a", "--load-shape", "ramp"], "must be ramp:LOW-HIGH"),
        (["m", "--url", "http://a", "--load-shape", "periodic:1-2/9s"], "--seconds of at least 9"),
        (["m", "--url", "http://a", "--speed", "2"], "--speed needs"),
        (["m", "--url", "http://a", "--replay", "a", "--input-data", "b"], "give one source"),
        (["models", "m", "--cancel", "5%"], "--cancel needs --url"),
        (["m", "--url", "http://a", "--windows", "0"], "--windows must be more than 0"),
        (["m", "--url", "http://a", "--header", "x"], "--header must be NAME=VALUE"),
        (["m", "--url", "http://a", "--label", "a/b"], "--label must be letters"),
        (["m", "--url", "http://a", "--overwrite"], "--overwrite needs --save"),
        (["m", "--url", "http://a", "--warm-up", "nan"], "--warm-up must be 0 or more"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(cli: CommandLine, words: list[str], error: str) -> None:
    ended = cli("bench", *words)

    assert ended.returncode == 2
    assert error in ended.stderr


def test_a_file_to_compare_with_must_be_a_result(cli: CommandLine, kserve: Kserve) -> None:
    (cli.folder / "x.json").write_text("[]")

    ended = cli("bench", "add_sub", "--url", kserve.http.url, "--against", "x.json")
    assert "x.json is not a result" in ended.stderr
    ended = cli("bench", "add_sub", "--url", kserve.http.url, "--against", "y.json")
    assert "y.json" in ended.stderr
    assert ended.returncode == 1


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "The processes of the load generator end with the command, however that ends, and nothing "
    "stays registered at a server.",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_generator_ends_with_the_command(cli: CommandLine, kserve: Kserve, number: signal.Signals) -> None:
    command = cli.start(
        "bench", "add_sub", "--url", kserve.http.url, "--processes", "2", "--seconds", "20",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    workers = wait_until(lambda: len(found := children(command.pid)) == 2 and found, 60.0, "two processes")

    command.send_signal(number)
    command.wait(60)

    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers or ()),
        60.0,
        "the processes of the generator to end",
    )
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert command.returncode == codes[number]
