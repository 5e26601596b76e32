"""Errors tell clients of a server what the model did, and nothing of the machine."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tests.server.repositories import CONFIG, ECHO, write
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

pytestmark = [pytest.mark.promise("The sandbox: `strict`", "Its error texts …")]

RAISES = ECHO.replace(
    "        return [",
    """        import os, sys
        value = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy().flat[0]
        if value == 1:
            raise ValueError(f"no file /srv/secret/weights.bin at {id(self):#x}")
        if value == 2:
            print("looked for /srv/secret/key", file=sys.stderr, flush=True)
            os._exit(3)
        return [""",
)
LEVELS = {"confined": "best-effort", "plain": "standard"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    for name, level in LEVELS.items():
        parameters = {"MOONPOOL_SANDBOX": level, "MOONPOOL_RESTART_WINDOW_S": "0.001"}
        written = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n' for key, text in parameters.items()
        )
        write(models, name, RAISES, CONFIG + written)
    with running(models) as server:
        yield server


def by_http(server: RunningServer, model: str, value: int, path: str = "infer") -> str:
    """Return the error that answers a request."""
    tensor = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}
    body: dict[str, Any] = {"id": "r7", "inputs": [tensor]}
    if path != "infer":
        body = {"IN": [value] * 4}
    status, answer = server.get(f"/v2/models/{model}/{path}", "POST", json.dumps(body).encode())
    assert status >= 400
    if isinstance(answer, str):
        answer = json.loads(answer.removeprefix("data: "))
    text: str = answer["error"]
    return text


def by_grpc(server: RunningServer, model: str, value: int, *, stream: bool = False) -> str:
    tensor = grpc_client.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
    with grpc_client.InferenceServerClient(server.grpc) as client:
        if not stream:
            with pytest.raises(grpc_client.InferenceServerException) as caught:
                client.infer(model, [tensor], request_id="r7")
            return str(caught.value.message())
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, [tensor], request_id="r7")
        error = answers.get(timeout=60)
        client.stop_stream()
        return str(error.message())


WAYS: dict[str, Any] = {
    "http": by_http,
    "generate": partial(by_http, path="generate"),
    "events": partial(by_http, path="generate_stream"),
    "grpc": by_grpc,
    "stream": partial(by_grpc, stream=True),
}


@pytest.mark.promise("What a stub says", "The text of a confined model's …")
@pytest.mark.parametrize("way", WAYS)
def test_a_confined_model_s_error_tells_nothing_of_the_machine(server: RunningServer, way: str) -> None:
    text = WAYS[way](server, "confined", 1)

    assert "no file weights.bin at 0x…" in text
    assert "model.py(" in text
    assert "/srv" not in text
    assert "/confined/1" not in text


@pytest.mark.promise("What a stub says", "Errors of other models reach clients as in Triton.")
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_model_s_error_is_as_in_triton(server: RunningServer, way: str) -> None:
    text = WAYS[way](server, "plain", 1)

    assert "no file /srv/secret/weights.bin at 0x" in text
    assert "/plain/1/model.py(" in text


@pytest.mark.promise(
    "What a stub says",
    "The last words of a process, and how it broke the protocol, appear in the log and on the page only.",
)
@pytest.mark.parametrize("model", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_process_s_last_words_are_for_the_log(server: RunningServer, way: str, model: str) -> None:
    wait_until(lambda: server.get(f"/v2/models/{model}/ready")[0] == 200)

    text = WAYS[way](server, model, 2)

    assert f"Stub process '{model}_0" in text
    assert "exited with 3" in text
    assert "secret" not in text
    assert "see the server's log" in text
    assert ("(request id: r7)" in text) == (way in ("http", "grpc", "stream"))
    server.wait_for("its last words were: looked for /srv/secret/key")


@pytest.mark.promise("What a stub says", "The last words of a process, …")
def test_the_page_has_the_whole_text(server: RunningServer) -> None:
    by_http(server, "confined", 1)

    def shown() -> str:
        return json.dumps(server.get("/v2/moonpool/overview")[1])

    wait_until(lambda: "no file /srv/secret/weights.bin" in shown())
