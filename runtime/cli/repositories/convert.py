"""`moonpool convert`: makes safetensors of the pickled weights of a model of the Hub, once and contained.

The pickles are read by a process at the sandbox level `strict`, which hands over the bytes of tensors. All that is
written is written here: the list of tensors is checked, the bytes are counted, and the folder gets its name at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.shared import UsageError, session
from moonpool.runtime.model.config.model import name_problem
from moonpool.runtime.model.config.options import PICKLED_WEIGHTS, TASK
from moonpool.runtime.process.files import RepositoryError, bounded_json
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.repository.cloud_address import is_address, is_hub_root
from moonpool.runtime.repository.hub_model import HubModel, as_text
from moonpool.runtime.repository.repository import HubRepository

HELP = "turn pickled weights of a model of the Hub into safetensors"
DESCRIPTION = """\
Read the pickled weights of a model in a process at the sandbox level strict, and write them as safetensors, with the
model's other files, as a model in FOLDER. `moonpool serve FOLDER --sandbox strict` serves it, and nothing is unpickled
again. docs/STRANGERS.md has the rest.
"""
EXAMPLES = """\
examples:
  moonpool convert hf://owner/model models               # says the commit that the grant must name
  moonpool convert hf://owner/model models --pickled-weights 0123456789abcdef0123456789abcdef01234567
