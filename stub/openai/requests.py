"""Defines the requests that the methods of a model get: the body that the client sent, with names for the usual fields.

The server has checked the fields that OpenAI's API knows. All others are there as the client sent them, and nothing is
refused because it is unknown. A field that is null counts as absent for the attributes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moonpool.stub.openai.pieces import BadRequest

# The JSON form of an object.
Json = dict[str, Any]


def _never() -> bool:
    return False


class OpenAIRequest(Mapping[str, Any]):
    """Is the body of a request: a mapping of its fields, which are read when the first one is asked for.

    Not thread-safe before that. The model may keep it for as long as it likes, and must not change it.
    """

    __slots__ = ("_fields", "_is_cancelled", "_text", "id", "parameters")

    def __init__(
        self,
        body: bytes | str | Json,
        *,
        request_id: str = "",
        is_cancelled: Callable[[], bool] = _never,
        parameters: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        """Take the body as JSON or as its fields. Tests make requests so, with `ChatRequest({"messages": […]})`."""
        self._text = b"" if isinstance(body, dict) else body
        self._fields: Json | None = body if isinstance(body, dict) else None
        self._is_cancelled = is_cancelled
        # The id by which the log and the client know the request.
        self.id = request_id
        # Headers that the server passes on (`--http-header-forward-pattern`), by the names that the client wrote.
        self.parameters = parameters or {}

    def _all(self) -> Json:
        fields = self._fields
        if fields is None:
            try:
                fields = self._fields = json.loads(self._text)
            except RecursionError:
                raise BadRequest("the body is nested too deeply") from None
            self._text = b""
        return fields

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._all()!r:.200})"

    @property
    def is_cancelled(self) -> bool:
        """Return whether the client has left. A coroutine is cancelled then, others may look from time to time."""
        return self._is_cancelled()

    @property
    def model(self) -> str:
        """Return the name of the model, as the client wrote it."""
        return str(self["model"])

    @property
    def user(self) -> str | None:
        """Return the name that the client gave for its own user."""
        found: str | None = self.get("user")
        return found


class _Generation(OpenAIRequest):
    """Holds what both kinds of requests for text have."""

    __slots__ = ()

    @property
    def stream(self) -> bool:
        """Return whether the client reads piece by piece. A model may yield pieces in any case."""
        return bool(self.get("stream"))

    @property
    def temperature(self) -> float | None:
        """Return a number from 0 to 2."""
        return self._number("temperature")

    @property
    def top_p(self) -> float | None:
        """Return a number from 0 to 1."""
        return self._number("top_p")

    @property
    def frequency_penalty(self) -> float | None:
        """Return a number from -2 to 2."""
        return self._number("frequency_penalty")

    @property
    def presence_penalty(self) -> float | None:
        """Return a number from -2 to 2."""
        return self._number("presence_penalty")

    def _number(self, name: str) -> float | None:
        found = self.get(name)
        return None if found is None else float(found)

    @property
    def seed(self) -> int | None:
        """Return a 64-bit integer."""
        found: int | None = self.get("seed")
        return found

    @property
    def max_tokens(self) -> int | None:
        """Return the most tokens of the answer; None leaves that to the model."""
        found: int | None = self.get("max_completion_tokens")
        return self.get("max_tokens") if found is None else found

    @property
    def choices(self) -> int:
        """Return how many answers the client wants (`n`). A model that gives several marks pieces with their index."""
        return int(self.get("n") or 1)

    @property
    def stop(self) -> list[str]:
        """Return the texts at which the model ends the answer."""
        found = self.get("stop")
        return [found] if isinstance(found, str) else list(found or ())


class ChatRequest(_Generation):
    """Is a request for the next message of a chat."""

    __slots__ = ()

    @property
    def messages(self) -> list[Json]:
        """Return the messages: objects with a `role`, and a `content` that is a text or a list of parts."""
        found: list[Json] = self["messages"]
        return found

    @property
    def tools(self) -> list[Json]:
        """Return the tools that the model may call."""
        return list(self.get("tools") or ())

    @property
    def tool_choice(self) -> str | Json:
        """Return "auto", "none", "required" or the object that names one tool."""
        return self.get("tool_choice") or ("auto" if self.get("tools") else "none")

    @property
    def response_format(self) -> Json:
        """Return the form of the answer, such as `{"type": "json_schema", "json_schema": …}`."""
        return self.get("response_format") or {"type": "text"}

    @property
    def top_logprobs(self) -> int:
        """Return how many alternatives each token's `logprobs` should have."""
        return int(self.get("top_logprobs") or 0)


class CompletionRequest(_Generation):
    """Is a request to go on with a text."""

    __slots__ = ()

    @property
    def prompt(self) -> str | list[int]:
        """Return the text, or the ids of its tokens. A client's list of prompts comes as one request each."""
        found: str | list[int] = self["prompt"]
        return found

    @property
    def suffix(self) -> str | None:
        """Return the text that follows the wanted one."""
        found: str | None = self.get("suffix")
        return found

    @property
    def echo(self) -> bool:
        """Return whether the answer should begin with the prompt."""
        return bool(self.get("echo"))


class RerankRequest(OpenAIRequest):
    """Is a request to score documents for a query."""

    __slots__ = ()

    @property
    def query(self) -> str:
        """Return the text that documents are compared with."""
        return str(self["query"])

    @property
    def documents(self) -> list[str]:
        """Return the texts of the documents, in the client's order."""
        return [each["text"] if isinstance(each, dict) else each for each in self["documents"]]


class TranscriptionRequest(OpenAIRequest):
    """Is a request to transcribe a recording. The fields are those of the form beside the file."""

    __slots__ = ("file",)

    def __init__(
        self,
        body: bytes | str | Json,
        *,
        request_id: str = "",
        is_cancelled: Callable[[], bool] = _never,
        parameters: Mapping[str, str | int | float | bool] | None = None,
        file: bytes = b"",
    ) -> None:
        super().__init__(body, request_id=request_id, is_cancelled=is_cancelled, parameters=parameters)
        # The recording, as the client sent it.
        self.file = file

    @property
    def filename(self) -> str:
        """Return the name that the client gave for the file, whose ending tells its format."""
        return str(self.get("filename") or "")

    @property
    def language(self) -> str | None:
        """Return the language, as "en"; None leaves it to the model."""
        found: str | None = self.get("language")
        return found

    @property
    def prompt(self) -> str:
        """Return a text whose style the transcription follows."""
        return str(self.get("prompt") or "")


KINDS: dict[str, type[OpenAIRequest]] = {
    "chat": ChatRequest,
    "complete": CompletionRequest,
    "rerank": RerankRequest,
    "transcribe": TranscriptionRequest,
}
"""The class of the requests that each method gets. `embed` gets texts instead."""
