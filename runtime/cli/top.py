"""`moonpool top`: shows the state of a server in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import locale
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.shared import UsageError, figure
from moonpool.runtime.process.files import parsed_json
from moonpool.runtime.process.terminal import Terminal, harmless

if TYPE_CHECKING:
    import curses

Shown = Mapping[str, Any]
_TITLES = ("STATE", "INST", "REQ/S", "LATENCY", "QUEUE", "FAILED", "RST", "MEMORY")
_ALIGN = "<>>>>>>>"
_WIDTHS = (11, 5, 7, 7, 5, 6, 3, 8)
_LEAST_NAME = 12
_MOST_ERRORS = 8
_MOST_DENIALS = 3
_USUAL_LEVEL = "standard"
_STYLES = {"READY": "", "FAILED": "red", "UNAVAILABLE": "dim", "STOPPED": "dim"}


class Line(NamedTuple):
    """A line without its end; `style` is one of `Terminal.paint` or ""."""

    text: str
    style: str = ""


def overview_lines(shown: Shown, url: str, width: int, *, instances: bool = True) -> list[Line]:
    """Return the overview of a server as lines that are at most `width` wide. Texts of models are made harmless.

    With `instances`, each model is followed by its instances, and an ensemble by its steps.
    """
    lines = [
        *_head(shown, url),
        Line(""),
        *_table(shown["models"], width, instances=instances),
        Line(""),
        *_errors(shown["errors"]),
    ]
    return [Line(cut(line.text, width), line.style) for line in lines]


def cut(text: str, width: int) -> str:
    """Cut text to one line of at most `width` columns."""
    text = harmless(text).replace("\t", " ")
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _head(shown: Shown, url: str) -> list[Line]:
    server, models = shown["server"], shown["models"]
    ready = sum(model["state"] == "READY" and not model["reason"] for model in models)
    processes = [i for model in models for i in model["instances"] if i["pid"] is not None]
    memory = sum(instance["rss_bytes"] or 0 for instance in processes)
    queued = sum(model.get("queued", 0) for model in models)
    return [
        Line(f"moonpool {server['version']} at {url}, up {_span(server['uptime_s'])}, pid {server['pid']}", "bold"),
        Line(
            f"{ready} of {_plural(len(models), 'version')} ready, "
            f"{_plural(len(processes), 'process', 'processes')} with {_size(memory)}, "
            f"{queued} queued"
        ),
        _clients(shown["clients"]),
    ]


def _clients(clients: Shown) -> Line:
    """Show what clients ask, each request once, whatever its model asks of others."""
    recent = clients["recent"]
    facts = [f"{figure(recent['requests_per_s'])} requests/s"]
    if recent["latency_us"] is not None:
        facts.append(f"mean latency {_duration(recent['latency_us'])}")
    facts.append(f"{clients['failure']} failed")
    return Line(f"clients: {', '.join(facts)}")


def _table(models: Sequence[Shown], width: int, *, instances: bool) -> list[Line]:
    room = max(_LEAST_NAME, width - sum(_WIDTHS) - len(_WIDTHS))
    lines = [Line(_row("MODEL", _TITLES, room), "dim")]
    for model in models:
        is_troubled = model["state"] == "READY" and bool(model["reason"])
        style = "red" if is_troubled else _STYLES.get(model["state"], "yellow")
        lines.append(Line(_row(_name(model), _cells(model), room), style))
        if model["reason"] and model["reason"] != "unloaded":
            lines.append(Line(f"  {_first_line(model['reason'])}", style))
        # An older server tells nothing of pieces.
        if (recent := model.get("recent")) and recent.get("pieces_per_s") is not None:
            facts = [f"{figure(recent['pieces_per_s'])} pieces/s"]
            if recent["first_piece_us"] is not None:
                facts.append(f"the first after {_duration(recent['first_piece_us'])}")
            lines.append(Line(f"  {', '.join(facts)}"))
        if advice := model.get("advice"):
            lines.append(Line(f"  {_first_line(advice['text'])}", "yellow"))
            lines.append(Line(f"  in config.pbtxt: {_first_line(advice['line'])}", "yellow"))
        if instances:
            lines += [line for each in model["instances"] for line in _instance(each)]
            lines += [Line(f"  {step['line']}", "dim") for step in model.get("steps", ())]
    if not models:
        lines.append(Line("no model is loaded, and the repository has none"))
    return lines


def _name(model: Shown) -> str:
    return f"{model['name']}:{model['version']}" if model["version"] else str(model["name"])


def _cells(model: Shown) -> tuple[str, ...]:
    instances, recent = model["instances"], model.get("recent")
    ready = sum(each["state"] == "READY" for each in instances)
    memory = sum(each["rss_bytes"] or 0 for each in instances)
    if recent is None:
        return (model["state"], *[""] * (len(_TITLES) - 1))
    return (
        model["state"],
        f"{ready}/{len(instances)}" if instances else "",
        figure(recent["requests_per_s"]),
        _duration(recent["latency_us"]),
        str(model["queued"]),
        str(model["failure"]),
        str(sum(each["restarts"] for each in instances)) if instances else "",
        _size(memory) if memory else "",
    )


def _row(name: str, cells: Sequence[str], room: int) -> str:
    columns = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, _ALIGN, _WIDTHS, strict=True)]
    return f"{cut(name, room):<{room}} {' '.join(columns)}".rstrip()


def _instance(instance: Shown) -> list[Line]:
    facts = [instance["name"], instance["state"]]
    if instance["kind"] == "GPU":
        facts.append(f"GPU {instance['device_id']}")
    if instance["pid"] is not None:
        facts.append(f"pid {instance['pid']}")
    if instance["rss_bytes"] is not None:
        facts.append(_size(instance["rss_bytes"]))
    if instance["restarts"]:
        facts.append(_plural(instance["restarts"], "restart"))
    if instance["state"] != "READY":
        facts.append(_first_line(instance["because"]))
    lines = [Line("  " + "  ".join(facts), _STYLES.get(instance["state"], "yellow") or "dim")]
    if instance["pid"] is not None and instance["sandbox"] is not None:
        lines += _sandbox(instance["sandbox"])
    return lines + _denials(instance.get("denials"))


def _sandbox(sandbox: Shown) -> list[Line]:
    """Show a sandbox that differs from the usual one."""
    if sandbox["level"] == _USUAL_LEVEL:
        return []
    facts = [f"sandbox {sandbox['level']}: {', '.join(sandbox['layers'])}"]
    if sandbox["user"] is not None:
        facts.append(f"user {sandbox['user']}")
    if sandbox["granted"]:
        facts.append(f"granted: {', '.join(sandbox['granted'])}")
    missing = [Line(f"    left out: {sentence}", "yellow") for sentence in sandbox["left_out"]]
    return [Line("    " + "; ".join(facts), "dim"), *missing]


def _denials(denials: Shown | None) -> list[Line]:
    """Show the counts by kind, and the latest denials. An older server sends none."""
    if not denials or not denials["counts"]:
        return []
    counts = ", ".join(f"{count} {kind}" for kind, count in denials["counts"].items())
    lines = [Line(f"    refused by the sandbox: {counts}", "yellow")]
    for each in denials["latest"][:_MOST_DENIALS]:
        option = f": {each['option']} would allow it" if each["option"] else ""
        lines.append(Line(f"      {each['kind']} {each['text']}".rstrip() + option, "yellow"))
    return lines


def _errors(errors: Sequence[Shown]) -> list[Line]:
    if not errors:
        return [Line("no errors since the server started", "dim")]
    lines = [Line("LATEST ERRORS", "dim")]
    for error in errors[:_MOST_ERRORS]:
        at = time.strftime("%H:%M:%S", time.localtime(error["last_ms"] / 1000))
        times = f" ({_plural(error['requests'], 'request')})" if error["requests"] else ""
        lines.append(Line(f"{at} {error['model']}{times}: {_first_line(error['text'])}", "red"))
    return lines


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _plural(count: int, word: str, many: str = "") -> str:
    return f"{count} {word if count == 1 else many or word + 's'}"


def _duration(us: float | None) -> str:
    if us is None:
        return "-"
    if us < 1000:
        return f"{figure(us)} µs"
    return f"{figure(us / 1e3)} ms" if us < 1e6 else f"{figure(us / 1e6)} s"


def _size(count_bytes: int) -> str:
    mib = count_bytes / 2**20
    return f"{figure(mib)} MiB" if mib < 1000 else f"{figure(mib / 1024)} GiB"


def _span(seconds: float) -> str:
    for name, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{int(seconds // unit_s)} {name}"
    return f"{int(seconds)} s"


HELP = "show the models, instances, rates and errors of a server"
DESCRIPTION = """\
Show the models of a moonpool server, their instances, rates and latest errors, and keep them up to date.
Requests of clients are in the third line. A model's own row has all that it executed, for ensembles and
other models, too. The page at the server's address shows the same. Without a terminal the overview is shown once.

