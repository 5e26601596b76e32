"""The options that `moonpool bench` and `moonpool tune` share: what is sent, and how windows are measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moonpool.benchmarks.data import DataMix, RequestData, read_mix
from moonpool.benchmarks.loads import BadLoad
from moonpool.runtime.cli.inputs import TakesInputs, as_arrays, made_up, parse_inputs
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.client.request import QuestionTensor


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Makes requests of given values or of files, or makes them up in shapes."""

    values: dict[str, object]
    input_data: list[str]
    shapes: dict[str, tuple[int, ...]]
    batch: int

    @property
    def is_made_up(self) -> bool:
        return not (self.values or self.input_data)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> RequestSource:
        """Check and read the options of `add_requests`. Raises `UsageError`."""
        check_positive(arguments, ("batch",))
        values, shapes = parse_inputs(arguments.input), dict(map(_shape, arguments.shape))
        if values and shapes:
            raise UsageError("--shape is for made-up inputs; leave it out with --input")
        if values and arguments.input_data:
            raise UsageError("--input and --input-data are two sources of requests; give one")
        return cls(values, arguments.input_data, shapes, arguments.batch)

    def mix_for(self, interface: TakesInputs) -> DataMix:
        """Read or make up the requests for a model with these inputs. Raises `BadData`, `InvalidRequest`,
        `UsageError`.
        """
        if self.input_data:
            is_batched = bool(interface.max_batch_size)
            return read_mix(self.input_data, interface.inputs, self.shapes, is_batched=is_batched)
        arrays = as_arrays(self.values, interface) if self.values else made_up(interface, self.batch, self.shapes)
        datatypes = {tensor.name: tensor.datatype for tensor in interface.inputs}
        tensors = [QuestionTensor.of(name, datatypes[name], array) for name, array in arrays.items()]
        return DataMix([RequestData(tensors)])


# An option that may be given many times.
MANY = {"action": "append", "default": []}


def add_options(
    group: argparse._ArgumentGroup, texts: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Add options with these help texts. Each is named with its metavar; one without is a switch, or has `choices`.

    `settings` has further arguments of `add_argument`, by option.
    """
    for named, text in texts.items():
        option, _, metavar = named.partition(" ")
        given: dict[str, Any] = dict((settings or {}).get(option, {}))
        if metavar:
            given["metavar"] = metavar
        elif "choices" not in given:
            given["action"] = "store_true"
        group.add_argument(option, help=text, **given)


def add_requests(group: argparse._ArgumentGroup) -> None:
    """Add the options for `RequestSource`."""
    add_options(
        group,
        {
            "--input NAME=VALUE": "the value of an input, as NAME=JSON or NAME=@FILE.npy; by default moonpool makes "
            "inputs up from the model's metadata",
            "--input-data PATH[=WEIGHT]": "the data of requests: perf_analyzer's JSON, with validation_data if it "
            "has any, a .npz file with an array for each input, or a folder of those; given many times, they are "
            "mixed by their weights",
            "--shape NAME=N,N": "the size of a made-up input, without the batch dimension",
            "--batch N": "the number of rows in a made-up request; default %(default)s",
        },
        {"--input": MANY, "--input-data": MANY, "--shape": MANY, "--batch": {"type": int, "default": 1}},
    )


def add_sequences(group: argparse._ArgumentGroup) -> None:
    """Add --sequences, for `sequence_lengths`."""
    add_options(
        group,
        {
            "--sequences N|N-N": "send sequences of that length, or between two lengths; each connection carries one "
            "at a time"
        },
    )


def add_windows(group: argparse._ArgumentGroup, *, seconds: float, windows: int) -> None:
    """Add the options of windows, for `check_windows`, with these defaults."""
    add_options(
        group,
        {
            "--seconds S": "the length of a window; default %(default)s",
            "--warm-up S": "the seconds before the first window, which do not count; default %(default)s",
            "--windows N": "the most windows of a load; default %(default)s",
            "--stable PERCENT": "how far the last three windows may differ from their mean; default %(default)s",
        },
        {
            "--seconds": {"type": float, "default": seconds},
            "--warm-up": {"type": float, "default": 0.3},
            "--windows": {"type": int, "default": windows},
            "--stable": {"type": float, "default": 10.0},
        },
    )


def check_windows(arguments: argparse.Namespace) -> None:
    """Raises `UsageError`."""
    check_positive(arguments, ("seconds", "windows", "stable"))
    if not 0 <= arguments.warm_up < math.inf:
        raise UsageError(f"--warm-up must be 0 or more, not {arguments.warm_up}")


def check_positive(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises `UsageError` for the first of these numbers that is not finite and more than 0."""
    for name in names:
        value = getattr(arguments, name)
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, not {value}")


def sequence_lengths(text: str | None) -> tuple[int, int] | None:
    """Read the least and the greatest length of sequences, if there are any. Raises `UsageError`."""
    if text is None:
        return None
    least, dash, most = text.partition("-")
    if not least.isdecimal() or not (most.isdecimal() or not dash):
        raise UsageError(f"--sequences must be N or N-N, not {text!r}")
    lengths = int(least), int(most or least)
    if not 1 <= lengths[0] <= lengths[1]:
        raise UsageError(f"--sequences must be lengths of at least 1 that grow, not {text!r}")
    return lengths


_Value = TypeVar("_Value")


def read_option(option: str, read: Callable[[str], _Value], text: str | None) -> _Value | None:
    """Read the value of an option, if it is given. Raises `UsageError`."""
    if text is None:
        return None
    try:
        return read(text)
    except BadLoad as error:
        raise UsageError(f"{option}: {error}") from error


def whole_numbers(option: str, text: str, *, least: int) -> list[int]:
    """Read numbers with commas between them. Raises `UsageError`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(f"{option} must be whole numbers of at least {least}, separated by commas, not {text!r}")
    return numbers


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.partition("=")
    if not (name and equals):
        raise UsageError(f"--shape must be NAME=N,N, not {text!r}")
    return name, tuple(whole_numbers(f"--shape {name}", sizes, least=0))
