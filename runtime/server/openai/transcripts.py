"""The endpoint for transcriptions, and the formats of its answers.

The recording goes to the model as it came. The model answers with pieces of text. A piece with a begin and an end is a
segment; the forms with times, `srt`, `vtt` and `verbose_json`, need these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from moonpool.runtime.errors import ModelError
from moonpool.runtime.openai.endpoints import PieceEndpoint
from moonpool.runtime.openai.fields import BadField, check_transcription
from moonpool.runtime.openai.pieces import Piece
from moonpool.runtime.server.http.head import Headers
from moonpool.runtime.server.http.json_text import dumps
from moonpool.runtime.server.http.routes import RouteReply, RouteRequest
from moonpool.runtime.server.openai.asking import AnswerAccount, ModelAsker, lacks
from moonpool.runtime.server.openai.errors import NoSuchModel
from moonpool.runtime.server.openai.events import DONE, EventStream, json_reply, written
from moonpool.runtime.server.openai.multipart import read_form

_TEXT: Headers = ((b"Content-Type", b"text/plain; charset=utf-8"),)
_FILE = "file"
# A stream ends with the whole text, so it is kept, too. A segment takes some memory beside its text.
_MOST_BYTES, _PIECE_BYTES = 64 << 20, 512
_NUMBERS, _FLAGS = ("temperature",), {"true": True, "false": False, "1": True, "0": False}


class _Transcript:
    """Holds what a model has written of one recording until now."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._texts: list[str] = []
        self._language: str | None = fields.get("language")
        self._duration_s: float | None = None
        self._usage: dict[str, int] | None = None
        self.segments: list[dict[str, Any]] = []
        self.words: list[dict[str, Any]] = []
        self._held_bytes = 0
        # If a piece of text has no times.
        self._lacks_times = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, piece: Piece) -> str:
        """Keep a piece, and return its text. Raises `ModelError` for too many."""
        text: str = piece.delta.get("content", "")
        self._held_bytes += len(text) + piece.extra_bytes + _PIECE_BYTES
        if self._held_bytes > _MOST_BYTES:
            raise ModelError(f"the transcript takes more than {_MOST_BYTES} bytes")
        self._texts.append(text)
        speech = piece.speech or {}
        if "start" in speech:
            times = {"start": speech["start"], "end": speech["end"]}
            self.segments.append({"id": len(self.segments), **times, "text": text})
            self._duration_s = max(self._duration_s or 0.0, speech["end"])
        elif text:
            self._lacks_times = True
        self.words += speech.get("words", ())
        self._language = speech.get("language", self._language)
        self._duration_s = speech.get("duration", self._duration_s)
        self._usage = piece.usage or self._usage
        return text

    def timed(self, form: str) -> list[dict[str, Any]]:
        """Return the segments, for a form that needs all times. Raises `BadField`."""
        if self._lacks_times:
            raise BadField(f"the model tells no times, which '{form}' needs", ("response_format",))
        return self.segments

    def usage(self) -> dict[str, Any]:
        """Return the field with the tokens, if the model has told them."""
        if self._usage is None:
            return {}
        given, made = self._usage["prompt_tokens"], self._usage["completion_tokens"]
        counts = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
        return {"usage": {"type": "tokens", **counts}}

    def verbose(self) -> dict[str, Any]:
        """Return all that is known."""
        return {
            "task": "transcribe",
            "language": self._language,
            "duration": self._duration_s,
            "text": self.text,
            "segments": self.segments,
            **({"words": self.words} if self.words else {}),
            **self.usage(),
        }


class _TranscriptWriter:
    def __init__(self, transcript: _Transcript) -> None:
        self._transcript = transcript

    def of(self, piece: Piece, _: int) -> list[bytes]:
        """Return an event for a piece with a text."""
        text = self._transcript.add(piece)
        return [_event({"type": "transcript.text.delta", "delta": text})] if text else []

    def at_end(self, _: int) -> list[bytes]:
        """Return an event with the whole text."""
        done = {"type": "transcript.text.done", "text": self._transcript.text, **self._transcript.usage()}
        return [_event(done)]

    def last(self) -> bytes:
        """Return `DONE`."""
        return DONE