Keys: q ends, i shows or hides instances and steps of ensembles, arrows, Page Up and Page Down scroll.
"""
EXAMPLES = """\
examples:
  moonpool top
  moonpool top --url http://gpu-box:8000 --interval 5
  moonpool top --once
"""

_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 3.0
_MOST_BYTES = 64 << 20


class NoOverview(MoonpoolError):
    """No server answers, or it is not moonpool's."""

    code = "UNAVAILABLE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help=f"the server's address; default {_URL}")
    # The address without --url, as in older versions.
    parser.add_argument("address", metavar="URL", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help="show the overview once and end")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=1.0, help="the seconds between two readings; default %(default)g"
    )


def run(options: argparse.Namespace) -> int:
    if not options.interval >= 0.1:
        raise UsageError(f"--interval must be at least 0.1 seconds, not {options.interval:g}")
    if options.url is not None and options.address is not None:
        raise UsageError("give only one address")
    given = options.url or options.address or _URL
    url = given.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"URL must begin with http:// or https://, not be {given!r}")
    shown = fetch(url)
    terminal = Terminal(sys.stdout)
    if options.once or not (terminal.is_terminal and sys.stdin.isatty()):
        width = terminal.width if terminal.is_terminal else 120
        for line in overview_lines(shown, url, width):
            print(terminal.paint(line.text, line.style) if line.style else line.text)
        return 0
    import curses  # not for those who only infer

    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "")
    try:
        with contextlib.suppress(KeyboardInterrupt):  # as good an end as q
            curses.wrapper(lambda window: _Screen(window, url, options.interval).watch(shown))
    except curses.error as error:
        raise NoOverview(f"this terminal cannot be redrawn ({error}); use --once") from error
    return 0


