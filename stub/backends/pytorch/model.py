"""The `pytorch` backend: serves TorchScript (`model.pt`) and programs of `torch.export` (`model.pt2`).

An example of a Python-based backend. It uses nothing but PyTorch, numpy and `triton_python_backend_utils`, so a copy of
this folder in a backend directory of Triton works there, too. `batch_tensors.py` beside it has what depends on the
shapes of a whole batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re

import torch
import triton_python_backend_utils as pb_utils
from batch_tensors import BatchTensors, bounds

DTYPES = {
    "TYPE_BOOL": torch.bool,
    "TYPE_UINT8": torch.uint8,
    "TYPE_INT8": torch.int8,
    "TYPE_INT16": torch.int16,
    "TYPE_INT32": torch.int32,
    "TYPE_INT64": torch.int64,
    "TYPE_FP16": torch.float16,
    "TYPE_BF16": torch.bfloat16,
    "TYPE_FP32": torch.float32,
    "TYPE_FP64": torch.float64,
}


class ModelState:
    """Holds the module of a model, and what its configuration says of it."""

    def __init__(self, config: dict) -> None:
        self.name = config["name"]
        self.batches = config["max_batch_size"] > 0
        self.parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = {tensor["name"]: tensor["data_type"] for tensor in config["output"]}
        self.batch = BatchTensors(config)
        self.inputs += self.batch.input_datatypes()
        self._add_sequences(config.get("sequence_batching", {}))
        named = [(tensor["name"], tensor["data_type"]) for tensor in config["input"]]
        for name, datatype in (*named, *self.outputs.items()):
            if datatype not in DTYPES:
                raise ValueError(f"model '{self.name}', tensor '{name}': PyTorch has no datatype {datatype}")
        path = os.path.join(pb_utils.get_model_dir(), config["default_model_filename"])
        if not os.path.exists(path) and path.endswith(".pt"):
            path += "2"
        self.module, self.arguments, self.takes_dict = load(path)
        self.positions = self._positions()

    def _add_sequences(self, batching: dict) -> None:
        """Add the inputs and outputs that the server adds for sequences: controls, then states."""
        self.inputs += [each["name"] for each in batching.get("control_input", [])]
        for state in batching.get("state", []):
            self.inputs.append(state["input_name"])
            self.outputs.setdefault(state["output_name"], state["data_type"])

    def flag(self, key: str, default: bool) -> bool:
        return self.parameters.get(key, str(default)).lower() in ("true", "1")

    def _positions(self) -> dict[str, int]:
        """Assign inputs to arguments: by `<name>__<index>`, by argument name, or else in order."""
        if all(index_of(name) is not None for name in self.inputs):
            found = {name: index_of(name) for name in self.inputs}
        elif set(self.inputs) <= set(self.arguments):
            found = {name: self.arguments.index(name) for name in self.inputs}
        else:
            found = {name: index for index, name in enumerate(self.inputs)}
        wrong = [name for name, index in found.items() if index >= len(self.arguments)]
        if not self.takes_dict and (wrong or len(set(found.values())) < len(found)):
            raise ValueError(
                f"model '{self.name}' has inputs {self.inputs}, and its forward takes "
                f"({', '.join(self.arguments)}); name them so, or <name>__<index>"
            )
        return found


class ModelInstanceState:
    """Runs batches on one instance of a model."""

    def __init__(self, model: ModelState) -> None:
        self.model = model
        self.guard = torch.no_grad
        if model.flag("INFERENCE_MODE", True):
            self.guard = torch.inference_mode
        self.optimized = not model.flag("DISABLE_OPTIMIZED_EXECUTION", False)

    def set_input_tensors(self, requests: list) -> dict[str, torch.Tensor]:
        """Return the inputs of all requests by name. Those of a single request are not copied."""
        parts: dict[str, list[torch.Tensor]] = {}
        for request in requests:
            for each in request.inputs():
                tensor, name = torch.from_dlpack(each), each.name()
                is_ragged = name in self.model.batch.ragged
                parts.setdefault(name, []).append(tensor.reshape(-1) if is_ragged else tensor)
        inputs = {k: v[0] if len(v) == 1 else torch.cat(v) for k, v in parts.items()}
        for name, values in self.model.batch.input_values(requests).items():
            inputs[name] = torch.from_numpy(values)
        return inputs

    def execute(self, inputs: dict[str, torch.Tensor]) -> object:
        optimized = contextlib.nullcontext()
        if not self.optimized:
            optimized = torch.jit.optimized_execution(False)
        with self.guard(), optimized:
            if self.model.takes_dict:
                return self.model.module(inputs)
            arguments = [None] * (1 + max(self.model.positions[name] for name in inputs))
            for name, tensor in inputs.items():
                arguments[self.model.positions[name]] = tensor
            return self.model.module(*arguments)

    def read_output_tensors(self, result: object, requests: list, rows: list[int]) -> list:
        """Return one response for each request, with its rows of the outputs that it asks for."""
        parts = {name: self._parts(result, name, requests, rows) for name in self.model.outputs}
        responses = []
        for index, request in enumerate(requests):
            wanted = request.requested_output_names()
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor.from_dlpack(name, part[index]) for name, part in parts.items() if name in wanted]
                )
            )
        return responses

    def _parts(self, result: object, name: str, requests: list, rows: list[int]) -> list:
        """Return the part of an output that each request gets."""
        tensor = self._output(result, name)
        if name in self.model.batch.cuts:
            shapes = self.model.batch.output_shapes(name, requests)
            flat = tensor.reshape(-1)
            cuts = bounds(name, flat.numel(), shapes)
            return [flat[start:end].reshape(shape) for (start, end), shape in zip(cuts, shapes)]
        if not self.model.batches:
            return [tensor]
        if tensor.dim() == 0 or tensor.shape[0] != sum(rows):
            raise ValueError(f"output '{name}' has shape {list(tensor.shape)} for a batch of {sum(rows)}")
        return list(tensor.split(rows))

    def _output(self, result: object, name: str) -> torch.Tensor:
        if isinstance(result, dict) and name in result:
            tensor = result[name]
        else:
            values = [result] if isinstance(result, torch.Tensor) else list(result)
            if isinstance(result, dict):
                values = list(result.values())
            index = index_of(name)
            if index is None:
                index = list(self.model.outputs).index(name)
            if index >= len(values):
                raise ValueError(f"the model has {len(values)} outputs and none for '{name}'")
            tensor = values[index]
        expected = self.model.outputs[name]
        if tensor.dtype != DTYPES[expected]:
            provided = next((k for k, v in DTYPES.items() if v == tensor.dtype), str(tensor.dtype))
            raise ValueError(
                f"configuration expects datatype {expected} for output '{name}', model provides {provided}"
            )
        return tensor.detach().contiguous()


class TritonPythonModel:
    """Is the class that the stub calls."""

    def initialize(self, args: dict[str, str]) -> None:
        model = ModelState(json.loads(args["model_config"]))
        if "INTRA_OP_THREAD_COUNT" in model.parameters:
            torch.set_num_threads(int(model.parameters["INTRA_OP_THREAD_COUNT"]))
        if "INTER_OP_THREAD_COUNT" in model.parameters:
            torch.set_num_interop_threads(int(model.parameters["INTER_OP_THREAD_COUNT"]))
        self.instance = ModelInstanceState(model)

    def execute(self, requests: list) -> list:
        """Join the requests of a model that takes batches; run others one after the other."""
        if not self.instance.model.batches:
            return [self._run([request], [1])[0] for request in requests]
        rows = [request.inputs()[0].shape()[0] for request in requests]
        return self._run(requests, rows)

    def _run(self, requests: list, rows: list[int]) -> list:
        result = self.instance.execute(self.instance.set_input_tensors(requests))
        return self.instance.read_output_tensors(result, requests, rows)


def load(path: str) -> tuple:
    """Load a file. Returns the module, the names of its arguments, and whether it takes one dict of tensors."""
    if path.endswith(".pt2"):
        program = torch.export.load(path)
        positional, named = program.example_inputs
        takes_dict = len(positional) == 1 and isinstance(positional[0], dict)
        if named:
            raise ValueError(f"{path} was exported with keyword arguments; use positional ones")
        return program.module(), list(program.graph_signature.user_inputs), takes_dict
    module = torch.jit.load(path, map_location="cpu").eval()
    arguments = module.forward.schema.arguments[1:]
    takes_dict = len(arguments) == 1 and str(arguments[0].type).startswith("Dict[str, Tensor")
    return module, [argument.name for argument in arguments], takes_dict


def index_of(name: str) -> int | None:
    """Return the index in a name such as `INPUT__0`."""
    match = re.fullmatch(r".+__(\d+)", name)
    return None if match is None else int(match.group(1))
