"""`moonpool infer`: one request to one model, of a repository or behind a server's address."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.inputs import as_arrays, parse_endpoint, parse_header, parse_inputs
from moonpool.runtime.cli.shared import UsageError, add_repository, check_no_hosting, hosting_of, session
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.signature import RequestOptions
from moonpool.runtime.process.terminal import harmless

# The wait for a server's answer if the command line names no time.
_PATIENCE_S = 60.0

HELP = "send one request to a model and print its answer"
DESCRIPTION = """\
Send one request to a model, and print its outputs or write them to files. With REPO, the model is loaded for this
request. With --url, any server of the KServe v2 protocol gets the request. The responses of a
decoupled model are printed as they arrive. A request to a model with sequences is a whole sequence, unless --sequence
is given.

An input is JSON, or @ and a .npy file. A model with batches takes rows: [[1, 2]] is one row of two elements.
"""
EXAMPLES = """\
examples:
  moonpool infer models add_sub --input 'INPUT0=[[1,2,3,4]]' --input 'INPUT1=[[5,6,7,8]]'
  moonpool infer models normalise --input X=@rows.npy --output-dir results
  moonpool infer add_sub --url http://localhost:8000 --input 'INPUT0=[[1,2,3,4]]' --input 'INPUT1=[[5,6,7,8]]'
  moonpool infer models primes --input 'LIMIT=[[100]]' --json
  moonpool infer counter --url grpc://localhost:8001 --sequence 7 --sequence-start --input 'X=[[1]]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_repository(parser, is_optional=True)
    parser.add_argument("model", metavar="MODEL", help="the model's name")
    parser.add_argument(
        "--url", metavar="URL", help="send the request to this server: http://HOST:PORT or grpc://HOST:PORT"
    )
    parser.add_argument(
        "--header",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="with --url: send this header with the request; may be given many times",
    )
    parser.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="the value of an input, as NAME=JSON or NAME=@FILE.npy; once for each input",
    )
    _add_sequence(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--output-dir",
        metavar="DIR",
        help="write each output to DIR/NAME.npy, those of a decoupled model to DIR/1/NAME.npy, DIR/2/NAME.npy and so "
        "on",
    )
    where.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with all outputs by name, in a line for each response",
    )
    parser.add_argument("--version", metavar="N", type=int, help="the version of the model; default the latest")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        help="wait at most this many seconds for the answer; default 60 with --url, else no limit",
    )


def _add_sequence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequence", metavar="ID", help="the id of the sequence that the request is part of")
    parser.add_argument("--sequence-start", action="store_true", help="the request is the first of its sequence")
    parser.add_argument("--sequence-end", action="store_true", help="the request is the last of its sequence")


def _sequence(options: argparse.Namespace, *, has_sequences: bool) -> tuple[int | str, bool, bool] | None:
    """Return the id of the request's sequence, and whether it starts and ends there; None for no sequence."""
    if options.sequence is not None:
        is_number = options.sequence.isascii() and options.sequence.isdecimal()
        identity = int(options.sequence) if is_number else options.sequence
        return identity, options.sequence_start, options.sequence_end
    # Others may have sequences in the same server. The number fits every datatype that a model may take it in.
    return (1 + secrets.randbelow(2**31 - 1), True, True) if has_sequences else None


def run(options: argparse.Namespace) -> int:
    values = parse_inputs(options.input)
    if options.timeout is not None and not options.timeout > 0:
        raise UsageError(f"--timeout must be more than 0 seconds, not {options.timeout:g}")
    _check_place(options)
    if options.url is not None:
        _ask(options, values)
        return 0
    with session(options.repository, hosting_of(options), verbose=options.verbose) as runtime:
        runtime.load(options.model)
        config = runtime.config(options.model, options.version)
        part: RequestOptions = {"outputs_in": "cpu"}
        sequence = _sequence(options, has_sequences=config.sequence_batching is not None)
        if sequence is not None:
            part["correlation_id"], starts, ends = sequence
            part["flags"] = starts + 2 * ends
        responses = runtime.stream(
            options.model, as_arrays(values, config), version=options.version, timeout_s=options.timeout, **part
        )
        with responses:
            for number, response in enumerate(responses, 1):
                place = number if config.decoupled else 0
                _deliver(options, response.outputs, datatypes_of(config), place)
    return 0


