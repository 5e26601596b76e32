"""Tests that the examples of the page on embedding programs run, and that its tables are true."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool import errors
from moonpool.ipc.errors import HTTP_STATUSES
from moonpool.runtime.errors import BackendError
from moonpool.runtime.server.grpc.status import status_of

PAGE = Path(__file__).parents[2] / "docs" / "EMBEDDING.md"
SOURCE = Path(moonpool.__path__[0]).parent
PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not in the wheel"),
    pytest.mark.promise(
        "The package", "The examples on the page for programs of one's own run, and its tables are true."
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page."""
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_ways_to_ask_are_as_shown(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "ask.py"],
        cwd=folder,
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    threes = [[[float(number)] * 3] for number in (0, 2, 4)]
    assert ended.stdout.splitlines() == ["[[2. 2. 2.]]", str(threes), "[[2. 2. 2.]]"], ended.stderr


@contextlib.contextmanager
def imported(folder: Path, name: str) -> Iterator[Any]:
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


async def asked(app: Any, *bodies: object) -> list[tuple[int, Any]]:
    """Start an application of ASGI, send it requests, end it, and return the status and the JSON of each response."""
    told: asyncio.Queue[str] = asyncio.Queue()
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def say(message: Any) -> None:
        await told.put(message["type"])

    living = asyncio.ensure_future(app({"type": "lifespan", "asgi": {}, "state": {}}, events.get, say))
    await events.put({"type": "lifespan.startup"})
    assert await told.get() == "lifespan.startup.complete"
    answers = []
    for body in bodies:
        sent: list[dict[str, Any]] = []

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        async def receive(body: object = body) -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/scale",
            "raw_path": b"/scale",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "root_path": "",
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("localhost", 1),
            "http_version": "1.1",
            "asgi": {},
        }
        await app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent[1:])
        answers.append((sent[0]["status"], json.loads(text)))
    await events.put({"type": "lifespan.shutdown"})
    assert await told.get() == "lifespan.shutdown.complete"
    await living
    return answers


def test_the_application_of_fastapi_serves(folder: Path) -> None:
    pytest.importorskip("fastapi")
    with imported(folder, "app") as module:
        good, bad = asyncio.run(asked(module.app, [[1, 2, 3]], [[1, 2]]))

    assert good == (200, [[2, 4, 6]])
    assert bad[0] == 400
    assert "unexpected shape for input 'X'" in bad[1]["error"]


def rows(first: str) -> dict[str, list[str]]:
    """Return the rows of the table whose first column has this heading, by their first cells."""
    table = PAGE.read_text().split(f"| {first} |", 1)[1].split("\n\n", 1)[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {name.strip("`"): rest for name, *rest in cells}


def test_the_table_of_codes_is_what_the_server_answers() -> None:
    table = rows("`error.code`")

    assert {code: int(row[0]) for code, row in table.items()} == HTTP_STATUSES
    for code, row in table.items():
        error = errors.ModelError("no", code)
        assert (error.http_status, status_of(error).code) == (int(row[0]), row[1].strip("`"))


def test_the_table_of_faults_has_every_public_error() -> None:
    shown = {
        name: fault
        for fault, row in rows("`error.fault`").items()
        for name in re.findall(r"`([A-Z]\w+)`", row[1].split(";")[0])
    }
    found = {}
    for name in errors.__all__:
        kind = getattr(errors, name)
        found[name] = kind.__new__(kind).fault
        assert kind.__module__ == "moonpool"

    assert shown == found
    assert BackendError("no").fault == "backend"
    assert errors.ModelError("no", "INVALID_ARG").fault == "model"
