"""The page at /, in a real browser: its content, its form, and its limits for hostile models."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.ensemble_repositories import chain, write_ensemble, write_model
from tests.server.page.browser import Page, needs_chromium
from tests.server.page.models import HOSTILE, write
from tests.server.page.site import Site
from tests.server.running import running
from tests.waiting import wait_until

pytestmark = [needs_chromium, pytest.mark.slow]

Tab = Callable[..., Page]
# The console says this about an answer with an error status. The form shows the error itself.
REFUSED = "network: Failed to load resource"


def open_model(tab: Tab, site: Site, name: str, **size: int) -> Page:
    """Open the page of a model, and wait for its form."""
    page = tab(f"{site.url}/#/{name}/1", **size)
    page.wait_for("document.querySelector('#send')?.disabled === false", f"a form for {name}")
    return page


def answer(page: Page) -> str:
    """Send the form, and return the text of the answer."""
    page.evaluate("document.querySelector('#answer').replaceChildren()")
    page.click("#send")
    page.wait_for(
        "document.querySelector('#send')?.disabled === false && !!document.querySelector('#answer pre')", "an answer"
    )
    return page.text("#answer")


def row(name: str, version: int = 1) -> str:
    """Return the selector of a model's row."""
    return f"#models tr:has(a[href='#/{name}/{version}'])"


# Figures


@pytest.mark.promise(
    "The overview",
    "The page at `/` runs in a browser without a complaint, asks no other host, and runs nothing but its own script.",
)
def test_it_loads_without_a_complaint_and_shows_the_models(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "shouts")

    assert page.text("#link") == "live"
    assert "READY" in page.text(row("add_sub"))
    for protocol, port in site.server.ports.items():
        assert f"{protocol} 127.0.0.1:{port}" in page.text("header")
    assert page.complaints() == []


@pytest.mark.promise("The overview", "The page at `/` runs in …")
def test_it_asks_nobody_but_its_own_server(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "add_sub")
    answer(page)

    hosts = {urlsplit(url).netloc for url in page.requests()}
    assert hosts == {site.server.http}


