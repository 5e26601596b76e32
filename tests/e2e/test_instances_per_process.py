"""Tests of models of which one process has several instances."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import options, tensor
from tests.waiting import wait_until

import moonpool
from moonpool import StubDied

COUNT = 3
MODEL = """
import json, os, signal, threading
import numpy as np
import triton_python_backend_utils as pb_utils

# They are together inside `execute`, or nobody leaves it.
together = threading.Barrier(3, timeout=60)
FOLDER = os.path.dirname(__file__)

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        if os.path.exists(f"{FOLDER}/fails") and self.name.endswith(".2"):
            raise ValueError("on purpose")
        self.threads = set()

    def execute(self, requests):
        responses = []
        self.threads.add(threading.get_ident())
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            if code == "meet":
                together.wait()
            elif code == "raise":
                raise ValueError("on purpose")
            elif code == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif code == "ask":
                asked = pb_utils.InferenceRequest(model_name="m", requested_output_names=["SAID"], inputs=[pb_utils.Tensor("CODE", np.array([b"say"], object))])
                assert asked.exec().error() is None
            said = json.dumps([self.name, os.getpid(), len(self.threads), threading.get_ident()])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], object))]))
        return responses

    def is_ready(self):
        return not os.path.exists(f"{FOLDER}/busy{self.name}")

    def finalize(self):
        open(f"{FOLDER}/ended{self.name}", "w").close()
