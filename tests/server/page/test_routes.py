"""The routes of the page and of its data over HTTP."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.page.models import write
from tests.server.page.site import Site
from tests.server.running import running
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run a server without models."""
    with running(tmp_path_factory.mktemp("models")) as server:
        yield Site(server)


def get(site: Site, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(site.server.http, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.promise("The overview", "The page at `/` runs in …")
def test_the_page_may_run_and_load_what_is_in_it_and_nothing_else(site: Site) -> None:
    status, headers, text = get(site, "/")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))

    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_names_no_other_host(site: Site) -> None:
    text = get(site, "/")[2]
    names = set(re.findall(r"https?://[^\s'\"`]+", text))

    # Names of vocabularies, which nobody asks for.
    assert {name for name in names if not name.startswith("http://www.w3.org/")} == set()


def test_the_overview_is_json_that_nobody_keeps(site: Site) -> None:
    status, headers, text = get(site, "/v2/moonpool/overview?since=0")
    shown = json.loads(text)

    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["cache-control"] == "no-store"
    assert shown["server"]["name"] == "moonpool"
    assert shown["models"] == []
    assert "" in shown["history"]["series"]
    assert "history" not in json.loads(get(site, "/v2/moonpool/overview")[2])


@pytest.mark.parametrize("since", ["", "-1", "x", "1e3", "9" * 40])
def test_a_number_of_samples_that_is_none_is_refused(site: Site, since: str) -> None:
    status, _, text = get(site, f"/v2/moonpool/overview?since={since}")

    assert status == 400
    assert "since must be" in json.loads(text)["error"]


def test_figures_from_before_the_first_look_are_shown(tmp_path: Path) -> None:
    with running(write(tmp_path, "large_numbers")) as server:
        site = Site(server)
        for _ in range(3):
            assert site.infer("large_numbers", {"X": ("INT64", [1], [1])}) == 200

        def requests() -> int:
            return sum(site.overview()["history"]["series"]["large_numbers:1"]["requests"])

        wait_until(lambda: requests() == 3)
        assert site.overview()["server"]["addresses"].keys() == {"grpc", "http", "metrics"}


def test_a_client_without_access_to_statistics_sees_no_overview(tmp_path: Path) -> None:
    with running(tmp_path, "--http-restricted-api=statistics:key=secret") as server:
        status, shown = server.get("/v2/moonpool/overview")

    assert status == 403
    assert "restricted" in str(shown)


@pytest.mark.parametrize("path", ["/", "/v2/moonpool/overview"])
def test_nothing_can_be_written(site: Site, path: str) -> None:
    assert get(site, path, "POST")[0] == 405
