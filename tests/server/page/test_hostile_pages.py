"""Pages of other origins in a real browser, which send all that a browser allows to every route of the server."""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.certificates import self_signed
from tests.server.page.browser import ATTACKER, Page, needs_chromium
from tests.server.page.models import write
from tests.server.page.site import Site
from tests.server.running import running
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.server.http.control import control_routes, page_routes
from moonpool.runtime.server.service import Service

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.timeout(180)]

Tab = Callable[..., Page]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
# This would run as the server's user if a page could load it.
PAYLOAD = b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
CHANGES: dict[str, dict[str, Any]] = {
    "load": {"parameters": {"config": "{}", "file:1/model.py": base64.b64encode(PAYLOAD).decode()}},
    "unload": {"parameters": {"unload_dependents": True}},
    "register": {"key": "/moonpool-attack", "byte_size": 8},
    "setting": {"trace_rate": "7"},
    "logging": {"log_verbose_level": 5},
    "infer": {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]} for name in ("INPUT0", "INPUT1")
        ]
    },
    "generate": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 2, 3, 4]},
}


class Attacker(BaseHTTPRequestHandler):
    """Run a site of empty pages, in which tests run their scripts."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        self.send_response(200)
        page = b"<!doctype html><title>attacker</title><link rel=icon href='data:,'>"
        if "reports" in query:
            # The browser reports the style to the server, in JSON.
            policy = f"style-src 'none'; report-uri {query['reports'][0]}"
            self.send_header("Content-Security-Policy", policy)
            page += b"<style>p { color: red }</style>"
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        """Send a form on to the server, with its body."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(307)
        self.send_header("Location", parse_qs(urlsplit(self.path).query)["to"][0])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def attacker_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Attacker) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def paths() -> list[str]:
    """Return every path of the server."""
    with moonpool.Runtime() as runtime, ThreadPoolExecutor(1) as executor:
        service = Service(runtime)
        made = [*control_routes(service, executor), *page_routes(service.overview, executor)]
    names = {"{model}": "add_sub", "{version}": "1", "{region}": "attack", "{repository}": "r"}
    found = ["/v2/models/add_sub/infer", "/v2/models/add_sub/versions/1/infer"]
    for route in made:
        path = route.path
        for name, value in names.items():
            path = path.replace(name, value)
        found.append(path)
    assert len(found) == len(set(found)) > 30
    assert not any("{" in path for path in found)
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models"), "add_sub")