def _check_place(options: argparse.Namespace) -> None:
    if options.sequence is None and (options.sequence_start or options.sequence_end):
        raise UsageError("--sequence-start and --sequence-end need --sequence")
    if options.url is None:
        if options.repository is None:
            raise UsageError("say where the model is: REPO MODEL, or MODEL --url URL")
        if options.header:
            raise UsageError("--header needs --url")
        return
    if options.repository is not None:
        raise UsageError("with --url the server has the model: leave out the repository")
    check_no_hosting(options)


def _ask(options: argparse.Namespace, values: Mapping[str, object]) -> None:
    """Ask a server's model, and deliver each of its responses."""
    from moonpool.runtime.client.control_client import control_client, interface, understood
    from moonpool.runtime.client.request import Question, QuestionTensor

    endpoint = parse_endpoint("--url", options.url)
    headers = [parse_header(text) for text in options.header]
    version = "" if options.version is None else str(options.version)
    asked = control_client(endpoint, headers, options.timeout or _PATIENCE_S)
    try:
        with understood(f"what {endpoint.url} says of model '{options.model}'"):
            taken = interface(asked, options.model, version, with_optional=True)
        arrays = as_arrays(values, taken)
        datatypes = {tensor.name: tensor.datatype for tensor in taken.inputs}
        inputs = [QuestionTensor.of(name, datatypes[name], array) for name, array in arrays.items()]
        sequence = _sequence(options, has_sequences=taken.has_sequences)
        question = Question(options.model, version, inputs, sequence=sequence)
        with understood(f"the answer of {endpoint.url}"):
            responses = asked.stream(question) if taken.decoupled else [asked.infer(question)]
            for number, outputs in enumerate(responses, 1):
                found = {output.name: output.array() for output in outputs}
                kinds = {output.name: output.datatype for output in outputs}
                _deliver(options, found, kinds, number if taken.decoupled else 0)
    finally:
        asked.close()


def _deliver(
    options: argparse.Namespace, outputs: dict[str, NDArray[Any]], datatypes: Mapping[str, str], number: int
) -> None:
    """Print or write one response. `number` is that of a decoupled model's response, counted from 1, else 0."""
    if options.output_dir is not None:
        folder = Path(options.output_dir)
        _write(outputs, folder / str(number) if number else folder)
    else:
        show_response(outputs, datatypes, number, as_json=options.json)


def show_response(
    outputs: Mapping[str, NDArray[Any]], datatypes: Mapping[str, str], number: int, *, as_json: bool
) -> None:
    """Print a response, each output under a line with its name, datatype and shape. `number` is as in `_deliver`."""
    if as_json:
        print(json.dumps({name: plain(array) for name, array in outputs.items()}), flush=True)
        return
    if number:
        print(f"response {number}")
    for name, array in outputs.items():
        shape = ",".join(map(str, array.shape))
        print(harmless(f"{name}  {datatypes.get(name, array.dtype)} [{shape}]"))
        print(array)
    sys.stdout.flush()


def datatypes_of(config: ModelConfig) -> dict[str, str]:
    """Return the datatypes of a model's outputs by name."""
    return {tensor.name: tensor.datatype for tensor in config.outputs}


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def plain(array: NDArray[Any]) -> object:
    """Return values that JSON can hold.

    Bytes become text, as UTF-8 where they are that. NaN and infinities become the texts "NaN", "Infinity" and
    "-Infinity", as in the JSON of protocol buffers.
    """
    values = [
        item.decode("utf-8", "backslashreplace")
        if isinstance(item, bytes)
        else _NOT_FINITE.get(str(item), item)
        if isinstance(item, float)
        else item
        for item in array.ravel().tolist()
    ]
    return np.array(values, dtype=object).reshape(array.shape).tolist()


def _write(outputs: dict[str, NDArray[Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in outputs.items():
        # The name is the model's, which may not choose where files go.
        if "/" in name or "\0" in name or name in (".", ".."):
            raise MoonpoolError(f"the output {name!r} has a name that no file can have")
        path = folder / f"{name}.npy"
        np.save(path, _storable(name, array), allow_pickle=False)
        print(harmless(str(path)), file=sys.stdout)


def _storable(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Bytes as numpy's fixed-length kind, the only one that a .npy file takes without pickle."""
    if array.dtype != object:
        return array
    fixed = array.astype(np.bytes_)
    if not np.array_equal(fixed.astype(object), array):
        raise MoonpoolError(
            f"output '{name}' has texts that end with a zero byte, which a .npy file does not keep; "
            "print it with --json"
        )
    return fixed
