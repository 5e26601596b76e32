"""`moonpool top`: what goes on in a server, in a terminal."""

from __future__ import annotations

import contextlib
import json
import locale
import sys
import time
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.overview_lines import Line, cut, overview_lines
from moonpool.runtime.cli.session import UsageError
from moonpool.runtime.output import harmless
from moonpool.runtime.terminal import Terminal

if TYPE_CHECKING:
    import argparse
    import curses

NAME = "top"
HELP = "show what goes on in a server: models, instances, rates, errors"
DESCRIPTION = """\
Show the models of a moonpool server, their instances, rates and latest errors, and keep that up to date.
It is what the page at the server's address shows. Where there is no terminal it is shown once.

Keys: q ends, i shows or hides instances, arrows, Page Up and Page Down scroll.
"""
EXAMPLES = """\
examples:
  moonpool top
  moonpool top http://gpu-box:8000 --interval 5
  moonpool top --once
"""

_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 3.0
_MOST_BYTES = 64 << 20


class NoOverview(MoonpoolError):
    """Nobody is there, or somebody else."""

    code = "UNAVAILABLE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL", nargs="?", default=_URL, help="the server; default %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=1.0, help="seconds; default %(default)g"
    )


def run(options: argparse.Namespace) -> int:
    if not options.interval >= 0.1:
        raise UsageError(f"--interval must be at least 0.1 seconds, not {options.interval:g}")
    url = options.url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"URL must begin with http:// or https://, not be {options.url!r}")
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
    """The overview of the server at this address. Raises `NoOverview`, which says what is there instead."""
    answer = _get(f"{url}/v2/moonpool/overview")
    if isinstance(answer, dict) and "models" in answer:
        try:
            overview_lines(answer, url, 80)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NoOverview(
                f"the overview of {url} cannot be read: it may be of another version of moonpool "
                f"({error!r})"
            ) from error
        return answer
    other = _get(f"{url}/v2")
    if isinstance(other, dict) and "name" in other:
        name = f"{other['name']} {other.get('version', '')}".strip()
        raise NoOverview(f"{url} is a server of {name}, which has no overview as moonpool's have")
    raise NoOverview(f"{url} answers, but is no server of moonpool's")


def _get(url: str) -> object:
    """The JSON there, None where it is something else."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise NoOverview(f"{url} is not for everybody: {error.code} {error.reason}") from error
        return None
    except urllib.error.URLError as error:
        raise NoOverview(f"cannot reach {url}: {error.reason}") from error
    except (OSError, http.client.InvalidURL) as error:
        raise NoOverview(f"cannot reach {url}: {error!r}") from error
    except http.client.HTTPException as error:
        raise NoOverview(f"cannot reach {url}: what answers there does not speak HTTP") from error
    except (ValueError, RecursionError):
        return None


class _Screen:
    """The terminal while it is watched."""

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
        """Until somebody presses q."""
        due_s = time.monotonic() + self._interval_s
        while True:
            self._draw(shown)
            self._window.timeout(max(0, int((due_s - time.monotonic()) * 1000) + 1))
            key = self._window.getch()
            if key == -1:
                # At once, where the terminal is gone.
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
        steps = {
            curses.KEY_DOWN: 1,
            curses.KEY_UP: -1,
            curses.KEY_NPAGE: page,
            curses.KEY_PPAGE: -page,
        }
        self._first = max(0, self._first + steps.get(key, 0))
        if key == ord("i"):
            self._instances = not self._instances

    def _draw(self, shown: dict[str, Any]) -> None:
        """Only what differs from what the terminal shows is sent to it."""
        import curses

        height, width = self._window.getmaxyx()
        lines = overview_lines(shown, self._url, width, instances=self._instances)
        self._first = min(self._first, max(0, len(lines) - (height - 1)))
        visible = lines[self._first : self._first + height - 1]
        foot = Line(f"{self._trouble}; trying again", "red") if self._trouble else self._foot(lines)
        self._window.erase()
        for row, line in enumerate([*visible, *[Line("")] * (height - 1 - len(visible)), foot]):
            text = _writable(cut(line.text, width))
            # The last column of the last row cannot be left, and the window may have shrunk.
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
        colours = {
            "red": curses.COLOR_RED,
            "green": curses.COLOR_GREEN,
            "yellow": curses.COLOR_YELLOW,
        }
        for number, (name, colour) in enumerate(colours.items(), 1):
            curses.init_pair(number, colour, -1)
            styles[name] = curses.color_pair(number)
    return styles


def _writable(text: str) -> str:
    """What the terminal's encoding has no place for is replaced."""
    encoding = locale.getpreferredencoding()
    return harmless(text).encode(encoding, "replace").decode(encoding)
