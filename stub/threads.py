"""moonpool's own threads in a stub: none of them ends unnoticed."""

from __future__ import annotations

import os
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def end_process() -> NoReturn:
    """End with the exception that is handled as the last words.

    For what others wait for and will not come, as where there is no memory: the runtime tells them, and starts the
    stub anew. Any thread may call it.
    """
    try:
        traceback.print_exc()
    finally:
        os._exit(1)


def start(work: Callable[[], object], name: str) -> threading.Thread:
    """Do this on a thread that does not keep the process; the process ends if it raises.

    Raises RuntimeError where there is no thread to be had.
    """

    def run() -> None:
        try:
            work()
        except BaseException:
            end_process()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
