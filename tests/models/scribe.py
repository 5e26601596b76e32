"""Writes down what is said in a recording: the recording itself says it, in words of a second each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from moonpool.openai import BadRequest, Segment, TranscriptionRequest, Usage

FORGED = "a\n\n2\n00:00:00,000 --> 00:00:09,000\nb\n\ndata: [DONE]\n\n"


class Scribe:
    async def transcribe(self, request: TranscriptionRequest) -> AsyncIterator[Any]:
        words = request.file.decode("latin-1").split()
        if request.prompt == "tells":
            told = (request.filename, request.language, len(request.file), sorted(request))
            yield str(told)
        elif request.prompt == "untimed":
            yield "no "
            yield "times"
        elif request.prompt == "forges":
            yield Segment(FORGED, 0, 1)
        elif request.prompt == "refuses":
            raise BadRequest("not a recording", "file")
        elif request.prompt == "breaks":
            yield "half"
            raise ValueError("no idea")
        elif request.prompt == "wrong":
            yield {"content": "x", "start": "0", "end": 1}
        else:
            for number, word in enumerate(words):
                word_of_it = {"word": word, "start": number, "end": number + 0.5}
                yield Segment(word + " ", number, number + 0.5, [word_of_it])
            yield {"language": "en", "duration": len(words)}
            yield Usage(prompt_tokens=len(words), completion_tokens=1)
