"""The `onnxruntime` backend: serves ONNX graphs (`model.onnx`) on the CPU.

An example of a Python-based backend. It uses nothing but ONNX Runtime, numpy and `triton_python_backend_utils`,
so a copy of this folder in a backend directory of Triton works there, too. `batch_tensors.py` beside it has what
depends on the shapes of a whole batch.
"""

from __future__ import annotations

import json
import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils
from batch_tensors import BatchTensors, bounds

DATATYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float": "TYPE_FP32",
    "double": "TYPE_FP64",
    "string": "TYPE_STRING",
}
# For a graph whose tensors all begin with a variable dimension, if the configuration does not say.
DEFAULT_MAX_BATCH_SIZE = 4
LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
# Under moonpool, memory for an output that the runtime reads without a copy.
empty = getattr(pb_utils, "empty", np.empty)


class ModelState:
    """Holds the graph of a model, and what its configuration says of it."""

    def __init__(self, config: dict) -> None:
        self.name = config["name"]
        path = os.path.join(pb_utils.get_model_dir(), config["default_model_filename"])
        self.session = onnxruntime.InferenceSession(path, session_options(config), providers=["CPUExecutionProvider"])
        self.inputs = {tensor.name: tensor for tensor in self.session.get_inputs()}
        self.outputs = {tensor.name: tensor for tensor in self.session.get_outputs()}
        self.batches = config["max_batch_size"] > 0
        batching = config.get("sequence_batching", {})
        self.states = batching.get("state", [])
        self.batch = BatchTensors(config)
        # Inputs that are no inputs of clients: the server or this backend adds them.
        self.added = {each["name"] for each in batching.get("control_input", [])}
        self.added |= {each["input_name"] for each in self.states}
        self.added |= self.batch.input_datatypes().keys()
        self._check_batch_tensors(config)

    def _check_batch_tensors(self, config: dict) -> None:
        """Check that the graph takes ragged inputs as flat tensors, and the inputs that describe the batch."""
        ragged = [each for each in config["input"] if each["name"] in self.batch.ragged]
        for name, optional in [(each["name"], each.get("optional")) for each in ragged]:
            if name not in self.inputs:
                continue  # which `complete` refuses
            shape = [dim(size) for size in self.inputs[name].shape]
            expects = (
                f"unable to load model '{self.name}', configuration expects model provides input "
                f"with shape [-1] for ragged input '{name}', "
            )
            if optional:
                raise ValueError(expects + "which is not supported for optional input")
            if shape != [-1]:
                raise ValueError(f"{expects}model provides {shape}")
        for name, datatype in self.batch.input_datatypes().items():
            if name not in self.inputs:
                raise ValueError(f"unexpected batch input '{name}', allowed inputs are: {', '.join(self.inputs)}")
            provided = self._datatype(self.inputs[name])
            if provided != datatype:
                raise ValueError(
                    f"unable to load model '{self.name}', configuration expects datatype {datatype} "
                    f"for batch input '{name}', model provides {provided}"
                )

    def complete(self, config: pb_utils.ModelConfig) -> None:
        """Add to the configuration what it leaves out and the graph knows."""
        given = config.as_dict()
        tensors = [*self.inputs.values(), *self.outputs.values()]
        can_batch = all(tensor.shape and dim(tensor.shape[0]) == -1 for tensor in tensors)
        if self.batches and not can_batch:
            raise ValueError(
                f"autofill failed for model '{self.name}': model does not support batching while "
                "non-zero max_batch_size is specified"
            )
        if can_batch and not self.batches and not is_whole(given, self):
            config.set_max_batch_size(DEFAULT_MAX_BATCH_SIZE)
            self.batches = True
            if "sequence_batching" not in given:
                config.set_dynamic_batching()
        self._check_names("input", given["input"], self.inputs)
        self._check_names("output", given["output"], self.outputs)
        self._check_names("state input", self.states, self.inputs, "input_name")
        self._check_names("state output", self.states, self.outputs, "output_name")
        for tensor in self.inputs.values():
            if tensor.name not in self.added:
                config.add_input(self._described(tensor, given["input"]))
        # The configuration may name only some of the outputs.
        kept = {state["output_name"] for state in self.states}
        others = [name for name in self.outputs if name not in kept]
        for name in [tensor["name"] for tensor in given["output"]] or others:
            config.add_output(self._described(self.outputs[name], given["output"]))

    def _check_names(self, kind: str, given: list, known: dict, key: str = "name") -> None:
        for tensor in given:
            if tensor[key] not in known:
                raise ValueError(
                    f"unexpected inference {kind} '{tensor[key]}', allowed {kind}s are: {', '.join(known)}"
                )

    def _described(self, tensor: onnxruntime.NodeArg, given: list) -> dict:
        dims = [dim(size) for size in tensor.shape[self.batches :]]
        is_flat = tensor.name in self.batch.ragged or tensor.name in self.batch.cuts
        for other in given:
            # The configuration may narrow a variable dimension of the graph. If the graph has a flat tensor, it has all
            # dims.
            if other["name"] == tensor.name and (is_flat or fits(other["dims"], dims)):
                dims = other["dims"]
        # For the runtime, a scalar has one dimension of size 1.
        return {"name": tensor.name, "data_type": self._datatype(tensor), "dims": dims or [1]}

    def _datatype(self, tensor: onnxruntime.NodeArg) -> str:
        element = tensor.type.removeprefix("tensor(").removesuffix(")")
        if element not in DATATYPES:
            raise ValueError(f"model '{self.name}', tensor '{tensor.name}' is a {tensor.type}")
        return DATATYPES[element]


