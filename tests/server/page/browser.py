"""A headless Chromium for tests, driven over its DevTools pipe; nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import Deadline, wait_until

PATIENCE_S = 60.0
ATTACKER = "attacker.example"
_EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    _EXECUTABLE is None, reason="there is no chromium on the path (apt-get install chromium)"
)
# Chromium reads commands from descriptor 3 and writes answers to 4.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    # Tests may run as root, in containers with little /dev/shm. The only page is ours, so the browser needs no sandbox.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--hide-scrollbars",
    # Servers of tests have certificates of their own making.
    "--ignore-certificate-errors",
    "--lang=en-GB",
    # The browser finds no other host. An attacker's name stands for this machine, as after DNS rebinding.
    f"--host-resolver-rules=MAP {ATTACKER} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


class Browser:
    """A Chromium process and its pipe. Commands wait for their answers, and events are kept."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets its profile, and all other files that it writes."""
        if _EXECUTABLE is None:
            raise FileNotFoundError("chromium")
        commands, self._write_fd = _pipe()
        self._read_fd, answers = _pipe()
        arguments = [*_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(commands), str(answers), _EXECUTABLE, *arguments],
                pass_fds=(commands, answers),
                env={"PATH": os.environ["PATH"], "HOME": str(folder), "TZ": "UTC"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._unread = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []

    def command(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Run a command, and return its result. Raises RuntimeError with Chromium's text."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = Deadline(PATIENCE_S)
        while number not in self._answers:
            self.read(deadline)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def read(self, deadline: Deadline) -> None:
        """Read the messages that have come, or wait for one."""
        if not select.select([self._read_fd], [], [], deadline.remaining_s)[0]:
            raise TimeoutError("chromium does not answer")
        data = os.read(self._read_fd, 1 << 20)
        if not data:
            raise EOFError("chromium has ended")
        *messages, self._unread = (self._unread + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)

    def close(self) -> None:
        """End Chromium with all processes that it started."""
        try:
            self.command("Browser.close")
            self._process.wait(5.0)
        except (OSError, EOFError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            # A browser that does not end by itself is killed, whatever the reason.
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write_fd)
        os.close(self._read_fd)


class Page:
    """A tab: its content, its requests, its complaints."""

    def __init__(self, browser: Browser, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        self._browser = browser
        self._context = browser.command("Target.createBrowserContext")["browserContextId"]
        self._target = browser.command("Target.createTarget", url="about:blank", browserContextId=self._context)[
            "targetId"
        ]
        self._session = browser.command("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._command(f"{domain}.enable")
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def _command(self, method: str, **parameters: Any) -> Any:
        return self._browser.command(method, self._session, **parameters)

    def goto(self, url: str) -> None:
        self._command("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        result = self._command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches; "" if there is none."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, expression: str, what: str = "") -> Any:
        """Wait until an expression is true, and return its value."""

        def value() -> Any:
            try:
                return self.evaluate(expression)
            except RuntimeError as error:
                # The page has gone, and the next one is not there yet.
                if "navigated or closed" not in str(error):
                    raise
                return None

        return wait_until(value, PATIENCE_S, what or expression)

    def wait_for_text(self, selector: str, text: str) -> str:
        """Wait until an element shows this text, and return all of its text."""

        def shown() -> str:
            found = self.text(selector)
            return found if text in found else ""

        return wait_until(shown, PATIENCE_S, f"{text!r} in {selector}")

    def click(self, selector: str) -> None:
        """Click at the place of an element, as a person would."""
        place = self.wait_for(
            f"""(() => {{ const node = document.querySelector({json.dumps(selector)});
            if (!node || node.disabled) return null;
            node.scrollIntoView({{block: "center"}});
            const box = node.getBoundingClientRect();
            return {{x: box.x + box.width / 2, y: box.y + box.height / 2}}; }})()""",
            f"something to click at {selector}",
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def press(self, key: str, code: int, modifiers: int = 0, text: str = "") -> None:
        """Press and release a key; `code` is its virtual key code."""
        same = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self._command("Input.dispatchKeyEvent", type="keyDown", **same, **_typed(text))
        self._command("Input.dispatchKeyEvent", type="keyUp", **same)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.focus(); node.select(); }})()"
        )
        self._command("Input.insertText", text=text)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return the visible part of the page as a PNG, or all of it."""
        answer = self._command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def _events(self, method: str) -> Iterator[dict[str, Any]]:
        # The answer to a command comes after all earlier events.
        self.evaluate("0")
        for event in self._browser.events:
            if event["method"] == method and event.get("sessionId") == self._session:
                yield event["params"]

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, exceptions, and violations of the policy."""
        said = [
            str(params["args"])
            for params in self._events("Runtime.consoleAPICalled")
            if params["type"] in ("error", "warning", "assert")
        ]
        logged = [params["entry"] for params in self._events("Log.entryAdded")]
        return [
            *said,
            *(f"{e['source']}: {e['text']}" for e in logged if e["level"] in ("error", "warning")),
            *(str(params["exceptionDetails"]) for params in self._events("Runtime.exceptionThrown")),
        ]

    def requests(self) -> list[str]:
        """Return the addresses of all requests."""
        events = self._events("Network.requestWillBeSent")
        return [params["request"]["url"] for params in events]

    def responses(self) -> list[tuple[str, int]]:
        """Return the address and the status of every response that came, in order."""
        events = self._events("Network.responseReceived")
        return [(params["response"]["url"], params["response"]["status"]) for params in events]

    def close(self) -> None:
        self._browser.command("Target.disposeBrowserContext", browserContextId=self._context)
        self._browser.events.clear()


def _typed(text: str) -> dict[str, str]:
    return {"text": text} if text else {}


def _pipe() -> tuple[int, int]:
    """Make a pipe whose ends do not have the numbers that Chromium gives to others."""
    ends = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends]
    for fd in ends:
        os.close(fd)
    return high[0], high[1]