@pytest.fixture(scope="module")
def encrypted(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that speaks gRPC over TLS."""
    key, certificate = self_signed(tmp_path_factory.mktemp("tls"))
    tls = ("--grpc-use-ssl=true", f"--grpc-server-key={key}", f"--grpc-server-cert={certificate}")
    with running(repository, "--model-control-mode=explicit", "--load-model=*", *tls) as server:
        yield Site(server)


@pytest.fixture(params=[ATTACKER, "127.0.0.1"], ids=["cross-site", "same-site"])
def attack(request: pytest.FixtureRequest, tab: Tab, attacker_port: int) -> Page:
    """Open a page of another site, or of another port of this machine, which browsers take for the same site."""
    page = tab(f"http://{request.param}:{attacker_port}/")
    page.wait_for("document.title === 'attacker'")
    return page


@pytest.fixture(autouse=True)
def _changes_nothing(site: Site) -> Iterator[None]:
    before = state(site)
    yield
    assert state(site) == before


def state(site: Site) -> dict[str, Any]:
    """Return everything that a client can change, and the number of requests to the model."""
    found: dict[str, Any] = {"index": site.server.get("/v2/repository/index", "POST")}
    for path in ("logging", "trace/setting", "systemsharedmemory/status", "models/stats"):
        found[path] = site.server.get(f"/v2/{path}")
    assert all(status == 200 for status, _ in found.values())
    return found


def answered(site: Site) -> Counter[str]:
    """Count the answers of the server by status."""
    with urlopen(f"http://{site.server.metrics}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    name = 'moonpool_frontend_requests_total{protocol="http",status="'
    return Counter(
        {line[len(name) :].partition('"')[0]: int(float(line.split()[-1])) for line in lines if line.startswith(name)}
    )


def gets(site: Site, count: int, page: Page, name: str, *arguments: object) -> Counter[str]:
    """Return the server's answers to the `count` requests that a function of `_SCRIPTS` sends."""
    before = settled(site)
    given = ", ".join(json.dumps(each) for each in arguments)
    # The script does not wait for the answers.
    page.evaluate(f"{{ {_SCRIPTS} {name}({given}); }} 0")
    wait_until(lambda: (answered(site) - before).total() >= count, 60.0, f"{count} answers")
    return answered(site) - before


def settled(site: Site) -> Counter[str]:
    """Count the answers after those until now were counted."""
    mark = answered(site)["404"]
    assert site.server.get("/nothing")[0] == 404
    wait_until(lambda: answered(site)["404"] > mark, 60.0, "the count of an answer")
    return answered(site)


_SCRIPTS = """
    const frame = () => {
      const made = document.createElement("iframe");
      made.name = "frame" + document.querySelectorAll("iframe").length;
      document.body.append(made);
      return made;
    };
    // A form as text/plain sends NAME=VALUE: around the equals sign it is JSON.
    const form = (url, type, body, target) => {
      const made = document.createElement("form"), field = document.createElement("input");
      Object.assign(made, {method: "post", action: url, enctype: type, target});
      [field.name, field.value] = [body.slice(0, -1) + (body === "{}" ? "" : ",") + '"x":"', '"}'];
      made.append(field);
      document.body.append(made);
      made.submit();
    };
    const forms = (sent, types) => sent.forEach(([url, body]) =>
      types.forEach(type => form(url, type, body, frame().name)));
    const fetches = (sent, methods, type) => sent.forEach(([url, body]) => methods.forEach(method => {
      const isSimple = ["GET", "HEAD", "POST"].includes(method) && type !== "application/json";
      const options = {method, mode: isSimple ? "no-cors" : "cors", cache: "no-store"};
      if (!["GET", "HEAD", "OPTIONS"].includes(method)) Object.assign(options, {body, headers: {"Content-Type": type}});
      // Without a header of its own a GET is simple in every mode.
      if (type === "application/json") options.headers = {"Content-Type": type};
      fetch(url, options).catch(() => 0);
    }));
    const untyped = sent => sent.forEach(([url, body]) =>
      fetch(url, {method: "POST", mode: "no-cors", body: new Blob([body])}).catch(() => 0));
    const beacons = sent => sent.forEach(([url, body]) => navigator.sendBeacon(url, body));
    const pings = sent => sent.forEach(([url]) => {
      const link = document.createElement("a");
      Object.assign(link, {href: "#", ping: url});
      document.body.append(link);
      link.click();
    });
    const embeds = sent => sent.forEach(([url]) => {
      frame().src = url;
      new Image().src = url;
      const load = document.createElement("script");
      load.src = url;
      document.head.append(load);
      new EventSource(url).onerror = event => event.target.close();
      new WebSocket(url.replace("http:", "ws:"));
    });
"""


@pytest.fixture
def sent(site: Site, paths: list[str]) -> list[tuple[str, str]]:
    return addresses(site, paths)


def addresses(site: Site, paths: list[str]) -> list[tuple[str, str]]:
    """Return every address, each with a body that its route accepts."""
    return [(site.url + path, json.dumps(CHANGES.get(path.rpartition("/")[2], {}))) for path in paths]


@pytest.fixture
def opened(sent: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the page at `/` and every fourth of the others. To open one takes long, and frames send the same to
    all.
    """
    (page,) = [each for each in sent if urlsplit(each[0]).path == "/"]
    return [page, *[each for each in sent if each != page][::4]]


@pytest.mark.promise(
    "HTTP",
    "No page of another origin, on this machine or elsewhere, gets a request through a browser "
    "to any route, by any method, as a script, form, redirect, beacon, report or embedded file.",
)
def test_scripts_are_refused_with_every_method(attack: Page, site: Site, sent: list[tuple[str, str]]) -> None:
    count = len(sent) * len(METHODS)
    for content_type in ("text/plain", "application/json"):
        assert gets(site, count, attack, "fetches", sent, METHODS, content_type) == {"403": count}
    assert gets(site, len(sent), attack, "untyped", sent) == {"403": len(sent)}


@pytest.mark.promise("HTTP", "No page of another origin, on …")
def test_forms_in_frames_are_refused(attack: Page, site: Site, sent: list[tuple[str, str]]) -> None:
    count = len(sent) * len(FORMS)

    assert gets(site, count, attack, "forms", sent, FORMS) == {"403": count}


@pytest.mark.promise("HTTP", "No page of another origin, on …")
def test_forms_that_another_site_sends_on_are_refused(attack: Page, site: Site, sent: list[tuple[str, str]]) -> None:
    own = attack.evaluate("location.origin")
    relayed = [(f"{own}/?to={url}", body) for url, body in sent]

    assert gets(site, len(sent), attack, "forms", relayed, FORMS[:1]) == {"403": len(sent)}


@pytest.mark.promise("HTTP", "No page of another origin, on …")
def test_beacons_pings_and_what_a_page_embeds_are_refused(
    attack: Page, site: Site, sent: list[tuple[str, str]]
) -> None:
    for name, each in (("beacons", 1), ("pings", 1), ("embeds", 5)):
        count = each * len(sent)
        assert gets(site, count, attack, name, sent) == {"403": count}, name


@pytest.mark.promise("HTTP", "No page of another origin, on …")
def test_reports_of_a_page_s_policy_are_refused(attack: Page, site: Site) -> None:
    own = attack.evaluate("location.origin")
    target = f"{site.url}/v2/repository/models/add_sub/unload"

    before = settled(site)
    attack.goto(f"{own}/?reports={target}")
    wait_until(lambda: answered(site) != before, 60.0, "an answer")
    assert answered(site) - before == {"403": 1}


@pytest.mark.promise("HTTP", "No page of another origin, on …")
def test_forms_that_open_a_page_are_refused(attack: Page, opened: list[tuple[str, str]]) -> None:
    own = attack.evaluate("location.href")
    for (url, body), enctype in zip(opened, cycle(FORMS), strict=False):
        attack.goto(own)
        attack.wait_for(f"location.href === {json.dumps(own)} && !!document.body")
        given = ", ".join(json.dumps(each) for each in (url, enctype, body, "_self"))
        attack.evaluate(f"{{ {_SCRIPTS} form({given}); }} 0")
        attack.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")
        statuses = [status for asked, status in attack.responses() if asked == url]
        assert set(statuses) == {403}


@pytest.mark.promise("HTTP", "A link on another site opens the page at `/` and nothing else.")
def test_a_link_opens_the_page_and_nothing_else(attack: Page, site: Site, opened: list[tuple[str, str]]) -> None:
    own = attack.evaluate("location.href")
    for url, _ in (*opened, (f"http://{site.server.metrics}/metrics", "")):
        attack.goto(own)
        attack.wait_for(f"location.href === {json.dumps(own)} && !!document.body")
        attack.evaluate(f"void (location.href = {json.dumps(url)})")
        attack.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")
        statuses = [status for asked, status in attack.responses() if asked == url]
        assert statuses == [200 if url == f"{site.url}/" else 403]


@pytest.mark.promise(
    "HTTP", "A browser reaches a server on the loopback, and its port for metrics, only by `localhost` or an address."
)
def test_a_name_that_was_made_to_stand_for_this_machine_reaches_nothing(tab: Tab, site: Site, paths: list[str]) -> None:
    ports = site.server.ports
    for port, asked in ((ports["http"], paths), (ports["metrics"], ["/metrics"])):
        # For the browser, the page and the server have one origin.
        page = tab(f"http://{ATTACKER}:{port}{asked[-1]}")
        page.wait_for("location.hostname !== '' && document.readyState === 'complete'")
        statuses = page.evaluate(
            f"""Promise.all({json.dumps(asked)}.flatMap(path => {json.dumps(METHODS)}.map(
            method => fetch(path, {{method}}).then(answer => answer.status))))"""
        )
        assert statuses == [403] * len(asked) * len(METHODS)


@pytest.mark.promise("HTTP", "No page of another origin, on …")
def test_grpc_understands_no_browser(attack: Page, site: Site, encrypted: Site) -> None:
    for scheme, asked in (("http", site), ("https", encrypted)):
        host = f"localhost:{asked.server.ports['grpc']}"
        url = f"{scheme}://{host}/inference.GRPCInferenceService/RepositoryModelUnload"
        # The message is correct, with its length before it, as a browser could send it.
        name = b"add_sub"
        message = b"\x12" + bytes([len(name)]) + name
        sent = list(b"\0" + len(message).to_bytes(4, "big") + message)
        fetched = f"""fetch({json.dumps(url)}, {{method: 'POST', HOW,
            body: new Blob([new Uint8Array({sent})])}}).then(() => 'sent', () => 'refused')"""
        # Over TLS, the browser speaks HTTP/2, too. Such a request arrives, but is no gRPC by its content type.
        attack.evaluate(fetched.replace("HOW", "mode: 'no-cors'"))
        # The browser asks first if a page may set another content type.
        named = fetched.replace("HOW", "headers: {'Content-Type': 'application/grpc'}")
        assert attack.evaluate(named) == "refused"
        assert state(asked)["index"][1][0]["state"] == "READY"
