"""A real server for the tests of the page: its overview, and requests to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from tests.server.running import RunningServer


class Site:
    """A server process with an HTTP port."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.url = f"http://{server.http}"

    def overview(self) -> dict[str, Any]:
        """Return the data for the page."""
        status, shown = self.server.get("/v2/moonpool/overview?since=0")
        assert status == 200, shown
        return dict(shown)

    def model(self, name: str) -> dict[str, Any]:
        """Return the data of a model's only version."""
        (model,) = [model for model in self.overview()["models"] if model["name"] == name]
        return dict(model)

    def infer(self, name: str, inputs: Mapping[str, tuple[str, Sequence[int], list[Any]]]) -> int:
        """Send a request with datatype, shape and data of each input, and return the answer's status."""
        request = {
            "inputs": [
                {"name": name, "datatype": datatype, "shape": shape, "data": data}
                for name, (datatype, shape, data) in inputs.items()
            ]
        }
        return self.post(f"/v2/models/{quote(name)}/infer", request)

    def load(self, name: str) -> int:
        """Load a model of the repository, and return the answer's status."""
        return self.post(f"/v2/repository/models/{_quoted(name)}/load", {})

    def unload(self, name: str) -> int:
        return self.post(f"/v2/repository/models/{_quoted(name)}/unload", {})

    def post(self, path: str, body: object) -> int:
        return self.server.get(path, "POST", json.dumps(body).encode())[0]


def _quoted(name: str) -> str:
    """Quote what is not the name of a model. The server decodes nothing, and takes these signs as they are."""
    return quote(name, safe="+,=@:")