def fetch(url: str) -> dict[str, Any]:
    """Get the overview of the server at this address. Raises `NoOverview` with the reason."""
    answer = _get(f"{url}/v2/moonpool/overview")
    if isinstance(answer, dict) and "models" in answer:
        try:
            overview_lines(answer, url, 80)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NoOverview(
                f"the overview of {url} cannot be read: it may be of another version of moonpool ({error!r})"
            ) from error
        return answer
    other = _get(f"{url}/v2")
    if isinstance(other, dict) and "name" in other:
        name = f"{other['name']} {other.get('version', '')}".strip()
        raise NoOverview(f"{url} is a server of {name}; only moonpool's servers have this overview")
    raise NoOverview(f"{url} answers, but is not a moonpool server")


def _get(url: str) -> object:
    """Get JSON; None if the answer is something else."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return parsed_json(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise NoOverview(f"the overview of {url} is restricted: {error.code} {error.reason}") from error
        return None
    except urllib.error.URLError as error:
        raise NoOverview(f"cannot reach {url}: {error.reason}") from error
    except (OSError, http.client.InvalidURL) as error:
        raise NoOverview(f"cannot reach {url}: {error!r}") from error
    except http.client.HTTPException as error:
        raise NoOverview(f"cannot reach {url}: what answers there does not speak HTTP") from error
    except ValueError:
        return None


class _Screen:
    """The terminal, redrawn until the user quits."""

    def __init__(self, window: curses.window, url: str, interval_s: float) -> None:
        self._window = window
        self._url = url
        self._interval_s = interval_s
        self._first = 0
        self._instances = True
        self._trouble = ""
        self._styles = _styles()
        window.keypad(True)

    def watch(self, shown: dict[str, Any]) -> None:
        """Redraw until q is pressed."""
        due_s = time.monotonic() + self._interval_s
        while True:
            self._draw(shown)
            self._window.timeout(max(0, int((due_s - time.monotonic()) * 1000) + 1))
            key = self._window.getch()
            if key == -1:
                # If the terminal is gone, getch returns at once.
                time.sleep(max(0.0, due_s - time.monotonic()))
            if key in (ord("q"), ord("Q")):
                return
            self._press(key)
            if time.monotonic() >= due_s:
                try:
                    shown, self._trouble = fetch(self._url), ""
                except NoOverview as error:
                    self._trouble = f"{time.strftime('%H:%M:%S')} {error}"
                due_s = time.monotonic() + self._interval_s

    def _press(self, key: int) -> None:
        import curses

        page = max(1, self._window.getmaxyx()[0] - 2)
        steps = {curses.KEY_DOWN: 1, curses.KEY_UP: -1, curses.KEY_NPAGE: page, curses.KEY_PPAGE: -page}
        self._first = max(0, self._first + steps.get(key, 0))
        if key == ord("i"):
            self._instances = not self._instances

    def _draw(self, shown: dict[str, Any]) -> None:
        """Draw all lines. curses sends only the differences to the terminal."""
        import curses

        height, width = self._window.getmaxyx()
        lines = overview_lines(shown, self._url, width, instances=self._instances)
        self._first = min(self._first, max(0, len(lines) - (height - 1)))
        visible = lines[self._first : self._first + height - 1]
        foot = Line(f"{self._trouble}; trying again", "red") if self._trouble else self._foot(lines)
        self._window.erase()
        for row, line in enumerate([*visible, *[Line("")] * (height - 1 - len(visible)), foot]):
            text = _writable(cut(line.text, width))
            # curses fails at the last column of the last row, and if the window has shrunk.
            with contextlib.suppress(curses.error):
                self._window.addstr(row, 0, text, self._styles[line.style])
        self._window.refresh()

    def _foot(self, lines: list[Line]) -> Line:
        place = f"line {self._first + 1} of {len(lines)}"
        return Line(f"q quit   i instances   ↑↓ scroll   {place}", "dim")


def _styles() -> dict[str, int]:
    import curses

    styles = {"": 0, "bold": curses.A_BOLD, "dim": curses.A_DIM, "red": 0, "green": 0, "yellow": 0}
    with contextlib.suppress(curses.error):  # the cursor of some terminals stays
        curses.curs_set(0)
    if curses.has_colors():
        curses.use_default_colors()
        colours = {"red": curses.COLOR_RED, "green": curses.COLOR_GREEN, "yellow": curses.COLOR_YELLOW}
        for number, (name, colour) in enumerate(colours.items(), 1):
            curses.init_pair(number, colour, -1)
            styles[name] = curses.color_pair(number)
    return styles


def _writable(text: str) -> str:
    """Replace characters that the terminal's encoding lacks."""
    encoding = locale.getpreferredencoding()
    return harmless(text).encode(encoding, "replace").decode(encoding)
