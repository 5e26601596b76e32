"""Reads the inputs and outputs of one of moonpool's own models from its type hints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Union, get_args, get_origin

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.stub.native import hints
from moonpool.stub.native.hints import Outputs, TensorType

# The name of the output of a model that returns an array and not a dict.
ONLY_OUTPUT = "OUTPUT0"
# A parameter with the name of a Ragged input and this gets the lengths of its rows.
LENGTHS = "_lengths"

# The methods that make a class without `__call__` a model of OpenAI's API.
METHODS = ("chat", "complete", "rerank", "transcribe", "embed")


class BadHint(MoonpoolError):
    """Says why a model's signature, or one of its hints, cannot be understood."""

    code = "INVALID_ARG"


class Signature:
    """Holds the inputs and outputs of a model's `__call__`, as far as its hints name them."""

    __slots__ = ("inputs", "lengths", "outputs", "required", "takes_any", "where")

    def __init__(self, where: str) -> None:
        self.where = where
        # By parameter; None if no hint gives the datatype.
        self.inputs: dict[str, TensorType | None] = {}
        self.outputs: dict[str, TensorType] = {}
        self.required: set[str] = set()
        # Ragged inputs whose lengths the model takes, too, and the parameters for these.
        self.lengths: dict[str, str] = {}
        self.takes_any = False

    @property
    def is_batched(self) -> bool:
        tensors = (*self.inputs.values(), *self.outputs.values())
        return any(tensor is not None and hints.is_batched(tensor) for tensor in tensors)

    @property
    def ragged(self) -> dict[str, int]:
        """Return the inputs with a Ragged dimension, and the places of these."""
        found = {name: hints.ragged(tensor) for name, tensor in self.inputs.items() if tensor is not None}
        return {name: place for name, place in found.items() if place is not None}

    def take_lengths(self) -> None:
        """Tell the parameters for lengths from those for inputs, and check the outputs. Raises BadHint."""
        ragged = self.ragged
        for name in ragged:
            lengths = name + LENGTHS
            if lengths in self.inputs:
                self.lengths[name] = lengths
                del self.inputs[lengths]
                self.required.discard(lengths)
        for name, tensor in self.outputs.items():
            if hints.ragged(tensor) is not None and len(ragged) != 1:
                raise BadHint(
                    f"{self.where}: output '{name}' is {tensor!r}, and is cut as the one input that is Ragged: "
                    f"{len(ragged)} inputs are"
                )


def methods_of(model: object) -> list[str]:
    """Return the methods of OpenAI's API that a class has itself or from a base; none if it is called itself."""
    if not isinstance(model, type) or any("__call__" in vars(each) for each in model.__mro__):
        return []
    return [name for name in METHODS if callable(getattr(model, name, None))]


def signature_of(model: Callable[..., object]) -> Signature:
    """Read the hints of a class's `__call__`, or of a function. Raises BadHint."""
    import inspect  # Slow to import, and Triton's models do without it.

    is_class = isinstance(model, type)
    function = getattr(model, "__call__", None) if is_class else model  # noqa: B004 - of the class
    where = f"{getattr(function, '__qualname__', repr(model))}()"
    try:
        found = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError, NameError) as error:
        raise BadHint(f"the signature of {where} cannot be read: {error}") from error
    signature = Signature(where)
    # A decorator may have put a function of another module around it, as `torch.inference_mode` does.
    names = getattr(inspect.unwrap(function), "__globals__", {})  # type: ignore[arg-type]
    for parameter in list(found.parameters.values())[1 if is_class else 0 :]:
        if parameter.kind is parameter.VAR_KEYWORD:
            signature.takes_any = True
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise BadHint(f"{where}: '{parameter.name}' cannot be given by name, and inputs always are")
        else:
            _add_input(signature, parameter, parameter.empty, names)
    if found.return_annotation is not found.empty:
        signature.outputs = _outputs(found.return_annotation, names, where)
    signature.take_lengths()
    return signature


