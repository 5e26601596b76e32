"""Models that clients of OpenAI's API list, load and unload, and the port for this API alone."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.http.serving import TIMEOUT_S, Reply, Serving

import moonpool

WRITER = Path(__file__).parents[2] / "models" / "writer.py"
CHAT = "/v1/chat/completions"
ASKED = {"model": "writer", "messages": [{"role": "user", "content": "hello"}]}
ENDPOINTS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/models/writer/load", "/v1/models/writer/unload")


@contextlib.contextmanager
def serving_from(folder: Path, **options: Any) -> Iterator[Serving]:
    """Serve a repository with the models `writer` and `other`, of which none is loaded."""
    for name in ("writer", "other"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(WRITER.read_text())
    with (
        moonpool.Runtime(folder, models=()) as runtime,
        Serving(runtime, **{"port": None, "openai_port": 0, **options}) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_from(tmp_path_factory.mktemp("models")) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_models(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "serving" in request.fixturenames:
        made: Serving = request.getfixturevalue("serving")
        for name in ("writer", "other"):
            made.post(f"/v1/models/{name}/unload")


def listed(serving: Serving) -> list[str]:
    return [each["id"] for each in serving.get("/v1/models").value["data"]]


def change(serving: Serving, what: str, name: str = "writer", headers: dict[str, str] | None = None) -> Reply:
    return serving.post(f"/v1/models/{name}/{what}", b"", headers)


def test_a_version_is_shown_as_requests_name_it(serving: Serving) -> None:
    assert change(serving, "load").status == 200

    assert serving.get("/v1/models/writer:1").value["id"] == "writer:1"
    assert serving.get("/v1/models/writer:2").status == 404
    assert serving.get("/v1/models/writer:x").value["error"]["code"] == "model_not_found"


@pytest.mark.promise("OpenAI", "`/v1/models/{model}/load` and `/unload` load and unload, and say what was wrong.")
def test_a_model_is_loaded_and_unloaded(serving: Serving) -> None:
    assert listed(serving) == []
    assert serving.post(CHAT, ASKED).value["detail"] == "Unknown model: writer"

    for _ in range(2):
        loaded = change(serving, "load")
        assert (loaded.status, loaded.value["id"]) == (200, "writer")
        assert loaded.value["owned_by"] == "Triton Inference Server"
        assert listed(serving) == ["writer"]
        assert serving.post(CHAT, ASKED).status == 200

        again = change(serving, "load")
        assert (again.status, again.value["detail"]) == (400, "Model 'writer' is already loaded")

        unloaded = change(serving, "unload")
        assert (unloaded.status, unloaded.value) == (200, {"status": "success", "model": "writer"})
        assert listed(serving) == []
        asked = serving.post(CHAT, ASKED)
        assert (asked.status, asked.value["detail"]) == (400, "Unknown model: writer")
        assert change(serving, "unload").value["detail"] == "Unknown model: writer"


def test_a_model_that_is_nowhere(serving: Serving) -> None:
    loaded, unloaded = change(serving, "load", "nobody"), change(serving, "unload", "nobody")

    assert loaded.status == 500
    assert "failed to poll from model repository" in loaded.value["detail"]
    assert (unloaded.status, unloaded.value["error"]["code"]) == (400, "model_not_found")


@pytest.mark.parametrize("what", ["load", "unload"])
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("../../etc", 404),
        ("model/..", 404),
        ("/etc/passwd", 404),
        ("model/", 404),
        ("", 404),
        ("..", 400),
        ("%2e%2e", 400),
        ("%20%20", 400),
        ("%0A%09", 400),
        ("a%2Fb", 400),
    ],
)
def test_names_that_no_model_can_have(serving: Serving, what: str, name: str, status: int) -> None:
    assert change(serving, what, name).status == status


@pytest.mark.promise("OpenAI", "Of requests that load or unload one model at once, one succeeds.")
@pytest.mark.parametrize("what", ["load", "unload"])
def test_of_many_at_once_one_succeeds(serving: Serving, what: str) -> None:
    names = ["writer", "other"]
    if what == "unload":
        assert [change(serving, "load", name).status for name in names] == [200, 200]

    with ThreadPoolExecutor(10) as pool:
        codes = sorted(pool.map(lambda name: change(serving, what, name).status, names * 5))

    assert codes == [200] * 2 + [400] * 8
    assert listed(serving) == (sorted(names) if what == "load" else [])


def test_a_mixture_of_both_leaves_the_server_ready(serving: Serving) -> None:
    asked = [(what, name) for what in ("load", "unload") for name in ("writer", "other")] * 4

    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(lambda each: change(serving, *each).status, asked))

    assert codes <= {200, 400}
    assert serving.get("/health/ready").status == 200


def test_a_server_that_changes_no_models(tmp_path: Path) -> None:
    with serving_from(tmp_path) as serving:
        serving.service.models.refuses_control = "no"
        for what in ("load", "unload"):
            reply = change(serving, what)
            text = "Model load/unload requires --model-control-mode=explicit"
            assert (reply.status, reply.value["detail"]) == (400, text)


@pytest.mark.promise("OpenAI", "Loading and unloading ask for the token of `--control-token-file`.")
def test_changes_ask_for_the_token_and_are_not_a_page_s(tmp_path: Path) -> None:
    token = {"Authorization": "Bearer s3cret"}
    with serving_from(tmp_path, control_token="s3cret", port=0) as serving:
        for port in serving.server.ports["http"], serving.server.ports["openai"]:
            for what in ("load", "unload"):
                path = f"/v1/models/writer/{what}"
                refused = serving.ask("POST", path, b"", {}, port)
                assert (refused.status, refused.value["error"]["code"]) == (401, "invalid_auth")
                assert refused.headers["www-authenticate"] == "Bearer"
                form = serving.ask("POST", path, b"", {**token, "Content-Type": "text/plain"}, port)
                assert (form.status, form.value["error"]["type"]) == (415, "invalid_request_error")
                foreign = serving.ask("POST", path, b"", {**token, "Origin": "http://evil.example"}, port)
                assert (foreign.status, foreign.value["error"]["type"]) == (403, "permission_error")
                assert serving.ask("POST", path, b"", token, port).status == 200
            assert serving.ask("GET", "/v1/models", b"", {}, port).status == 200


# The port


@pytest.mark.promise("OpenAI", "`--openai-port` serves this API alone, with `/health/ready` and `/metrics`.")
def test_the_port_has_this_api_alone(serving: Serving) -> None:
    assert serving.get("/does-not-exist").status == 404
    assert serving.get("/does-not-exist").value["error"]["type"] == "invalid_request_error"
    for path in ("/", "/v2", "/v2/health/live", "/v2/models/writer/infer", "/v2/repository/index", "/docs"):
        assert (serving.get(path).status, serving.post(path, {}).status) == (404, 404), path
    ready = serving.get("/health/ready")
    assert (ready.status, ready.body) == (200, b"")
    assert "nv_cpu_utilization" in serving.get("/metrics").body.decode()


def test_a_server_that_is_not_ready_says_so(serving: Serving) -> None:
    serving.service.metadata.is_open = False
    try:
        assert serving.get("/health/ready").status == 400
    finally:
        serving.service.metadata.is_open = True


# Restrictions


@pytest.mark.promise("OpenAI", "`--openai-restricted-api` refuses requests without the header of their group.")
def test_groups_ask_for_their_headers(tmp_path: Path) -> None:
    restricted = {"inference": ("Authorization", "Bearer k"), "model-repository": ("admin-key", "v")}
    right: dict[str, dict[str, str]] = {
        "inference": {"Authorization": "Bearer k"},
        "model-repository": {"Admin-Key": "v"},
    }
    asked = {
        "inference": [("POST", path) for path in (*ENDPOINTS[:3], "/v1/rerank", "/v2/rerank", "/rerank")],
        "model-repository": [
            ("GET", "/v1/models"),
            ("GET", "/v1/models/writer"),
            *(("POST", p) for p in ENDPOINTS[3:]),
        ],
    }
    with serving_from(tmp_path, openai_restricted=restricted, port=0) as serving:
        for port in serving.server.ports["http"], serving.server.ports["openai"]:
            for group, requests in asked.items():
                other = next(each for each in right if each != group)
                for headers in ({}, right[other], {"Admin-Key": "w", "Authorization": "Bearer"}):
                    for method, path in requests:
                        reply = serving.ask(method, path, b"{}", headers, port)
                        error = reply.value["error"]
                        assert (reply.status, error["type"], error["code"]) == (
                            401,
                            "authentication_error",
                            "invalid_auth",
                        )
                        assert "expecting header" in error["message"]
                for method, path in requests:
                    assert serving.ask(method, path, b"{}", right[group], port).status != 401
        for path in ("/health/ready", "/metrics"):
            assert serving.ask("GET", path, b"", {}, serving.server.ports["openai"]).status == 200


def test_health_and_metrics_may_be_restricted(tmp_path: Path) -> None:
    restricted = {"health": ("a", "b"), "metrics": ("a", "b")}
    with serving_from(tmp_path, openai_restricted=restricted) as serving:
        for path in ("/health/ready", "/metrics"):
            assert (serving.get(path).status, serving.get(path, {"a": "b"}).status) == (401, 200)
        assert serving.get("/v1/models").status == 200


# Sizes


@pytest.mark.promise("OpenAI", "A body over the limit is refused with 413, by its length and by its chunks.")
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_body_over_the_limit_is_refused(serving: Serving, path: str) -> None:
    limit = 64 << 20
    text = (
        f"Request size of {limit + 1} bytes exceeds the maximum allowed input size of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
    for head in (f"Content-Length: {limit + 1}\r\n\r\n", f"Transfer-Encoding: chunked\r\n\r\n{limit + 1:x}\r\n"):
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}".encode())
            answer = http.client.HTTPResponse(connection.sock)
            answer.begin()
            reply = Reply(answer.status, {}, answer.read())
        assert (reply.status, reply.value.keys()) == (413, {"error"})
        error = reply.value["error"]
        assert (error["message"], error["type"], error["code"]) == (text, "invalid_request_error", "content_too_large")
    assert serving.get(path).status == 405


def test_a_body_at_the_limit_is_read(serving: Serving) -> None:
    reply = serving.post(CHAT, b"x" * (64 << 20))

    assert (reply.status, reply.value["error"]["type"]) == (400, "invalid_request_error")