class ModelInstanceState:
    """Runs batches on one instance of a model."""

    def __init__(self, model: ModelState, config: dict) -> None:
        self.model = model
        types = {tensor["name"]: tensor["data_type"] for tensor in config["output"]}
        types.update((state["output_name"], state["data_type"]) for state in model.states)
        self.names = list(types)
        self.dtypes = {k: pb_utils.triton_string_to_numpy(v) for k, v in types.items()}

    def set_input_tensors(self, requests: list) -> dict[str, np.ndarray]:
        """Return the inputs of all requests by name. Those of a single request are not copied."""
        parts: dict[str, list[np.ndarray]] = {}
        for request in requests:
            for tensor in request.inputs():
                array, name = tensor.as_numpy(), tensor.name()
                is_ragged = name in self.model.batch.ragged
                parts.setdefault(name, []).append(array.reshape(-1) if is_ragged else array)
        inputs = {k: v[0] if len(v) == 1 else np.concatenate(v) for k, v in parts.items()}
        inputs.update(self.model.batch.input_values(requests))
        for name, array in inputs.items():
            if array.dtype == object:
                texts = [text.decode() for text in array.ravel()]
                inputs[name] = np.array(texts, object).reshape(array.shape)
            elif not self.model.inputs[name].shape:
                inputs[name] = array.reshape(())
        return inputs

    def execute(self, inputs: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        """Return the outputs by name. If the graph gives the shape of an output, it is written in place."""
        if any(array.dtype == object for array in inputs.values()):
            # ONNX Runtime cannot bind strings.
            return dict(zip(self.names, self.model.session.run(self.names, inputs)))
        binding = self.model.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        placed: dict[str, np.ndarray] = {}
        for name in self.names:
            shape = self._shape(name, rows)
            if shape is None:
                binding.bind_output(name, "cpu")
                continue
            array = placed[name] = empty(shape, self.dtypes[name])
            binding.bind_output(name, "cpu", 0, array.dtype, shape, array.ctypes.data)
        self.model.session.run_with_iobinding(binding)
        found = dict(zip(self.names, binding.get_outputs()))
        outputs = {k: placed[k] if k in placed else v.numpy() for k, v in found.items()}
        # For the runtime, a scalar has one dimension of size 1.
        return {k: v if v.ndim else v.reshape(1) for k, v in outputs.items()}

    def _shape(self, name: str, rows: int) -> list[int] | None:
        """Return the shape of an output by the graph; None if the data decides it."""
        if name in self.model.batch.cuts:
            return None
        dims = [dim(size) for size in self.model.outputs[name].shape]
        if self.model.batches:
            dims[0] = rows
        return None if -1 in dims or 0 in dims or self.dtypes[name] is np.object_ else dims

    def read_output_tensors(self, outputs: dict, requests: list, rows: list[int]) -> list:
        """Return one response for each request, with its rows of the outputs that it asks for."""
        parts = {name: self._parts(name, array, requests, rows) for name, array in outputs.items()}
        responses = []
        for index, request in enumerate(requests):
            wanted = request.requested_output_names()
            tensors = [pb_utils.Tensor(name, part[index]) for name, part in parts.items() if name in wanted]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses

    def _parts(self, name: str, array: np.ndarray, requests: list, rows: list[int]) -> list:
        """Return the part of an output that each request gets."""
        if name in self.model.batch.cuts:
            shapes = self.model.batch.output_shapes(name, requests)
            flat = array.reshape(-1)
            cuts = bounds(name, flat.size, shapes)
            return [flat[start:end].reshape(shape) for (start, end), shape in zip(cuts, shapes)]
        if not self.model.batches:
            return [array]
        if array.shape[:1] != (sum(rows),):
            raise ValueError(f"output '{name}' has shape {list(array.shape)} for a batch of {sum(rows)}")
        ends = np.cumsum(rows)
        return [array[end - count : end] for end, count in zip(ends, rows)]


class TritonPythonModel:
    """Is the class that the stub calls."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        ModelState(config.as_dict()).complete(config)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.instance = ModelInstanceState(ModelState(config), config)

    def execute(self, requests: list) -> list:
        """Join the requests of a model that takes batches; run others one after the other."""
        if not self.instance.model.batches:
            return [self._run([request], [1])[0] for request in requests]
        rows = [request.inputs()[0].shape()[0] for request in requests]
        return self._run(requests, rows)

    def _run(self, requests: list, rows: list[int]) -> list:
        outputs = self.instance.execute(self.instance.set_input_tensors(requests), sum(rows))
        return self.instance.read_output_tensors(outputs, requests, rows)


def session_options(config: dict) -> onnxruntime.SessionOptions:
    """Make ONNX Runtime's options from the parameters and the optimization level of a configuration."""
    parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    if parameters.get("execution_mode") == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = parameters.get("enable_mem_arena", "1") != "0"
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "1") != "0"
    level = config.get("optimization", {}).get("graph", {}).get("level", 0)
    if level not in LEVELS:
        raise ValueError(f"optimization.graph.level must be -1, 0, 1 or 2, not {level}")
    options.graph_optimization_level = LEVELS[level]
    return options


def dim(size: object) -> int:
    """Return a dimension of a graph as the configuration writes it: -1 if it is variable."""
    return size if isinstance(size, int) else -1


def fits(dims: list[int], graph: list[int]) -> bool:
    return len(dims) == len(graph) and all(there in (-1, here) for here, there in zip(dims, graph))


def is_whole(config: dict, model: ModelState) -> bool:
    """Return whether the configuration gives a tensor all dimensions of the graph, the first one included."""
    known = {**model.inputs, **model.outputs}
    return any(
        tensor["name"] in known and len(tensor["dims"]) == len(known[tensor["name"]].shape)
        for tensor in (*config["input"], *config["output"])
        if tensor["dims"]
    )
