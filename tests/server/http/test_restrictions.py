"""Access over HTTP: headers for APIs, a token for changes, and no pages of strangers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.http.listening import Client
from tests.server.http.served import served
from tests.server.http.serving import Serving

from moonpool.runtime.server.restriction import Origins, Restriction

LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
TOKEN = {"Authorization": "Bearer s3cret"}


CHANGES = (
    "/v2/repository/models/other/load",
    "/v2/repository/models/other/unload",
    "/v2/systemsharedmemory/unregister",
    "/v2/cudasharedmemory/unregister",
    "/v2/systemsharedmemory/region/x/register",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/add_sub/trace/setting",
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Serving]:
    restricted = {"statistics": ("Admin-Key", "v"), "inference": ("infer-key", "w")}
    allowed = frozenset({"https://example.org"})
    with served("add_sub", restricted=restricted, control_token="s3cret", allowed_origins=allowed) as made:
        yield made


@pytest.mark.promise("HTTP", "Restricted APIs require their header, and changes require the token.")
def test_a_restricted_api_asks_for_its_header(guarded: Serving) -> None:
    path = "/v2/models/add_sub/stats"
    for headers in ({}, {"Admin-Key": "wrong"}, {"Admin-Key": ""}):
        reply = guarded.get(path, headers)
        assert (reply.status, reply.error) == (403, "This API is restricted, expecting header 'admin-key'")
        assert reply.headers["content-type"] == "text/plain"
    assert guarded.get(path, {"ADMIN-KEY": "v"}).status == 200
    assert guarded.get("/v2/health/live").status == 200


@pytest.mark.promise("HTTP", "A request line may name the whole URL, whose path and host count.")
def test_a_whole_url_is_what_its_path_is(guarded: Serving) -> None:
    def status(target: str, host: str = "localhost", headers: str = "") -> int:
        with Client(guarded.port) as client:
            client.send(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode())
            return client.answer().status

    url = f"http://localhost:{guarded.port}"
    assert status(f"{url}/v2/health/live") == 200
    assert status("HTTP://localhost/v2/health/live?x=http://a/b") == 200
    assert status(f"{url}/v2/models/add_sub/stats") == 403
    assert status(f"{url}/v2/models/add_sub/stats", headers="Admin-Key: v\r\n") == 200
    assert status(url) == status("/")
    assert status("ftp://localhost/v2/health/live") == 404
    # Only its host counts for requests of pages.
    assert status("http://evil.example/v2", headers="User-Agent: Mozilla/5.0\r\n") == 403
    assert status(f"{url}/v2", "evil.example", headers="User-Agent: Mozilla/5.0\r\n") == 200


@pytest.mark.promise("HTTP", "A request is refused if it …")
def test_a_header_that_stands_twice_is_not_the_one_that_is_asked_for(guarded: Serving) -> None:
    for values in (("wrong", "v"), ("v", "wrong")):
        lines = "".join(f"Admin-Key: {value}\r\n" for value in values)
        with Client(guarded.port) as client:
            client.send(f"GET /v2/models/add_sub/stats HTTP/1.1\r\n{lines}\r\n".encode())
            assert client.answer().status == 403


@pytest.mark.parametrize("what", ["infer", "generate", "generate_stream"])
def test_inference_may_be_restricted(guarded: Serving, what: str) -> None:
    path = f"/v2/models/add_sub/{what}"

    assert guarded.post(path, {}).status == 403
    assert guarded.post(path, {}, {"infer-key": "w"}).status in (400, 500)


@pytest.mark.promise("HTTP", "Restricted APIs require their header, and …")
@pytest.mark.parametrize("path", CHANGES)
def test_changes_ask_for_the_token(guarded: Serving, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
        reply = guarded.post(path, {}, headers)
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
    assert guarded.post(path, {"log_info": True}, TOKEN).status != 401


def test_reading_asks_for_no_token(guarded: Serving) -> None:
    assert guarded.post("/v2/repository/index").status == 200
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status"):
        assert guarded.get(path).status == 200


@pytest.mark.promise("HTTP", "A browser reaches a server on …")
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://[::1]:1", "Host": "[::1"},
        # An attacker's name stands for the loopback.
        {"Origin": "http://evil.example:8000", "Host": "evil.example:8000"},
        {"User-Agent": "Mozilla/5.0", "Host": "evil.example:8000"},
        {"User-Agent": "Mozilla/5.0", "Host": "127.0.0.1:80.evil.example"},
        {"User-Agent": "Mozilla/5.0", "Host": "127.0.0.1@evil.example"},
        {"User-Agent": "Mozilla/5.0", "Host": "127.0.0.1/evil.example"},
        {"User-Agent": "Mozilla/5.0", "Host": "localhost:80:80"},
        {"User-Agent": "Mozilla/5.0", "Host": "localhost:65536"},
        {"User-Agent": "Mozilla/5.0", "Host": "[::1%evil.example]:80"},
        {"User-Agent": "Mozilla/5.0", "Host": "[127.0.0.1]"},
        {"User-Agent": "Mozilla/5.0", "Host": "::1"},
        {"User-Agent": "Mozilla/5.0", "Host": ""},
        # The name of a page that may use the server is no proof that this page sent the request.
        {"Origin": "http://evil.example", "Host": "example.org"},
        {"Sec-Fetch-Site": "cross-site", "Host": "example.org"},
        # A link to something other than the page, and a form.
        LINK,
        {**LINK, "Origin": "http://evil.example"},
        {**LINK, "Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_a_stranger_is_refused(guarded: Serving, headers: dict[str, str]) -> None:
    asked = [(method, "/v2", guarded.port) for method in ("GET", "POST", "OPTIONS")]
    for method, path, port in (*asked, ("GET", "/metrics", guarded.server.ports["metrics"])):
        reply = guarded.ask(method, path, b"", headers, port)
        assert (reply.status, reply.error) == (403, "requests from pages of other origins are refused")
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.promise("HTTP", "A request whose body has a …")
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"User-Agent": "Mozilla/5.0"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:1", "Host": "localhost:1"},
        {"Sec-Fetch-Site": "none"},
        {"User-Agent": "Mozilla/5.0", "Host": "[::1]:8000"},
        {"User-Agent": "Mozilla/5.0", "Host": "models.localhost:8000"},
        # A proxy passes the name on.
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://example.org", "Host": "example.org"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://example.org"},
        {"Host": "gpu-box:8000"},
    ],
)
def test_programs_and_the_server_s_own_page_are_not(guarded: Serving, headers: dict[str, str]) -> None:
    assert guarded.get("/v2", headers).status == 200
    assert guarded.ask("GET", "/metrics", b"", headers, guarded.server.ports["metrics"]).status == 200


@pytest.mark.promise("HTTP", "A link on another site opens …")
def test_a_link_on_another_site_opens_the_page_and_nothing_else(guarded: Serving) -> None:
    assert guarded.get("/", LINK).status == guarded.ask("HEAD", "/", b"", LINK).status == 200
    assert guarded.post("/", b"", LINK).status == 403
    assert guarded.get("/", {**LINK, "Sec-Fetch-Dest": "iframe"}).status == 403
    assert guarded.get("/v2/moonpool/overview", LINK).status == 403


@pytest.mark.promise(
    "HTTP", "A request whose body has a type that HTML forms can send changes nothing. Programs are not affected."
)
@pytest.mark.parametrize(
    ("content_type", "headers"),
    [
        ("text/plain", {}),
        ("Text/Plain; charset=UTF-8", {}),
        ("multipart/form-data; boundary=x", {}),
        # Programs made with libcurl send this type with every body.
        ("application/x-www-form-urlencoded", {"User-Agent": "Mozilla/5.0"}),
        ("application/x-www-form-urlencoded", {"Sec-Fetch-Site": "same-origin"}),
    ],
)
def test_requests_that_a_form_can_send_change_nothing(
    guarded: Serving, content_type: str, headers: dict[str, str]
) -> None:
    sent = {"Content-Type": content_type, **TOKEN, **headers}
    for path in CHANGES:
        reply = guarded.post(path, {"log_verbose_level": 3}, sent)
        assert reply.status == 415
        assert "send application/json" in reply.error
    assert guarded.get("/v2/logging").value["log_verbose_level"] == 0


@pytest.mark.promise("HTTP", "A request whose body has a …")
@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded", ""])
def test_changes_are_taken_from_programs(guarded: Serving, content_type: str) -> None:
    sent = {**TOKEN, **({"Content-Type": content_type} if content_type else {})}

    assert guarded.post("/v2/logging", {"log_info": True}, sent).status == 200


def test_a_restriction_that_makes_no_sense_is_none() -> None:
    with pytest.raises(ValueError, match="unknown API 'nope'"):
        Restriction({"nope": ("a", "b")})
    with pytest.raises(ValueError, match="token is empty"):
        Restriction(control_token=" ")
    for origin in ("example.org", "https://example.org/", "null", "https://a b", "ftp://a.org"):
        with pytest.raises(ValueError, match="is not an origin"):
            Origins([origin])


def test_other_machines_may_call_a_server_by_any_name() -> None:
    given = {"user-agent": "Mozilla/5.0", "host": "gpu-box:8000", "origin": "http://gpu-box:8000"}

    assert Origins(is_loopback=True).is_foreign(given.get)
    assert not Origins().is_foreign(given.get)