def test_rates_and_counts_move(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text(row("large_numbers"), "READY")

    def rate_after_a_request() -> bool:
        assert site.infer("large_numbers", {"X": ("INT64", [1], [1])}) == 200
        return bool(page.evaluate("document.querySelector('.tile .value').innerText !== '0'"))

    wait_until(rate_after_a_request, 60.0, "a rate")
    answered = site.model("large_numbers")["success"]
    page.wait_for(f"document.querySelector(\"{row('large_numbers')} td:nth-child(8)\").innerText === '{answered}'")
    page.wait_for("(document.querySelector('.plot-line').getAttribute('d') ?? '') !== ''", "a plot")
    assert "up to" in page.text(".tile .axis")


def write_pipeline(repository: Path) -> None:
    """Write an ensemble of two steps, and a model that it asks twice."""
    write_model(repository, "plus_one")
    write_ensemble(repository, "pipeline", chain(["plus_one", "plus_one"]))


def test_an_ensemble_shows_its_steps_and_no_counts_of_instances(tab: Tab, site: Site, repository: Path) -> None:
    write_pipeline(repository)
    assert site.load("pipeline") == 200
    page = tab(site.url)
    page.wait_for_text(row("pipeline"), "READY")
    cells = page.text(row("pipeline")).split("\t")
    assert cells[3] == "2 steps"
    assert cells[9:] == ["\N{EN DASH}"] * 2
    page.click(f"{row('pipeline')} a")
    page.wait_for_text("#instances-title", "Steps")

    assert "ensemble" in page.text("#subtitle")
    assert page.evaluate("document.querySelector('#instances-table').hidden")
    assert [page.text(f"#steps tr:nth-child({n})").split()[:3] for n in (1, 2)] == [
        ["1", "plus_one", "READY"],
        ["2", "plus_one", "READY"],
    ]
    page.click("#steps tr:nth-child(2) a")
    page.wait_for_text("#title", "plus_one, version 1")
    page.wait_for_text("#instances", "READY")
    assert page.text("#instances-title") == "Instances"
    assert page.evaluate("document.querySelector('#steps-table').hidden")
    assert page.complaints() == []


def test_a_request_to_an_ensemble_counts_once_in_the_total(tab: Tab, site: Site, repository: Path) -> None:
    if not (repository / "pipeline").exists():
        write_pipeline(repository)
    assert site.load("pipeline") == 200
    page = tab(site.url)
    page.wait_for_text(row("pipeline"), "READY")
    page.wait_for("now.series.has('pipeline:1')", "samples")
    # Requests of other tests are in the next sample at the latest, and the page drops old samples.
    seen = page.evaluate("now.taken")
    begin = page.wait_for(f"now.taken > {seen} && now.taken", "a sample without the requests of other tests")

    def since(name: str) -> str:
        return f"now.series.get('{name}').requests.slice({begin} - now.taken || SAMPLES).reduce((a, b) => a + b, 0)"

    for _ in range(5):
        assert site.infer("pipeline", {"A": ("FP32", [3], [1.0, 2.0, 3.0])}) == 200

    page.wait_for(f"{since('plus_one:1')} === 10", "the requests of both steps")
    page.wait_for(f"{since('')} >= 5", "the requests of the client")
    assert page.evaluate(since("")) == 5
    assert page.text(".tile .label") == "Requests of clients per second"


@pytest.mark.parametrize("address", ["", "/#/add_sub/1"])
def test_no_ring_is_drawn_around_the_whole_page(tab: Tab, site: Site, address: str) -> None:
    page = tab(site.url + address)
    page.wait_for_text("#link", "live")
    page.evaluate("document.querySelector('#content').focus()")

    assert page.evaluate("document.activeElement.id") == "content"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "none"


def test_the_link_for_keyboards_skips_to_the_content(tab: Tab, site: Site) -> None:
    page = tab(f"{site.url}/#/add_sub/1")
    page.wait_for_text("#title", "add_sub, version 1")
    page.evaluate("document.querySelector('a.skip').click()")

    assert page.evaluate("document.activeElement.id") == "content"
    assert page.text("#title") == "add_sub, version 1"


def test_no_sample_is_shown_twice(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "add_sub")
    # The page polls twice, as when a tab is hidden and shown again while it waits for an answer.
    page.evaluate("(now.taken = 0, now.series.clear(), poll(), poll(), 0)")
    page.wait_for("now.taken > 0 && now.series.get('').requests.length > 0", "samples")
    before = page.evaluate("now.taken")
    page.wait_for(f"now.taken > {before}", "new samples")

    kept, taken = page.evaluate("[now.series.get('').requests.length, now.taken]")
    assert kept <= taken


@pytest.mark.promise("The overview", "The page goes on when the …")
def test_a_restart_of_a_killed_stub_is_seen(tab: Tab, site: Site) -> None:
    page = tab(f"{site.url}/#/shouts/1")
    page.wait_for_text("#instances", "READY")
    assert "standard: dies_with_runtime, " in page.text("#instances")
    before = page.text("#instances tr td:nth-child(4)")
    os.kill(site.model("shouts")["instances"][0]["pid"], signal.SIGKILL)
    page.wait_for("document.querySelector('#instances tr td:nth-child(5)').innerText === '1'", "a restart")

    page.wait_for_text("#instances", "READY")
    assert page.text("#instances tr td:nth-child(4)") != before
    assert "SIGKILL" in page.wait_for_text("#errors", "SIGKILL")


@pytest.mark.promise("The overview", "The page goes on when the …")
def test_a_model_that_is_unloaded_takes_no_requests(tab: Tab, site: Site, repository: Path) -> None:
    shutil.copytree(repository / "add_sub", repository / "leaves")
    assert site.load("leaves") == 200
    page = open_model(tab, site, "leaves")
    assert site.unload("leaves") == 200

    page.wait_for("document.querySelector('#send')?.disabled", "a form that cannot be sent")
    assert "takes no requests now" in page.text("#form-note")
    assert page.complaints() == []


def test_a_name_alone_means_the_latest_version(tab: Tab, site: Site, repository: Path) -> None:
    shutil.copytree(repository / "add_sub", repository / "comes")
    page = tab(f"{site.url}/#/comes")
    page.wait_for_text("#subtitle", "UNAVAILABLE")
    assert site.load("comes") == 200

    page.wait_for_text("#title", "comes, version 1")
    page.wait_for("document.querySelector('#send')?.disabled === false", "a form")


@pytest.mark.promise("The overview", "The page goes on when the …")
def test_a_hundred_models_can_be_filtered(tab: Tab, site: Site, repository: Path) -> None:
    folders = [repository / f"model_{number:03}" / "1" for number in range(100)]
    for folder in folders:
        folder.mkdir(parents=True)
    page = tab(site.url)
    page.wait_for("document.querySelectorAll('#models tr').length > 100", "all models")
    page.fill("#filter", "_07")
    page.wait_for("document.querySelectorAll('#models tr').length === 10", "ten models")
    shown = page.text("#models")
    for folder in folders:
        shutil.rmtree(folder.parent)

    assert "model_070" in shown


@pytest.mark.promise(
    "The overview",
    "The page goes on when the server was restarted, when a model is unloaded or dies, and with a hundred models.",
)
def test_a_server_that_was_restarted_is_told_apart(tab: Tab, tmp_path: Path) -> None:
    repository = write(tmp_path, "add_sub")
    with running(repository) as server:
        page = tab(f"http://{server.http}")
        page.wait_for_text("#models", "add_sub")
        port = server.ports["http"]
    page.wait_for_text("#link", "not reachable")
    with running(repository, f"--http-port={port}"):
        page.wait_for_text("#link", "live")
        assert "restarted" in page.wait_for_text("#notice", "restarted")
        page.wait_for_text("#models", "add_sub")


# Texts of models


@pytest.mark.promise("The overview", "The page shows texts of models as text, never as markup.")
def test_an_error_with_markup_in_it_is_shown_as_text(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "fails")
    shown = answer(page)
    page.wait_for_text("#errors", "ValueError")
    page.click("#errors summary .text")
    kept = page.wait_for_text("#errors pre", "At:")

    assert HOSTILE in shown
    assert HOSTILE in kept
    assert "model.py" in kept
    assert "deeper" in kept
    assert "    raise ValueError" in page.wait_for_text("#errors pre:last-child", "Traceback")
    assert page.evaluate("window.hurt ?? null") is None
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert [text for text in page.complaints() if not text.startswith(REFUSED)] == []


def test_a_model_whose_name_is_markup_is_shown_by_its_name(tab: Tab, site: Site, repository: Path) -> None:
    name = "<img src=x onerror=window.hurt=6>"
    (repository / name / "1").mkdir(parents=True)
    page = tab(site.url)
    page.wait_for_text("#models", name)
    page.click(f"#models a[href='#/{quote(name, safe='')}/']")
    page.wait_for_text("#title", name)
    shutil.rmtree(repository / name)

    assert page.evaluate("window.hurt ?? null") is None
    assert page.complaints() == []


@pytest.mark.promise("The overview", "The page shows texts of models …")
def test_a_load_that_fails_is_shown_with_its_traceback(tab: Tab, site: Site, repository: Path) -> None:
    version = repository / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(f"raise ImportError({HOSTILE!r})\n")
    assert site.load("broken") == 400
    page = tab(site.url)
    page.wait_for_text("#errors", "broken")
    page.click("#errors details:first-child summary .text")

    assert "Traceback (most recent call last)" in page.wait_for_text("#errors", "Traceback")
    assert page.evaluate("window.hurt ?? null") is None


# The form


def test_a_request_from_the_form_is_answered(tab: Tab, site: Site, repository: Path) -> None:
    # All signs that a name may have.
    name = "add-sub_.+,=@:"
    shutil.copytree(repository / "add_sub", repository / name)
    assert site.load(name) == 200
    page = open_model(tab, site, name)
    page.fill("#input-0", "[[1, 2, 3, 4], [5, 6, 7, 8]]")
    page.fill("#input-1", '{"shape": [2, 4], "fill": 0.5}')
    page.click("#more summary")
    page.fill("#request-id", "from the page")
    shown = answer(page)

    assert "OUTPUT0 FP32 [2, 4]\n[[1.5, 2.5, 3.5, 4.5],\n [5.5, 6.5, 7.5, 8.5]]" in shown
    assert "[[0.5, 1.5, 2.5, 3.5]" in shown
    assert "id from the page" in shown


@pytest.mark.promise(
    "The overview",
    "The form's made-up values fit every model; what it sends and shows keeps every digit of "
    "whole numbers, and rounds 16-bit floats as numpy does.",
)
def test_made_up_inputs_fit_every_model(tab: Tab, site: Site) -> None:
    expected = {
        "add_sub": "[[2, 4, 6, 8]]",
        "shouts": '[["MOONPOOL"]]',
        "large_numbers": "[2, 3, 4, 5]",
        "doubles_halves": "[2, 4, 6, 8]",
        "counts": '"I":0',
    }
    shown = {name: answer(open_model(tab, site, name)) for name in expected}

    assert {name: expected[name] in text.replace(" ", "") or expected[name] in text
            for name, text in shown.items()} == dict.fromkeys(expected, True), shown  # fmt: skip


@pytest.mark.promise("The overview", "The form's made-up values fit every …")
def test_whole_numbers_keep_all_their_digits(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "large_numbers")
    page.fill("#input-0", "[9007199254740993, -9223372036854775808]")

    assert "[9007199254740994, -9223372036854775807]" in answer(page)


@pytest.mark.promise("The overview", "The form's made-up values fit every …")
def test_halves_are_rounded_as_numpy_does(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "doubles_halves")
    values = [0.1, -2.5, 65504.0, 6e-8, 3.1e-5, 1e6, 0.333251953125, 2049.0]
    page.fill("#input-0", json.dumps(values))
    shown = answer(page)
    halves = np.array(page.evaluate(f"{json.dumps(values)}.map(toHalf)"), np.uint16)

    with np.errstate(over="ignore"):
        expected = np.array(values).astype(np.float16)
    assert halves.view(np.float16).tolist() == expected.tolist()
    assert str(float(expected[1] * 2)).removesuffix(".0") in shown


def test_responses_of_a_stream_are_shown_as_they_come(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "counts")
    page.fill("#input-0", "[3]")
    shown = answer(page)

    assert "3 responses in" in shown
    assert shown.count('"I"') == 3


def test_a_value_that_cannot_be_meant_is_told_at_its_field(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "add_sub")
    for text, reason in [
        ("[1, 2", "No JSON"),
        ("[[1, 2], [3]]", "same length"),
        ("[[1], 2]", "nested"),
        ('{"shape": [-1], "fill": 1}', "shape"),
        ("null", "Numbers"),
    ]:
        page.fill("#input-1", text)
        page.click("#send")
        page.wait_for_text("#input-1-fault", reason)
        assert page.evaluate("document.activeElement.id") == "input-1"
        assert page.evaluate("document.querySelector('#input-1').ariaInvalid") == "true"
    assert page.text("#answer") == ""


def test_the_same_request_is_told_as_a_curl_command(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "add_sub")
    page.click("#more summary")
    command = page.wait_for_text("#curl", "/infer")

    assert f"{site.url}/v2/models/add_sub/versions/1/infer" in command
    assert '"inputs":[{"name":"INPUT0"' in command


# The chat


def said(page: Page, message: str, shown: str) -> str:
    """Send a message, and return the text of the answers, in which this is shown at the end."""
    page.fill("#message", message)
    page.click("#send")
    return page.wait_for_text("#answer", shown)


@pytest.mark.promise("OpenAI", "The page has a box for messages for models with chats, and streams their answers.")
def test_a_chat_goes_on_with_its_messages(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "talker")
    page.click("#more summary")
    page.fill("#parameters", '{"temperature": 0.5}')
    page.fill("#request-id", "from the page")
    page.wait_for_text("#curl", '"temperature":0.5')
    first = said(page, "one & two", "2 tokens in, 3 out")
    page.wait_for("document.querySelector('#send').disabled === false")

    assert f"1 messages, the last is: ONE & TWO{HOSTILE} at 0.5, from the page" in first
    assert "you one & two" in first
    assert "first piece after" in first
    assert page.evaluate("document.querySelector('#message').value") == ""
    second = said(page, "three", "3 messages, the last is: THREE")
    assert "1 messages" in second
    page.wait_for("document.querySelector('#send').disabled === false")
    page.click("#forget")
    assert page.text("#answer") == ""
    said(page, "four", "1 messages, the last is: FOUR")
    assert page.evaluate("window.hurt ?? null") is None


@pytest.mark.promise("OpenAI", "The page has a box for messages …")
def test_a_chat_that_breaks_or_is_stopped_says_so(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "talker")
    broken = said(page, "breaks", "No answer: ")
    assert "half" in broken
    assert "talker" in broken
    page.wait_for("document.querySelector('#send').disabled === false")
    said(page, "waits", "first ")
    page.click("#stop")
    page.wait_for_text("#answer", "stopped after")
    page.wait_for("document.querySelector('#send').disabled === false")
    said(page, "again", "1 messages, the last is: AGAIN")
    assert page.evaluate("window.hurt ?? null") is None


# Advice

ADVISED = """
const told = window.fetch;
window.fetch = async (...request) => {
  const answer = await told(...request);
  if (!String(request[0]).includes("overview")) return answer;
  const shown = await answer.json();
  for (const model of shown.models) if (model.name === "add_sub") model.advice = ADVICE;
  return new Response(JSON.stringify(shown));
};
"""


@pytest.mark.promise("The overview", "A model for which requests wait …")
def test_advice_is_on_both_pages(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "add_sub")
    assert page.evaluate("document.querySelector('#advice').hidden")

    advice = '{"reason": "processor", "text": "another instance would help", "line": "instance_group []"}'
    page.evaluate(ADVISED.replace("ADVICE", advice))

    words = "add_sub, version 1: another instance would help.\nIn config.pbtxt: instance_group []"
    page.wait_for_text("#advice", words)
    page.evaluate("location.hash = '#/add_sub/1'")
    page.wait_for_text("#title", "add_sub, version 1")
    page.wait_for_text("#advice", words)
    page.evaluate("location.hash = '#/shouts/1'")
    page.wait_for("document.querySelector('#advice').hidden", "no advice on another model")
    assert page.complaints() == []


@pytest.mark.promise("The overview", "A model for which requests wait …")
def test_the_words_of_advice_are_no_markup(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "add_sub")
    text = repr(HOSTILE)
    advice = f'{{"reason": "processor", "text": {text}, "line": {text}}}'
    page.evaluate(ADVISED.replace("ADVICE", advice.replace("</script>", "<\\/script>")))

    page.wait_for_text("#advice", "<img src=x")
    assert page.evaluate("window.hurt === undefined")


@pytest.mark.promise("The overview", "A model for which requests wait …")
def test_a_server_says_whether_there_is_any_advice(site: Site) -> None:
    assert site.model("add_sub")["advice"] is None


# Accessibility


@pytest.mark.promise("The overview", "The page can be used by keyboard alone, and fits a telephone, light and dark.")
def test_it_can_be_used_by_keyboard_alone(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "add_sub")
    page.evaluate(f'document.querySelector("{row("add_sub")} a").focus()')
    page.press("Enter", 13, text="\r")
    page.wait_for("document.querySelector('#send')?.disabled === false", "a form")
    page.evaluate("document.querySelector('#input-0').focus()")
    page.press("Enter", 13, modifiers=2)

    page.wait_for_text("#answer", "[[2, 4, 6, 8]]")


@pytest.mark.promise("The overview", "The page can be used by …")
def test_the_focus_stays_while_figures_change(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "add_sub")
    page.evaluate(f'document.querySelector("{row("add_sub")} a").focus()')
    before = page.evaluate("now.taken")
    page.wait_for(f"now.taken > {before} + 1", "new figures")

    assert page.evaluate("document.activeElement.innerText") == "add_sub"


def test_every_field_and_table_has_a_name(tab: Tab, site: Site) -> None:
    page = open_model(tab, site, "add_sub")

    assert (
        page.evaluate("""[...document.querySelectorAll('input, textarea, table, svg[role=img]')]
        .filter(n => !n.labels?.length && !n.ariaLabel && !n.getAttribute('aria-labelledby'))
        .map(n => n.outerHTML.slice(0, 80))""")
        == []
    )
    assert page.evaluate("[...document.querySelectorAll('th')].every(n => n.scope)") is True
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.promise("The overview", "The page can be used by …")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_telephone(tab: Tab, site: Site, dark: bool) -> None:
    for place in ("/", "/#/add_sub/1"):
        page = tab(site.url + place, width=360, height=740, dark=dark)
        page.wait_for_text("#subtitle", "ready" if place == "/" else "READY")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    brightness = [sum(map(int, color[4:-1].split(","))) for color in (ink, paper)]
    assert (brightness[0] > brightness[1]) is dark


# Restrictions


@pytest.mark.promise("The overview", "The page at `/` runs in …")
def test_nothing_but_its_own_script_runs(tab: Tab, site: Site) -> None:
    page = tab(site.url)
    page.wait_for_text("#models", "add_sub")
    page.evaluate("""(() => {
        const script = document.createElement('script');
        script.textContent = 'window.hurt = 3';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.hurt = 4">');
        document.body.insertAdjacentHTML('beforeend', '<b onclick="window.hurt = 5" id=trap>x</b>');
        document.querySelector('#trap').click();
    })()""")
    elsewhere = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")

    wait_until(lambda: len([c for c in page.complaints() if "Content Security" in c]) >= 4)
    assert page.evaluate("window.hurt ?? null") is None
    assert elsewhere == "refused"
