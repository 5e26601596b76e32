"""Paths that people and tools try first: a list of the models, the page, and where the metrics are."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from tests.server.repositories import write
from tests.server.running import RunningServer, running, starting

pytestmark = pytest.mark.promise(
    "HTTP",
    "`GET /v2/models` lists the models that are ready, `/docs` leads to the page, and "
    "`/metrics` to the port for metrics.",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "two")
    write(repository, "one")
    write(repository, "bad", "raise ValueError('boom')\n")
    with running(repository, "--exit-on-error=false") as started:
        yield started


def get(server: RunningServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, str]:
    """Return status, Location and text of an answer."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.getheader("location", ""), answer.read().decode()
    finally:
        connection.close()


def test_the_models_that_are_ready_are_listed(server: RunningServer) -> None:
    assert server.get("/v2/models") == (200, {"models": ["one", "two"]})
    assert get(server, "/v2/models", "POST")[0] == 405


def test_docs_lead_to_the_page(server: RunningServer) -> None:
    assert get(server, "/docs")[:2] == (307, "./")
    # Browsers follow it like this.
    status, page = server.get("/docs")
    assert (status, page[:15].lower()) == (200, "<!doctype html>")


def test_metrics_are_said_to_be_at_their_port(server: RunningServer) -> None:
    url = f"http://127.0.0.1:{server.ports['metrics']}/metrics"

    assert get(server, "/metrics") == (307, url, f"The metrics of this server are at {url}.\n")
    status, text = server.get("/metrics")
    assert status == 200
    assert "nv_inference_request_success" in text


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("localhost:8000", "localhost"),
        ("[::1]:8000", "[::1]"),
        ("models.example.org", "models.example.org"),
        ("x/../?", "localhost"),
        ("a@b", "localhost"),
    ],
)
def test_the_place_is_where_the_client_came_to(server: RunningServer, host: str, place: str) -> None:
    assert get(server, "/metrics", host=host)[1] == (f"http://{place}:{server.ports['metrics']}/metrics")


@pytest.mark.parametrize("path", ["/docs", "/metrics"])
def test_they_only_tell(server: RunningServer, path: str) -> None:
    assert get(server, path, "POST")[0] == 405


def test_a_server_without_metrics_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with starting(tmp_path_factory.mktemp("none"), "--allow-metrics=false") as server:
        server.wait_for("Started HTTPService")
        assert server.get("/metrics") == (404, "This server serves no metrics: see --allow-metrics.\n")


def test_metrics_that_listen_at_another_address_are_said_to_be_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("none"), "--http-address=0.0.0.0", "--metrics-address=127.0.0.1") as server:
        host = f"{socket.gethostname()}:8000".replace("_", "-")
        assert get(server, "/metrics", host=host)[1] == (f"http://127.0.0.1:{server.ports['metrics']}/metrics")
