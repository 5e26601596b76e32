"""Models in moonpool's stubs inside a tritonserver ask for others: of their own kind, and of the server's Python
backend.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer, tensor
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.promise(
    "The wire",
    "In a tritonserver, models in moonpool's stubs and in Triton's call each other, load and "
    "unload others, and share metrics. A contained model may do only what it is granted.",
)

# The model evaluates its input, and answers with the result.
ASKS = """
import numpy as np
import triton_python_backend_utils as pb_utils

def ask(model, array, decoupled=False):
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", array)]
    )
    return request.exec(decoupled=decoupled)

def value(response):
    if response.has_error():
        return response.error().message()
    return pb_utils.get_output_tensor_by_name(response, "Y").as_numpy()

def family(name):
    return pb_utils.MetricFamily(name=name, description="told", kind=pb_utils.MetricFamily.COUNTER)

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0].decode()
            try:
                said = eval(text, globals(), {"kept": self.__dict__})
            except pb_utils.TritonModelException as error:
                said = error
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([str(said)], object))])
            )
        return responses
"""
CONFIG = """
backend: "{backend}"
input [ {{ name: "X" data_type: TYPE_STRING dims: [-1] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [-1] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{more}
"""
CONTAINED = """
parameters: { key: "MOONPOOL_SANDBOX" value: { string_value: "strict" } }
parameters: { key: "MOONPOOL_SANDBOX_MODELS" value: { string_value: "ident*" } }
"""
ASKERS = {
    "asks": ("moonpool", ""),
    "asks_too": ("moonpool", ""),
    "stock": ("python", ""),
    "contained": ("moonpool", CONTAINED),
}
Evaluate = Callable[..., str]


@pytest.fixture(scope="module")
def askers(repository: Path, server: HostingServer) -> Iterator[None]:
    """Loaded for the tests of this file."""
    client = Client(server)
    for name, (backend, more) in ASKERS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG.format(backend=backend, more=more))
        (repository / name / "1" / "model.py").write_text(ASKS)
        client.load(name)
    yield
    for name in ASKERS:
        client.unload(name)
    client.close()


@pytest.fixture
def evaluate(client: Client, askers: None) -> Evaluate:  # noqa: ARG001 - to be loaded
    def evaluate(text: str, model: str = "asks") -> str:
        (said,) = client.infer(model, np.array([text], object))
        return said.decode() if isinstance(said, bytes) else str(said)

    return evaluate


@pytest.mark.parametrize(("caller", "callee"), [("asks", "asks_too"), ("asks", "stock"), ("stock", "asks")])
def test_models_of_both_backends_ask_each_other(evaluate: Evaluate, caller: str, callee: str) -> None:
    text = f"value(ask('{callee}', np.array(['6 * 7'], object)))[0].decode()"

    assert evaluate(text, caller) == "42"


def regions(server: HostingServer) -> int:
    return Path(f"/proc/{server.pid}/maps").read_text().count("memfd:moonpool")


@pytest.mark.parametrize("count", [0, 1, 1 << 20])
def test_answers_of_other_models_arrive_whole(evaluate: Evaluate, count: int) -> None:
    array = f"np.arange({count}, dtype=np.int64).astype(np.uint8)"

    assert evaluate(f"np.array_equal(value(ask('identity', {array})), {array})") == "True"


def test_memory_of_requests_and_responses_is_used_again(evaluate: Evaluate, server: HostingServer) -> None:
    asking = "[value(ask('identity', np.ones(1 << 18, np.uint8))).sum() for _ in range(40)][-1]"
    assert evaluate(asking) == str(1 << 18)
    before = regions(server)

    assert evaluate(asking) == str(1 << 18)

    assert regions(server) <= before


def test_responses_of_a_decoupled_model_come_one_by_one(evaluate: Evaluate) -> None:
    iterating = "[int(value(each)[0]) for each in ask('counts', np.array([3]), True) if each.output_tensors()]"

    assert evaluate(iterating) == "[0, 1, 2]"
    assert "Please use 'decoupled=True'" in evaluate("value(ask('counts', np.array([3])))")


@pytest.mark.promise("Readiness", "A model that asks a model …")
def test_a_model_that_there_is_not_is_an_error(evaluate: Evaluate) -> None:
    assert evaluate("value(ask('nobody', np.array([3])))") == (
        "Model nobody - Error when running inference: Request for unknown model: 'nobody' is not found"
    )


def test_models_are_loaded_and_unloaded_by_models(evaluate: Evaluate) -> None:
    assert evaluate("pb_utils.is_model_ready('asks')") == "True"
    assert "Failed to load model: " in evaluate("pb_utils.load_model('broken')")
    assert evaluate("pb_utils.load_model('asks_too')") == "None"
    assert evaluate("pb_utils.is_model_ready('asks_too')") == "True"


def test_models_of_two_processes_have_one_metric(evaluate: Evaluate, client: Client) -> None:
    making = (
        "[kept.update(f=family('asked_total')), kept.update(m=kept['f'].Metric(labels={'a': 'b'})),"
        " kept['m'].increment(2), kept['m'].value()][-1]"
    )
    first = float(evaluate(making))

    assert float(evaluate(making, "asks_too")) == first + 2
    client.unload("asks_too")
    try:
        assert float(evaluate("[kept['m'].increment(1), kept['m'].value()][-1]")) == first + 3
    finally:
        client.load("asks_too")


@pytest.mark.promise(
    "Executing in a tritonserver",
    "In a tritonserver, too, a model's changes to metrics are there when its response arrives.",
)
def test_a_change_of_a_metric_is_there_when_the_response_is(evaluate: Evaluate, server: HostingServer) -> None:
    evaluate("[kept.update(seen=family('seen_total')), kept.update(one=kept['seen'].Metric())]")
    # So many messages come before the change that the library reads it after a pause.
    changing = "[[pb_utils.Logger.log_info('x') for _ in range(25000)], kept['one'].increment(1)]"

    for count in (1, 2):
        evaluate(changing)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
            assert f"\nseen_total {count}\n" in page.read().decode()


def test_a_contained_model_asks_for_what_it_may(evaluate: Evaluate) -> None:
    fine = "value(ask('identity', np.arange(3, dtype=np.uint8))).tolist()"

    assert evaluate(fine, "contained") == "[0, 1, 2]"
    for text in (
        "value(ask('asks', np.array(['1'], object)))",
        "pb_utils.load_model('asks_too')",
        "pb_utils.unload_model('asks_too')",
        "pb_utils.is_model_ready('asks_too')",
    ):
        assert "does not let it ask for model 'asks" in evaluate(text, "contained")
    assert "cannot bring the configuration or files of model 'identity'" in evaluate(
        "pb_utils.load_model('identity', config='{}')", "contained"
    )


@pytest.mark.promise(
    "Executing in a tritonserver",
    "The text of a contained model's error reaches clients without folders, addresses and "
    "source, and the log whole, whatever the stub does.",
)
def test_clients_of_a_contained_model_hear_of_no_folders_and_the_log_does(
    evaluate: Evaluate, repository: Path, server: HostingServer
) -> None:
    text = "open('/srv/secret/plan.txt')"

    with pytest.raises(InferenceServerException) as free:
        evaluate(text, "asks")
    with pytest.raises(InferenceServerException) as contained:
        evaluate(text, "contained")

    assert f"{repository}/asks/1/model.py(" in free.value.message()
    told = contained.value.message()
    assert "No such file or directory: 'plan.txt'" in told
    assert "  model.py(" in told
    assert str(repository) not in told
    # The launcher, another process, writes this line.
    place = f"{repository}/contained/1/model.py("
    wait_until(lambda: place in server.log(), TIMEOUT_S, "the place in the log")


@pytest.mark.promise(
    "Executing in a tritonserver",
    "If nobody waits for a batch any more, the requests that its model made to others for it are cancelled.",
)
def test_calls_of_a_model_are_cancelled_with_the_last_request_of_their_batch(
    client: Client,
    askers: None,  # noqa: ARG001 - to be loaded
    server: HostingServer,
) -> None:
    said, waited = server.log().count("was cancelled"), server.log().count("waits")
    text = "value(ask('orders', np.array(['wait'], object)))"
    asked = client.grpc.async_infer("asks", [tensor(np.array([text], object))], lambda *_: None)
    wait_until(lambda: server.log().count("waits") > waited, TIMEOUT_S, "the other to get it")

    asked.cancel()

    wait_until(lambda: server.log().count("was cancelled") > said, TIMEOUT_S, "the other to hear")
    assert client.order("nothing") > 0