"""
_PIECE_BYTES = 16 << 20
_MOST_LIST_BYTES, _MOST_TENSORS, _LONGEST_NAME, _MOST_DIMENSIONS = 32 << 20, 100_000, 1000, 64
# Tensors may share memory in a pickle, and never in safetensors.
_GROWTH, _SPARE_BYTES = 2, 1 << 20
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_SIZES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
# Asks the process of the model: the file, the number of the tensor, the first byte and the count.
_Ask = Callable[[str, int, int, int], bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="hf://OWNER/MODEL", help="the model, with @REVISION for another than main")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of models; made if missing")
    parser.add_argument(
        "--pickled-weights", metavar="COMMIT", default="", help="the commit whose pickles may be read, in 40 hex digits"
    )
    parser.add_argument(
        "--task", metavar="TASK", default="", help="what it will be served for, if config.json says none"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        default="",
        help="of the process that reads, such as 8G; default half of the machine's",
    )


def run(options: argparse.Namespace) -> int:
    if not is_address(options.address) or not is_hub_root(options.address):
        raise UsageError(f"the address must be hf://OWNER/MODEL, not {options.address!r:.200}")
    said = {PICKLED_WEIGHTS: options.pickled_weights, TASK: options.task}
    limits = {"MOONPOOL_LOAD_TIMEOUT_S": "600"}
    limits |= {"MOONPOOL_MEMORY_LIMIT_BYTES": options.memory} if options.memory else {}
    repository = HubRepository(options.address)
    try:
        if problem := name_problem(repository.name):
            raise UsageError(problem)
        target = options.folder / repository.name
        if os.path.lexists(target):
            raise UsageError(f"{target} is there already")
        model = repository.describe(said)
        if not model.pickles:
            raise RepositoryError(f"{model.address} has its weights in safetensors: there is nothing to convert")
        with session(None, verbose=options.verbose) as runtime:
            copied = repository.copy(model.as_conversion())
            runtime.load("conversion", copied.path, sandbox="strict", options=limits)

            def ask(file: str, number: int, start: int, count: int) -> bytes:
                place = np.array([number, start, count], np.int64)
                return bytes(runtime.infer("conversion", {"FILE": [file], "PLACE": place})["PIECE"])

            write_model(target, model, copied.version_directory(1), ask)
    finally:
        repository.close()
    Terminal(sys.stdout).line(harmless(f"{target}: {as_text(model)}, now without pickles"))
    return 0


def write_model(target: Path, model: HubModel, source: Path, ask: _Ask) -> None:
    """Write the folder of the model. If anything fails, nothing is left."""
    is_new = not target.parent.exists()
    target.parent.mkdir(exist_ok=True)
    # Names that begin with a dot are no models.
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made.chmod(0o755)
        (made / "config.pbtxt").write_text(model.converted_config())
        _write_version(made / "1", model, source, ask)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # another conversion has put a model there
                target.parent.rmdir()
        raise


def _write_version(version: Path, model: HubModel, source: Path, ask: _Ask) -> None:
    version.mkdir()
    for file in model.files:
        if file.path.endswith((".bin", ".bin.index.json")):
            continue
        path = version / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file.path, path)
    places: dict[str, str] = {}
    total = 0
    for file in model.files:
        if file.path not in model.pickles:
            continue
        tensors = _listed(file.path, ask(file.path, -1, 0, 0), _GROWTH * file.size_bytes + _SPARE_BYTES)
        name = f"{file.path.removesuffix('.bin').replace('pytorch_model', 'model', 1)}.safetensors"
        with open(version / name, "xb") as target:
            _write_tensors(target, file.path, tensors, ask)
        if both := places.keys() & {each.name for each in tensors}:
            raise MoonpoolError(f"two files have the tensor {min(both)!r:.200}")
        places |= {each.name: name for each in tensors}
        total += sum(each.size_bytes for each in tensors)
    if len(model.pickles) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (version / "model.safetensors.index.json").write_text(json.dumps(index))


class _Tensor(NamedTuple):
    name: str
    kind: str
    shape: list[int]

    @property
    def size_bytes(self) -> int:
        return _SIZES[self.kind] * math.prod(self.shape)


def _listed(file: str, text: bytes, most_bytes: int) -> list[_Tensor]:
    """Return the tensors that a process says a file has. Raises `MoonpoolError` for what no file has."""
    try:
        if len(text) > _MOST_LIST_BYTES:
            raise ValueError(f"it has {len(text):,} bytes")
        found = bounded_json(text, 20 * _MOST_TENSORS)
        if not isinstance(found, list) or not 0 < len(found) <= _MOST_TENSORS:
            raise ValueError("it has no tensors, or too many")
        tensors = [_tensor(each) for each in found]
        if len({each.name for each in tensors}) != len(tensors):
            raise ValueError("it has a name twice")
    except ValueError as error:
        raise MoonpoolError(f"{file}: the list of tensors is wrong: {error}") from None
    size_bytes = sum(each.size_bytes for each in tensors)
    if size_bytes > most_bytes:
        raise MoonpoolError(
            f"{file}: its tensors have {size_bytes:,} bytes, and for its size {most_bytes:,} are the most"
        )
    return tensors


def _tensor(said: object) -> _Tensor:
    name, kind, shape = said if isinstance(said, list) and len(said) == 3 else (None, None, None)
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or name == "__metadata__":
        raise ValueError("a tensor has no fitting name")
    if not isinstance(kind, str) or kind not in _SIZES:
        raise ValueError(f"{name!r:.200} has the datatype {str(kind)!r:.50}")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name!r:.200} has no shape")
    if any(type(each) is not int or not 0 <= each < 1 << 48 for each in shape):
        raise ValueError(f"{name!r:.200} has a dimension that is not a size")
    return _Tensor(name, kind, shape)


def _write_tensors(target: BinaryIO, file: str, tensors: list[_Tensor], ask: _Ask) -> None:
    """Write a file of safetensors. Larger kinds come first, so that all tensors are aligned."""
    order = sorted(range(len(tensors)), key=lambda number: -_SIZES[tensors[number].kind])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number in order:
        each = tensors[number]
        header[each.name] = {"dtype": each.kind, "shape": each.shape, "data_offsets": [at, at + each.size_bytes]}
        at += each.size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)
    for number in order:
        size_bytes = tensors[number].size_bytes
        for start in range(0, size_bytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, size_bytes - start)
            piece = ask(file, number, start, count)
            if len(piece) != count:
                raise MoonpoolError(
                    f"{file}: {len(piece):,} bytes came of {tensors[number].name!r:.200}, not {count:,}"
                )
            target.write(piece)