def _add_input(signature: Signature, parameter: object, empty: object, names: Mapping[str, object]) -> None:
    name: str = parameter.name  # type: ignore[attr-defined]
    hint: object = parameter.annotation  # type: ignore[attr-defined]
    tensor = None
    if hint is not empty:
        tensor = _tensor(hint, names, f"{signature.where}: the hint of '{name}'")
    if parameter.default is empty:  # type: ignore[attr-defined]
        signature.required.add(name)
    elif tensor is not None:
        tensor = tensor.optional()
    signature.inputs[name] = tensor


def _outputs(hint: object, names: Mapping[str, object], where: str) -> dict[str, TensorType]:
    hint = _evaluated(hint, names, f"{where}: the hint of what it returns")
    if isinstance(hint, Outputs):
        tensors: Mapping[str, object] = hint.tensors
    elif isinstance(hint, dict):
        tensors = hint
    elif isinstance(hint, type) and issubclass(hint, dict):
        # The hints of a TypedDict refer to names of the module in which it was written.
        tensors = getattr(hint, "__annotations__", {})
        names = vars(sys.modules[hint.__module__])
    else:
        tensors = {ONLY_OUTPUT: hint}
    outputs = {}
    for name, inner in tensors.items():
        tensor = _tensor(inner, names, f"{where}: the hint of output '{name}'")
        if tensor is not None:
            outputs[name] = tensor
    return outputs


def _tensor(hint: object, names: Mapping[str, object], what: str) -> TensorType | None:
    """Return the tensor of a hint, or None if the hint gives no datatype."""
    hint = _unaliased(_evaluated(hint, names, what))
    if isinstance(hint, TensorType):
        return hint
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = _tensor(arguments[0], names, what)
        # Something must stand behind the type, so `()` stands for no dimension, as in `Float32[()]`.
        dims = () if arguments[1:] == ((),) else arguments[1:]
        return None if inner is None else inner[dims]
    if origin is Union or type(hint).__name__ == "UnionType":
        others = [argument for argument in arguments if argument is not type(None)]
        inner = _tensor(others[0], names, what) if len(others) == 1 else None
        return inner if inner is None or len(arguments) == 1 else inner.optional()
    if origin is np.ndarray:
        return _of_ndarray(arguments, what)
    if hint is np.ndarray or hint is None or origin is dict or _is_any(hint):
        return None
    raise BadHint(
        f"{what} is {hint!r}; write a moonpool type such as Float32[Batch, 4], or numpy.typing's NDArray[numpy.float32]"
    )


def _of_ndarray(arguments: tuple[object, ...], what: str) -> TensorType | None:
    scalar = get_args(arguments[-1])[:1]
    if not scalar or scalar[0] is np.generic or not isinstance(scalar[0], type):
        return None
    if _is_any(scalar[0]):  # a class since Python 3.11
        return None
    for tensor in hints.TENSOR_TYPES:
        if tensor.dtype.type is scalar[0]:
            return tensor
    if scalar[0] is np.bytes_:
        return hints.Bytes
    raise BadHint(f"{what} says {scalar[0].__name__}, which no datatype has")


def _unaliased(hint: object) -> object:
    """Return the type behind an alias of the statement `type`, which numpy's NDArray is in newer versions."""
    arguments = get_args(hint)
    alias = get_origin(hint) if arguments else hint
    if type(alias).__name__ != "TypeAliasType":
        return hint
    value = alias.__value__  # type: ignore[union-attr]
    return _unaliased(value[arguments] if arguments else value)


def _evaluated(hint: object, names: Mapping[str, object], what: str) -> object:
    # `typing` wraps hints that are text. `typing.get_type_hints` would refuse hints that are no types.
    text = getattr(hint, "__forward_arg__", hint)
    if not isinstance(text, str):
        return hint
    try:
        inner = eval(text, dict(names))
    except Exception as error:
        raise BadHint(f"{what}, {text!r}, cannot be evaluated: {error}") from error
    # The result is text again if the hint has quotes in a file in which all hints are text.
    return _evaluated(inner, names, what)


def _is_any(hint: object) -> bool:
    return getattr(hint, "__name__", getattr(hint, "_name", None)) == "Any"