def _event(value: object) -> bytes:
    return b"data: %b\n\n" % written(value)


class _Recording(NamedTuple):
    fields: dict[str, Any]
    body: bytes
    file: bytes


class Transcriptions:
    """The endpoint. For the loop's thread."""

    def __init__(self, asker: ModelAsker) -> None:
        self._asker = asker

    async def transcribe(self, request: RouteRequest) -> RouteReply | None:
        """Transcribe a recording."""
        exchange = request.exchange
        content_type = request.header(b"content-type", "")
        fields, body, file = await request.read(lambda raw: _read_recording(content_type, raw))
        hosted, endpoint = self._asker.find_text(fields["model"], "transcribe")
        if not isinstance(endpoint, PieceEndpoint):
            raise NoSuchModel(fields["model"], why=lacks(fields["model"], "transcribe"))
        transcript = _Transcript(fields)
        with ExitStack() as closing:
            inputs = endpoint.inputs(fields, body, file)
            stream, reader = self._asker.ask_for_pieces(
                closing, request, hosted, endpoint, inputs, fields, "transcription"
            )
            exchange.cancel = closing.close
            del inputs, body, file
            exchange.body = b""
            if fields.get("stream"):
                await EventStream(request, _TranscriptWriter(transcript), [reader]).send([stream])
                return None
            account = AnswerAccount(exchange.limits.json_bytes)
            async for response in stream:
                piece = reader.piece(response)
                await account.take(response, piece.extra_bytes)
                transcript.add(piece)
        return _FORMS[fields.get("response_format") or "json"](transcript)


def _read_recording(content_type: str, raw: Any) -> _Recording:
    """Return the fields of a form, their JSON and the file. Raises `BadField`."""
    texts, files = read_form(content_type, raw)
    fields: dict[str, Any] = {name: _value(name, text) for name, text in texts.items()}
    file = files.get(_FILE)
    if file is None:
        raise BadField("Field required", (_FILE,), "missing")
    other = next((name for name in files if name != _FILE), None)
    if other is not None:
        raise BadField("is no file that this endpoint takes", (other,))
    fields["filename"] = file.name
    check_transcription(fields)
    return _Recording(fields, dumps(fields), bytes(file.content))


def _value(name: str, text: str | list[str]) -> Any:
    """Return the value that a text in a form stands for; the text itself if it stands for none."""
    if name == "stream" and isinstance(text, str):
        return _FLAGS.get(text.lower(), text)
    if name in _NUMBERS and isinstance(text, str):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, minutes = divmod(milliseconds // 60_000, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000 % 60:02d}{mark}{milliseconds % 1000:03d}"


def _cues(transcript: _Transcript, form: str, mark: str) -> Iterator[str]:
    """Return the times and the text of each segment. No text can be taken for times or for another segment."""
    for each in transcript.timed(form):
        text = " ".join(each["text"].split()).replace("-->", "->")
        yield f"{_clock(each['start'], mark)} --> {_clock(each['end'], mark)}\n{text}\n"


def _plain(text: str) -> RouteReply:
    return RouteReply(200, _TEXT, text.encode("utf-8", "replace"))


def _srt(transcript: _Transcript) -> RouteReply:
    cues = _cues(transcript, "srt", ",")
    return _plain("\n".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1)))


def _verbose(transcript: _Transcript) -> RouteReply:
    transcript.timed("verbose_json")
    return json_reply(transcript.verbose())


_FORMS: dict[str, Callable[[_Transcript], RouteReply]] = {
    "json": lambda transcript: json_reply({"text": transcript.text, **transcript.usage()}),
    "text": lambda transcript: _plain(transcript.text + "\n"),
    "srt": _srt,
    "vtt": lambda transcript: _plain("\n".join(["WEBVTT\n", *_cues(transcript, "vtt", ".")])),
    "verbose_json": _verbose,
}
