"""`moonpool bench --openai`: a model behind OpenAI's API."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.cli.shell import CommandLine
from tests.server.running import RunningServer, running

WRITER = Path(__file__).parents[2] / "models" / "writer.py"
QUICK = ("--seconds", "0.05", "--warm-up", "0", "--windows", "3", "--save", ".", "--overwrite")
ONE_TWO_THREE = '{"role": "user", "content": "one two three"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("openai") / "models" / "writer" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(WRITER.read_text())
    with running(folder.parents[1]) as found:
        yield found


def series(cli: CommandLine, server: RunningServer, *options: str) -> list[dict[str, Any]]:
    """Measure the model; return the points."""
    ended = cli("bench", "writer", "--url", f"http://{server.http}", *options, *QUICK)
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads((cli.folder / "writer.json").read_text())["series"]
    return found


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Chats and completions of OpenAI's API are measured by their pieces: the time to the first one, between two, and "
    "pieces a second.",
)
def test_pieces_of_a_chat_are_counted_and_timed(cli: CommandLine, server: RunningServer) -> None:
    points = series(cli, server, "--openai", "--concurrency", "1,2", "--input", f"messages=[{ONE_TWO_THREE}]")

    for point in points:
        # Neither the role nor the end of a stream is a piece.
        assert point["responses"] == 3 * point["requests"] > 0
        assert point["failed"] == 0
        assert point["first_response_us"]["p50"] <= point["latency_us"]["p50"]
        assert point["between_responses_us"]["p50"] is not None
        assert point["server"]["requests"] == point["requests"]
    rows = list(csv.DictReader(io.StringIO((cli.folder / "writer.csv").read_text())))
    assert [row["concurrency"] for row in rows] == ["1", "2"]
    assert all(float(row["first_response_p99_us"]) > 0 for row in rows)


@pytest.mark.promise("Measuring (`moonpool bench`)", "Chats and completions of OpenAI's API are …")
def test_completions_come_at_a_rate(cli: CommandLine, server: RunningServer) -> None:
    [point] = series(cli, server, "--openai", "completions", "--request-rate", "100", "--distribution", "constant")

    assert point["requests"] + point["unsent"] == 15
    assert point["responses"] == point["requests"]


@pytest.mark.promise("Measuring (`moonpool bench`)", "Embeddings of OpenAI's API are measured, too.")
def test_embeddings_are_no_streams(cli: CommandLine, server: RunningServer) -> None:
    [point] = series(cli, server, "--openai", "embeddings", "--concurrency", "4", "--input", 'input=["a", "b"]')

    assert point["requests"] > 0
    assert "responses" not in point
    assert point["rows_per_batch"] >= 2


def test_requests_come_from_files_by_weight(cli: CommandLine, server: RunningServer) -> None:
    for name, texts in {"short": ["a"], "long": ["a b", "a b c d e"]}.items():
        data = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        (cli.folder / f"{name}.json").write_text(json.dumps({"data": data}))

    files = ("--input-data", "short.json=3", "--input-data", "long.json=1")
    [point] = series(cli, server, "--openai", "--concurrency", "1", *files)

    report = json.loads((cli.folder / "writer.json").read_text())
    assert (report["different_requests"], report["openai"]) == (3, "chat")
    assert point["requests"] < point["responses"] < 3 * point["requests"]


@pytest.mark.parametrize(
    ("said", "error"),
    [("raises", "HTTP 500: model 'writer' failed to answer"), ("breaks", "model 'writer' failed to answer")],
)
def test_errors_before_and_in_a_stream_are_failures(
    cli: CommandLine, server: RunningServer, said: str, error: str
) -> None:
    message = json.dumps([{"role": "user", "content": said}])
    ended = cli(
        "bench", "writer", "--url", f"http://{server.http}", "--openai", "--concurrency", "1",
        "--input", f"messages={message}", *QUICK,
    )  # fmt: skip

    assert ended.returncode == 1
    assert f"requests failed, most often with: {error}" in ended.stderr
    [point] = json.loads((cli.folder / "writer.json").read_text())["series"]
    assert point["failed"] > 0
    assert point["requests"] == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--url", "grpc://localhost:1"], "--openai needs http:// or https://"),
        (["--url", "http://localhost:1", "--streaming"], "--openai and --streaming do not go together"),
        (["--url", "http://localhost:1", "--input-data", "data.json"], "data.json, entry 1 is not an object"),
    ],
)
def test_what_does_not_fit_is_refused(cli: CommandLine, options: list[str], error: str) -> None:
    (cli.folder / "data.json").write_text('{"data": [{}, 3]}')

    ended = cli("bench", "writer", "--openai", *options)

    assert ended.returncode != 0
    assert error in ended.stderr