"""
CONFIG = {"input": [tensor("CODE", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
NAMES = ["m_0", "m_0.1", "m_0.2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return file


@pytest.fixture(params=["standard", "strict"])
def runtime(request: pytest.FixtureRequest, model: Path) -> Iterator[moonpool.Runtime]:
    given = options(INSTANCES_PER_PROCESS=COUNT, SANDBOX=request.param, RESTART_BACKOFF_S=0)
    if request.param == "strict":
        model.parent.chmod(0o777)
        given["parameters"] |= options(SANDBOX_PATHS=f"rw:{model.parent}", SANDBOX_MODELS="m")["parameters"]
    with moonpool.Runtime(sandbox_grants=["m"]) as runtime:
        runtime.load("m", model, config=CONFIG | given)
        yield runtime


def ask(runtime: moonpool.Runtime, code: str) -> Future[moonpool.Response]:
    return runtime.submit("m", {"CODE": [code]})


def said(future: Future[moonpool.Response]) -> list[object]:
    found: list[object] = list(json.loads(future.result(60.0).outputs["SAID"][0]))
    return found


@pytest.mark.promise(
    "Responses at any time",
    "Several instances of a model may share a process: each has its own object, name and thread, and their batches "
    "overlap.",
)
def test_instances_of_one_process_execute_at_the_same_time(runtime: moonpool.Runtime) -> None:
    # Each of these waits for the others inside `execute`.
    together = [said(each) for each in [ask(runtime, "meet") for _ in range(COUNT)]]
    alone = [said(ask(runtime, "say")) for _ in range(2 * COUNT)]

    assert sorted(str(each[0]) for each in together) == NAMES
    assert len({each[1] for each in together}) == 1
    # Batches that come alone reach all in turn, each on the thread that it always has.
    assert sorted(str(each[0]) for each in alone) == sorted(NAMES * 2)
    assert {each[2] for each in alone} == {1}
    assert len({each[3] for each in alone}) == COUNT
    assert len(runtime.instances("m")) == 1


@pytest.mark.promise("Responses at any time", "An error of one instance of a process is that of its batch alone.")
def test_an_error_is_that_of_its_batch(runtime: moonpool.Runtime) -> None:
    bad, good = ask(runtime, "raise"), [ask(runtime, "say") for _ in range(5)]

    with pytest.raises(moonpool.MoonpoolError, match=r"for model 'm_0[.12]*', message: ValueError: on purpose"):  # fmt: skip
        bad.result(60.0)
    assert {len(said(each)) for each in good} == {4}


def test_instances_of_a_process_ask_each_other(runtime: moonpool.Runtime) -> None:
    assert {len(said(each)) for each in [ask(runtime, "ask") for _ in range(2)]} == {4}


@pytest.mark.promise("Lifecycle", "If one instance of a process ends, all of that process end, and start again.")  # fmt: skip
def test_all_of_a_process_end_together(runtime: moonpool.Runtime) -> None:
    pid = said(ask(runtime, "say"))[1]

    with pytest.raises(StubDied):
        ask(runtime, "die").result(60.0)

    wait_until(lambda: runtime.is_ready("m"))
    found = [said(ask(runtime, "say")) for _ in range(COUNT)]
    assert sorted(str(each[0]) for each in found) == NAMES
    assert pid not in {each[1] for each in found}


def test_all_are_asked_if_they_are_ready_and_finalized(runtime: moonpool.Runtime, model: Path) -> None:
    assert runtime.is_ready("m")
    (model.parent / f"busy{NAMES[1]}").touch()
    assert not runtime.is_ready("m")
    (model.parent / f"busy{NAMES[1]}").unlink()

    runtime.unload("m")

    wait_until(lambda: len(list(model.parent.glob("ended*"))) == COUNT)
    assert sorted(path.name for path in model.parent.glob("ended*")) == [f"ended{each}" for each in NAMES]  # fmt: skip


def test_no_object_is_finalized_while_one_executes(tmp_path: Path) -> None:
    """The request has no caller any more, as the unload does not wait for it."""
    file = tmp_path / "model.py"
    file.write_text(
        "import os, time\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n"
        "FOLDER = os.path.dirname(__file__)\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        if os.path.exists(FOLDER + '/inside'):\n"
        "            said = pb_utils.Tensor('SAID', np.array([b'no'], object))\n"
        "            return [pb_utils.InferenceResponse([said]) for _ in requests]\n"
        "        open(FOLDER + '/inside', 'w').close()\n"
        "        while not os.path.exists(FOLDER + '/go'):\n"
        "            time.sleep(0.001)\n"
        "        os.rename(FOLDER + '/inside', FOLDER + '/left')\n"
        "        return [None for _ in requests]\n"
        "    def finalize(self):\n"
        "        open(FOLDER + '/ended', 'a').write(str(os.path.exists(FOLDER + '/left')))\n"
    )
    with moonpool.Runtime(drain_timeout_s=0.0) as runtime:
        runtime.load("m", file, config=CONFIG | options(INSTANCES_PER_PROCESS=2))
        asked = ask(runtime, "say")
        wait_until(lambda: (tmp_path / "inside").exists())
        # When another request is answered, the first one is known to be on a thread of its own, where nobody ends it.
        assert ask(runtime, "say").result(60.0).outputs["SAID"][0] == b"no"
        unloading = threading.Thread(target=runtime.unload, args=("m",))
        unloading.start()
        with pytest.raises(moonpool.ModelUnavailable):
            asked.result(60.0)
        (tmp_path / "go").touch()
        unloading.join(60.0)

    assert (tmp_path / "ended").read_text() == "TrueTrue"


def test_a_load_fails_if_one_of_them_cannot_be_initialized(model: Path) -> None:
    (model.parent / "fails").touch()
    with moonpool.Runtime() as runtime, pytest.raises(moonpool.LoadFailed, match="ValueError: on purpose"):
        runtime.load("m", model, config=CONFIG | options(INSTANCES_PER_PROCESS=COUNT))


def test_models_with_sequences_are_refused(model: Path) -> None:
    sequences = {"max_batch_size": 1, "sequence_batching": {}}
    config = CONFIG | options(INSTANCES_PER_PROCESS=2) | sequences
    with (
        moonpool.Runtime() as runtime,
        pytest.raises(moonpool.MoonpoolError, match="cannot be above 1 for m, whose sequences"),
    ):
        runtime.load("m", model, config=config)


def test_a_coroutine_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("class TritonPythonModel:\n    async def execute(self, requests):\n        return []\n")  # fmt: skip
    with moonpool.Runtime() as runtime:
        runtime.load("m", file, config=CONFIG | options(INSTANCES_PER_PROCESS=2))
        with pytest.raises(moonpool.MoonpoolError, match="must not be a coroutine where MOONPOOL"):
            ask(runtime, "say").result(60.0)


def test_each_object_is_warmed_up(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import os\n"
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        "        self.name = args['model_instance_name']\n"
        "    def execute(self, requests):\n"
        "        open(os.path.join(os.path.dirname(__file__), 'warm' + self.name), 'a').write('x')\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', r.inputs()[0].as_numpy())]) for r in "
        "requests]\n"
    )
    sample = {"name": "S", "batch_size": 1, "count": 2, "inputs": {"X": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}}}  # fmt: skip
    config = {"input": [tensor("X", "FP32", 1)], "output": [tensor("Y", "FP32", 1)], "model_warmup": [sample]}  # fmt: skip
    with moonpool.Runtime() as runtime:
        runtime.load("m", file, config=config | options(INSTANCES_PER_PROCESS=COUNT))

        assert [(tmp_path / f"warm{name}").read_text() for name in NAMES] == ["xx"] * COUNT
        assert runtime.infer("m", {"X": np.ones(1, np.float32)})["Y"] == 1
