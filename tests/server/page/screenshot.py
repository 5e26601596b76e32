"""Makes docs/page.png: `python -m tests.server.page.screenshot`. It takes as long as the plots cover."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.server.page.browser import Browser, Page
from tests.server.page.site import Site
from tests.server.running import running

ROOT = Path(__file__).parents[3]
MODELS = ("add_sub", "crashes", "normalise", "primes")
TARGET = ROOT / "docs" / "page.png"
ROW: tuple[str, list[int], list[float]] = ("FP32", [1, 4], [1.0, 2.0, 3.0, 4.0])
# Each caller repeats a request: the model, its inputs, and the requests a second at most.
CALLERS: list[tuple[str, dict[str, Any], float]] = [
    ("add_sub", {"INPUT0": ROW, "INPUT1": ROW}, 60.0),
    ("normalise", {"X": ("FP32", [1, 256], [0.5] * 256)}, 35.0),
    ("primes", {"LIMIT": ("INT64", [1, 1], [4_000])}, 8.0),
    ("crashes", {"WISH": ("BYTES", [1, 1], ["hello"])}, 5.0),
]


def call(site: Site, caller: tuple[str, dict[str, Any], float], end_s: float) -> None:
    """Send requests at a rate that goes up and down, like that of a day."""
    model, inputs, most_per_s = caller
    number = 0
    while time.monotonic() < end_s:
        number += 1
        if model == "crashes" and number % 40 == 0:
            site.infer(model, {"WISH": ("BYTES", [1, 1], ["raise"])})
        else:
            site.infer(model, inputs)
        part = 0.55 + 0.4 * math.sin(time.monotonic() / 11 + len(model)) + random.uniform(0, 0.1)
        time.sleep(1 / (most_per_s * max(0.1, part)))


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in MODELS:
            shutil.copytree(ROOT / "examples" / "models" / model, folder / "models" / model)
        with running(folder / "models") as server:
            site = Site(server)
            end_s = time.monotonic() + seconds
            threads = [threading.Thread(target=call, args=(site, c, end_s)) for c in CALLERS]
            for thread in threads:
                thread.start()
            time.sleep(seconds / 2)
            os.kill(site.model("crashes")["instances"][0]["pid"], signal.SIGKILL)
            browser = Browser(folder)
            try:
                page = Page(browser, 1200, 800)
                page.goto(site.url)
                page.wait_for_text("#models", "primes")
                time.sleep(max(0.0, end_s - time.monotonic() - 1.0))
                TARGET.write_bytes(page.screenshot(whole=True))
            finally:
                browser.close()
            for thread in threads:
                thread.join()
    sys.stderr.write(f"{TARGET}: {TARGET.stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 185.0)
