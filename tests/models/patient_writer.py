"""Answers one chat at a time: with its begin and end, or with the headers of the request."""

from __future__ import annotations

import time
from collections.abc import Iterator

from moonpool.openai import ChatRequest


class PatientWriter:
    max_batch_size = 1

    def chat(self, request: ChatRequest) -> Iterator[str]:
        what = request.messages[-1]["content"]
        if what == "headers":
            yield str(sorted(request.parameters.items()))
        elif what == "waits":
            yield "begun"
            while not request.is_cancelled:
                time.sleep(0.001)
        elif what == "hangs":
            time.sleep(60)
        else:
            began = time.monotonic()
            time.sleep(0.002)
            yield f"{began} {time.monotonic()}"
