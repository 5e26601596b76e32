"""`moonpool conformance` compares any server with what a tritonserver answered."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path

import pytest
from tests.runtime.cli.shell import CommandLine
from tests.server.running import running

from moonpool.runtime.cli.conformance import LOADED
from moonpool.runtime.conformance import openai

pytest.importorskip("grpc")


@pytest.fixture
def repository(cli: CommandLine) -> Path:
    assert cli("conformance", "--models", "repository").returncode == 0
    return cli.folder / "repository"


def test_a_server_is_compared_over_both_protocols(cli: CommandLine, repository: Path) -> None:
    said = cli("conformance", "--models", "another").stdout.splitlines()[1]
    options = [each for each in shlex.split(said)[2:] if not each.startswith("--model-repository")]
    with running(repository, *options) as server:
        addresses = [f"http://localhost:{server.ports['http']}", "--grpc", f"localhost:{server.ports['grpc']}"]

        ended = cli("conformance", *addresses, "--json", "found.json", "--details")

    rows = [
        line.rsplit(maxsplit=4) for line in ended.stdout.splitlines() if not line.startswith((" ", "differs", "fails"))
    ]
    counts = {row[0].strip(): list(map(int, row[1:])) for row in rows[1:]}
    requests, same, differs, fails = counts["all"]
    assert requests > 900
    assert same + differs + fails == requests
    # Those that PROTOCOL_DIFFERENCES tells.
    assert same > 0.85 * requests
    assert counts["sequences            HTTP"] == [5, 5, 0, 0]
    assert counts["streams              gRPC"][2:] == [0, 0]
    assert ended.returncode == (1 if fails else 0)
    outcomes = json.loads((cli.folder / "found.json").read_text())
    assert len(outcomes) == requests
    assert sum(each["verdict"] == "fails" for each in outcomes) == fails
    assert f"fails: {next(each['name'] for each in outcomes if each['verdict'] == 'fails')}"[7:] in ended.stdout
    assert not Path("/dev/shm/moonpool_conformance").exists()


def test_only_one_extension_is_asked_for(cli: CommandLine, repository: Path) -> None:
    options = ["--model-control-mode=explicit"]
    options += [f"--load-model={name}" for name in LOADED]
    with running(repository, *options) as server:
        ended = cli("conformance", f"http://localhost:{server.ports['http']}", "--only", "sequences")

    assert ended.returncode == 0
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["extension", "sequences", "all"]


def test_a_server_without_the_models_is_told_so(cli: CommandLine, repository: Path) -> None:
    with running(repository, "--model-control-mode=explicit", "--load-model=add_sub") as server:
        ended = cli("conformance", f"http://localhost:{server.ports['http']}")

    assert ended.returncode == 1
    assert "has not loaded batched, every, fails" in ended.stderr
    assert "--models FOLDER" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "say where the server is"),
        (["http://localhost:1", "--only", "nothing"], "there are no requests for 'nothing', but for binary data"),
        (["grpc://localhost:1"], "URL is http://HOST:PORT"),
        (["--models", "."], "is there already"),
    ],
)
def test_a_wrong_command_line_is_refused(cli: CommandLine, arguments: list[str], told: str) -> None:
    ended = cli("conformance", *arguments)

    assert ended.returncode == 2
    assert told in ended.stderr


def test_nobody_answers(cli: CommandLine) -> None:
    ended = cli("conformance", "http://localhost:1")

    assert ended.returncode == 1
    assert "nobody answers over HTTP at localhost:1" in ended.stderr


TALKER = """
import numpy as np

from moonpool.openai import Delta, Usage


class Talker:
    def chat(self, request):
        yield from self.say(request)

    def complete(self, request):
        if request.get("echo"):
            yield request.prompt
        yield from self.say(request)

    def say(self, request):
        words = ["once ", "upon ", "a ", "time"][: request.max_tokens]
        for index in range(request.choices):
            yield from (Delta(word, index=index) for word in words)
        yield Usage(3, len(words) * request.choices)

    def embed(self, texts):
        return np.ones((len(texts), 4), np.float32), [len(text) for text in texts]
"""


def test_a_server_of_openai_s_api_is_held_against_its_reference(cli: CommandLine) -> None:
    (cli.folder / "models" / "talker" / "1").mkdir(parents=True)
    (cli.folder / "models" / "talker" / "1" / "model.py").write_text(TALKER)
    with running(cli.folder / "models") as server:
        address = f"http://localhost:{server.ports['http']}"
        models = ["--chat", "talker", "--completions", "talker", "--embeddings", "talker"]
        ended = cli("conformance", address, *models, "--json", "found.json")
        nobody = cli("conformance", address, "--chat", "talker", "--only", "embeddings")

    outcomes = json.loads((cli.folder / "found.json").read_text())
    assert len(outcomes) > 70
    # docs/site/CONFORMANCE.md says why.
    others = {(each["verdict"], each["name"]) for each in outcomes if each["verdict"] != "same"}
    assert others == {
        ("fails", "an unknown role"),
        ("fails", '{"stop": ["a", "b", "c", "d", "e"]}'),
        ("differs", "an unknown model"),
        ("differs", "a stream of an unknown model"),
    }
    assert ended.returncode == 1
    assert "there are no requests for 'embeddings', but for chat, models" in nobody.stderr


def test_nobody_answers_as_openai(cli: CommandLine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ended = cli("conformance", f"http://127.0.0.1:{taken.getsockname()[1]}", "--chat", "m")

    assert ended.returncode == 1
    assert "nobody answers over HTTP" in ended.stderr


@pytest.mark.parametrize(
    ("value", "form", "found"),
    [
        ({"a": 1, "more": 2}, {"a": int}, []),
        ({"a": True}, {"a": int}, ["a is True, no int"]),
        ({}, {"a": int, "b?": str}, ["a is missing"]),
        ({"a": [{"b": 1}, {"b": "x"}]}, {"a": [{"b": int}]}, ["a[1].b is 'x', no int"]),
        ({"a": []}, {"a": [int]}, ["a is []"]),
        ({"a": 1}, {"a": (str, None)}, ["a is 1"]),
        ({"a": "list"}, {"a": "text"}, ["a is 'list', not 'text'"]),
        ([], {"a": int}, ["the body is [], no object"]),
    ],
)
def test_what_differs_from_a_form_is_named_by_its_place(value: object, form: object, found: list[str]) -> None:
    assert [*openai.wrong(value, form)] == found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"data: {}\n\n", "does not end with"),
        (b"data: {}\n\ndata: [DONE]\n\nmore", "does not end with"),
        (b"event: x\n\ndata: [DONE]\n\n", "not data"),
        (b"", "not enough values"),
    ],
)
def test_what_is_no_stream_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        openai._events(body)
