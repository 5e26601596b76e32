"""Reads and checks the warm-up samples of a configuration. Error texts are Triton's where Triton has some.

Whether a sample fits the inputs of the model is checked when the model is loaded, as it may complete its inputs then. A
sample for a batch of 0 requests is skipped, whatever is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moonpool.runtime.model.config.schema import ONE_OF, Raw
from moonpool.runtime.model.config.source import Source, part

# The most requests that a sample without batching may put into one batch, and the most bytes of one input.
_MOST_ROWS = 4096
_MOST_BYTES = 1 << 31
# The most strings of all samples, each of one row: the runtime reads the length of each of them, one by one.
_MOST_STRINGS = 1 << 20
_KINDS = ONE_OF["ModelWarmup.Input"]


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a sample. `source` is zero_data, random_data or input_data_file, and `file` the name of the file.

    `datatype` is the wire name, or INVALID if the configuration names none: then no input of a model fits.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    source: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A batch of `batch_size` requests of one row each, which every instance executes `count` times before it is
    ready.
    """

    name: str
    batch_size: int
    count: int
    inputs: tuple[WarmupInput, ...]


def warmup_samples(raw: Raw, source: Source) -> tuple[WarmupSample, ...]:
    """Read and check the samples that are not skipped. Raises ConfigError."""
    samples = []
    strings = 0
    for index, sample in enumerate(raw["model_warmup"]):
        if sample["batch_size"] == 0:
            continue
        path = f"model_warmup[{index}]"
        if sample["batch_size"] > _MOST_ROWS:
            what = f"warmup setting has a batch of {sample['batch_size']} requests, and {_MOST_ROWS} is the most"
            source.mistake(f"{path}.batch_size", what)
        inputs = []
        for name, given in sample["inputs"].items():
            with part():
                made = _input(name, given, f"{path}.inputs[{name}]", source)
                inputs.append(made)
                strings += prod(made.dims) if made.datatype == "BYTES" else 0
                if strings > _MOST_STRINGS:
                    what = f"warmup setting asks for more than {_MOST_STRINGS} strings"
                    raise source.error(f"{path}.inputs[{name}].dims", what)
        count = max(1, sample["count"])
        samples.append(WarmupSample(sample["name"], sample["batch_size"], count, tuple(inputs)))
    return tuple(samples)


def _input(name: str, given: Raw, path: str, source: Source) -> WarmupInput:
    dims, datatype = tuple(given["dims"]), given["data_type"].removeprefix("TYPE_")
    if any(dim < 0 for dim in dims):
        what = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        raise source.error(f"{path}.dims", what)
    # 16 bytes are more than an element of any datatype has.
    if prod(dims) * 16 > _MOST_BYTES:
        what = f"warmup setting asks for more than {_MOST_BYTES} bytes for input '{name}'"
        raise source.error(f"{path}.dims", what)
    kinds = [kind for kind in _KINDS if kind in given]
    if not kinds:
        what = f"warmup setting expects input '{name}' to have input_data_type set"
        raise source.error(path, what)
    # An input has one of them: the schema checks that.
    kind = kinds[0]
    file = given[kind] if kind == "input_data_file" else ""
    if kind == "input_data_file" and (not file or "\0" in file):
        raise source.error(f"{path}.{kind}", "must be the name of a file in the folder warmup")
    return WarmupInput(name, {"STRING": "BYTES"}.get(datatype, datatype), dims, kind, file)
