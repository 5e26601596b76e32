"""A model behind a server's address, pressed by processes of their own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from moonpool.runtime.bench.connection import Unreachable
from moonpool.runtime.bench.crew import Crew
from moonpool.runtime.bench.desk import Refused, desk, understood
from moonpool.runtime.bench.digests import of_configuration
from moonpool.runtime.bench.interface import Interface, interface
from moonpool.runtime.bench.question import Place, Question, Tensor
from moonpool.runtime.bench.region import Region
from moonpool.runtime.bench.split import between

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.runtime.bench.endpoint import Endpoint
    from moonpool.runtime.bench.load import Load
    from moonpool.runtime.bench.window import Window

# Callers beyond these write their outputs where others do.
_OUTPUT_REGIONS = 16


class Server:
    """One model of one server. `prepare` comes before the first window; `close` takes back what was registered.

    Every method raises `Refused` and `Unreachable`. For one thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        version: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        timeout_s: float,
    ) -> None:
        self.where = endpoint.url
        self.scheme = endpoint.scheme
        self._endpoint = endpoint
        self._model, self._version = model, version
        self._headers = headers
        self._timeout_s = timeout_s
        self._most_connections = 1
        self._desk = desk(endpoint, headers, timeout_s)
        self._crew: Crew | None = None
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._desk.close)

    def interface(self) -> Interface:
        with understood(f"what {self.where} says of model '{self._model}'"):
            return interface(self._desk, self._model, self._version)

    def configuration_fields(self) -> dict[str, str] | None:
        """Ask for the model's configuration, and return digests of its fields; None if the server has no such extension."""
        with understood(f"the configuration that {self.where} tells"):
            found = self._desk.configuration(self._model, self._version)
            return None if found is None else of_configuration(found)

    def prepare(
        self,
        inputs: Sequence[Tensor],
        *,
        processes: int,
        most_connections: int,
        shared_memory: bool = False,
        is_stream: bool = False,
        is_json: bool = False,
    ) -> None:
        """Make the requests, ask the first one, and start the processes.

        `most_connections` are as many as any load will need.
        """
        question = Question(self._model, self._version, inputs, is_json=is_json)
        questions = [question]
        self._most_connections = most_connections
        if not is_stream:
            with understood(f"the answer of {self.where} to a request"):
                sizes = self._desk.output_sizes(question)
            if shared_memory:
                questions = self._in_shared_memory(
                    question, sizes, min(most_connections, _OUTPUT_REGIONS)
                )
        if self._endpoint.scheme == "http":
            requests = [each.as_http(self._endpoint, self._headers) for each in questions]
        else:
            requests = [each.as_grpc(is_stream=is_stream) for each in questions]
        self._crew = Crew(
            self._endpoint,
            requests,
            processes=processes,
            timeout_s=self._timeout_s,
            is_stream=is_stream,
            headers=self._headers,
        )
        self._cleanup.callback(self._crew.close)

    def _in_shared_memory(
        self, question: Question, sizes: Mapping[str, int], count: int
    ) -> list[Question]:
        """One region for the inputs of all callers, and one for the outputs of each."""
        contents = b"".join(tensor.data for tensor in question.inputs)
        inputs = self._registered(len(contents), contents)
        input_sizes = {tensor.name: len(tensor.data) for tensor in question.inputs}
        input_places = _places(inputs, input_sizes)
        questions = []
        for _ in range(count):
            outputs = self._registered(sum(sizes.values()))
            questions.append(
                Question(
                    question.model,
                    question.version,
                    question.inputs,
                    input_places,
                    _places(outputs, sizes),
                )
            )
        return questions

    def _registered(self, size_bytes: int, contents: bytes = b"") -> Region:
        region = Region(size_bytes, contents)
        self._cleanup.callback(region.close)
        self._desk.register(region.name, region.key, region.size_bytes)
        self._cleanup.callback(self._unregister, region)
        return region

    def _unregister(self, region: Region) -> None:
        # A server that is gone knows it no more.
        with contextlib.suppress(Refused, Unreachable):
            self._desk.unregister(region.name)

    def window(self, load: Load, seconds: float) -> Window:
        if self._crew is None:
            raise ValueError("the requests are not prepared")
        before = self._statistics()
        found = self._crew.window(load, seconds, self._most_connections)
        after = self._statistics()
        with understood(f"the statistics of {self.where}"):
            found.split = between(before, after)
        return found

    def _statistics(self) -> Mapping[str, Any] | None:
        with understood(f"the statistics of {self.where}"):
            return self._desk.statistics(self._model, self._version)

    def close(self) -> None:
        self._cleanup.close()


def _places(region: Region, sizes: Mapping[str, int]) -> dict[str, Place]:
    """Back to back."""
    places, offset = {}, 0
    for name, size in sizes.items():
        places[name] = Place(region.name, offset, size)
        offset += size
    return places
