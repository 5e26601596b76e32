"""The models that the tests of Ray serve: each does one thing that may go wrong on the way to a replica."""

from __future__ import annotations

from pathlib import Path

_HEAD = "import os\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"
# Doubles X, and says which process did it.
_DOUBLE = """
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if np.isnan(x).any():
                os._exit(3)
            if np.isinf(x).any():
                responses.append(pb_utils.InferenceResponse([], pb_utils.TritonError("no infinity")))
                continue
            pid = np.full((x.shape[0], 1), os.getpid(), np.int64)
            tensors = [pb_utils.Tensor("Y", x * 2), pb_utils.Tensor("PID", pid)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
# Asks `double` in the same replica.
_ASKS = """
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            asked = pb_utils.InferenceRequest(
                model_name="double", requested_output_names=["Y", "PID"], inputs=[x]
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            responses.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return responses
"""
# Sends as many responses as X says.
_REPEATS = """
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            sender = request.get_response_sender()
            for number in range(count):
                out = pb_utils.Tensor("Y", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Adds up the numbers of each sequence.
_SUMS = """
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().any()
            key = request.correlation_id()
            self.sums[key] = (0 if start else self.sums[key]) + float(x.sum())
            out = np.array([[self.sums[key]]], np.float32)
            pid = np.full((1, 1), os.getpid(), np.int64)
            tensors = [pb_utils.Tensor("Y", out), pb_utils.Tensor("PID", pid)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
# Waits for a file `go` in the folder of the model.
_WAITS = """
    def initialize(self, args):
        self.go = os.path.join(args["model_repository"], "go")

    def execute(self, requests):
        import time

        while not os.path.exists(self.go):
            time.sleep(0.01)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(each, "X").as_numpy() * 2)]
            )
            for each in requests
        ]
"""
_STEP = (
    '{ model_name: "double" model_version: -1 input_map { key: "X" value: "%s" } output_map { key: "Y" value: "%s" } }'
)
_X = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ %s ] } ]\n'
_Y = 'output [ { name: "Y" data_type: TYPE_FP32 dims: [ %s ] } %s]\n'
_PID = ', { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] } '
_RETRY = 'parameters { key: "MOONPOOL_RETRY" value: { string_value: "yes" } }\n'
_BATCHES = "max_batch_size: 8\n" + _X % "-1" + _Y % ("-1", _PID)
_DYNAMIC = "dynamic_batching { }\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n"
# Speaks OpenAI's API: says each word of the last message.
_SPEAKS = """
import asyncio


class Speaks:
    async def chat(self, request):
        for word in request.messages[-1]["content"].split():
            yield word + " "
            await asyncio.sleep(0)

    def embed(self, texts):
        return [[len(text), 0.5] for text in texts]
"""
MODELS = {
    "speaks": (_SPEAKS, ""),
    "double": (_DOUBLE, _BATCHES + _DYNAMIC + _RETRY),
    # The same, without the word that it may be executed twice.
    "once": (_DOUBLE, _BATCHES + _DYNAMIC),
    "asks": (_ASKS, _BATCHES + _DYNAMIC),
    "waits": (_WAITS, _X % "2" + _Y % ("2", "") + "instance_group [ { count: 1 kind: KIND_CPU } ]\n"),
    # An ensemble: `double` after `double`.
    "twice": (
        "",
        "max_batch_size: 8\n" + _X % "-1" + _Y % ("-1", "")
        + "ensemble_scheduling { step [ " + _STEP % ("X", "half") + ", " + _STEP % ("half", "Y") + " ] }\n",
    ),
    "repeats": (_REPEATS, "model_transaction_policy { decoupled: true }\n" + _X % "1" + _Y % ("1", "")),
    "sums": (
        _SUMS,
        "max_batch_size: 1\n" + _X % "1" + _Y % ("1", _PID)
        + 'sequence_batching { max_sequence_idle_microseconds: 600000000 oldest { max_candidate_sequences: 64 } '
        'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ] }\n'
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n",
    ),
}  # fmt: skip


def write_models(folder: Path, *names: str) -> Path:
    """Write these models, or all, as a repository, and return its folder."""
    for name in names or MODELS:
        code, config = MODELS[name]
        (folder / name / "1").mkdir(parents=True)
        if code:
            (folder / name / "1" / "model.py").write_text(code if "class " in code else _HEAD + code)
        kind = 'backend: "python"\n' if code else 'platform: "ensemble"\n'
        (folder / name / "config.pbtxt").write_text(kind + config)
    return folder
