"""Lists all but inference over HTTP: one line a case. What a case changes in a server, its last requests undo."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from moonpool.runtime.conformance.tensors import GOOD, KEY, KEY_BYTES, A, B, Json, output, shared
from moonpool.runtime.conformance.wire import Http, get, infer, post

Case = tuple[str, list[Http]]
SOURCE = (Path(__file__).parent / "models" / "add_sub" / "1" / "model.py").read_bytes()


def _gets(*paths: str) -> list[Case]:
    return [(f"GET {path}", [get(path)]) for path in paths]


def _methods(path: str, *methods: str) -> list[Case]:
    return [(f"{method} {path}", [Http(method, path)]) for method in methods]


def _posts(path: str, *bodies: Any) -> list[Case]:
    return [(f"{path} {body!r}"[:110], [post(path, body)]) for body in bodies]


_MODEL = "/v2/models/add_sub"
METADATA: list[Case] = [
    *_gets("/v2/health/live", "/v2/health/ready", "/v2/health/live?x=1", "/v2/health/live/"),
    *_methods("/v2/health/live", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"),
    *_gets("/v2/", "/v2/health", "/v2/nothing", "//v2", "/V2", "/v2/models/"),
    *_methods("/v2", "POST"),
    *_gets(_MODEL, f"{_MODEL}/", "/v2/models/batched", "/v2/models/sums", "/v2/models/every"),
    *_gets("/v2/models/nope", "/v2/models/broken", "/v2/models/add%5Fsub", "/v2/models/a%0Ab"),
    *_gets("/v2/models/..%2fx", "/v2/models/%00", "/v2/models/%ff", "/v2/models/a/b/c"),
    *_methods(_MODEL, "POST", "PUT"),
    *[
        case
        for version in ("1", "01", "0", "2", "x", "-1", "1.0", "1x", "%31", "9" * 20, "")
        for case in _gets(f"{_MODEL}/versions/{version}", f"{_MODEL}/versions/{version}/ready")
    ],
    *_gets(f"{_MODEL}/ready", "/v2/models/nope/ready", "/v2/models/broken/ready"),
    *_methods(f"{_MODEL}/ready", "POST"),
    *_gets(f"{_MODEL}/config", "/v2/models/batched/config", "/v2/models/every/config"),
    *_gets("/v2/models/sums/config", "/v2/models/repeat/config", "/v2/models/nope/config"),
    *_gets(f"{_MODEL}/versions/2/config", f"{_MODEL}/versions/{'9' * 20}/config"),
    *_gets("/v2/models/nope/stats", f"{_MODEL}/versions/2/stats", f"{_MODEL}/stats/x"),
    *_methods("/v2/models/stats", "POST"),
    *_gets(f"{_MODEL}/infer", f"{_MODEL}/versions/1/infer", f"{_MODEL}/nothing"),
    *_methods(f"{_MODEL}/infer/", "POST"),
]

WHICH_MODEL: list[Case] = [
    (f"infer {which}", [post(f"/v2/models/{which}/infer", GOOD)])
    for which in (
        "add_sub/versions/1",
        "add_sub/versions/2",
        "add_sub/versions/0",
        "add_sub/versions/x",
        f"add_sub/versions/{'9' * 20}",
        "nope",
        "broken",
        "%00",
    )
]
WHICH_MODEL += [
    ("an unknown model and no JSON", [infer("nope", b"x")]),
    *[
        (f"fails {how}", [infer("fails", {"id": "7",
            "inputs": [{"name": "HOW", "shape": [1], "datatype": "BYTES", "data": [how]}]})])
        for how in ("raise", "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED",
            "ALREADY_EXISTS", "CANCELLED")
    ],
    ("one response of a decoupled model", [infer("repeat",
        {"inputs": [{"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]}]})]),
]  # fmt: skip


def _says(way: str, *bodies: Any) -> list[Case]:
    return _posts(f"/v2/models/says/{way}", *bodies)


_HI = {"text_input": "hi"}
GENERATE: list[Case] = [
    *_says("generate", _HI, {**_HI, "id": "5"}, {**_HI, "id": 5}, {**_HI, "count": 0}),
    *_says("generate", {**_HI, "count": 2}, {**_HI, "count": -1}, {**_HI, "count": "1"}),
    *_says("generate", {"text_input": ["hi"]}, {"text_input": ["a", "b"]}, {"text_input": 1}),
    *_says("generate", {"text_input": {}}, {"text_input": None}, {"text_input": [["a"]]}, {}, []),
    *_says("generate", {"text_input": "ü\n"}, b"x", b""),
    *_says("generate", b'{"text_input":"a","text_input":"b"}', b'{"text_input":"a","p":1,"p":2}'),
    *_says("generate", b'{"text_input":"a","parameters":{"p":1,"p":2}}'),
    *_says("generate", b'{"text_input":"a","parameters":{"p":1},"parameters":{"q":2}}'),
    *_says("generate", b'{"text_input":"a","id":"1","id":"2"}'),
    *_says("generate_stream", b'{"text_input":"a","text_input":"b"}'),
    *_says("generate", {**_HI, "parameters": {"a": 1, "b": "s"}}, {**_HI, "parameters": []}),
    *_says("generate", {**_HI, "parameters": {"a": [1]}}, {**_HI, "parameters": {"triton_x": 1}}),
    *_says("generate", {**_HI, "a": 1, "b": True, "c": 1.5, "d": "s"}, {**_HI, "sequence_id": 5}),
    *_says("generate", {**_HI, "a": [1]}, {**_HI, "a": None}, {**_HI, "a": {"x": 1}}),
    *_says("generate", {**_HI, "outputs": ["text_output"]}, {**_HI, "inputs": []}),
    *_says("versions/1/generate", _HI),
    *_says("versions/2/generate", _HI),
    *_says("generate_stream", _HI, {**_HI, "count": 2}, {**_HI, "count": 0}, {**_HI, "count": -1}),
    *_says("generate_stream", {}, {"text_input": 1}, {"text_input": "hi\n", "id": "9"}, b"x"),
    *_posts("/v2/models/nope/generate", _HI),
    *_posts("/v2/models/nope/generate_stream", _HI),
    *_gets("/v2/models/says/generate", "/v2/models/says/generate_stream"),
    *_posts("/v2/models/add_sub/generate", {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}),
    *_posts("/v2/models/add_sub/generate_stream", {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}),
    *_posts("/v2/models/batched/generate", {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}),
    *_posts("/v2/models/batched/generate", {"INPUT0": [[1, 2, 3, 4]], "INPUT1": [[1] * 4]}),
    *_posts("/v2/models/told/generate", {"X": 1.5, "y": 1, "parameters": {"z": 2}}),
    *_posts("/v2/models/told/generate", {"X": 1.5, "priority": 1, "timeout": 5000000}),
    *_posts("/v2/models/told/generate", {"X": True}),
    *_says(
        "generate",
        {"parameters": _HI},
        {**_HI, "parameters": _HI},
        b'{"parameters":{"text_input":"a"},"text_input":"b"}',
    ),
    *_says("generate", {**_HI, "parameters": {"count": 2}}, {**_HI, "parameters": {"count": "no number"}}),
    *_says("generate", {**_HI, "parameters": {"count": [1], "temperature": 0}}, {**_HI, "parameters": {"id": "7"}}),
    *_says("generate", {**_HI, "parameters": {"parameters": {"a": 1}}}, {**_HI, "parameters": {"parameters": 1}}),
    *_says("generate_stream", {**_HI, "parameters": {"count": 2}}),
    *_posts("/v2/models/add_sub/generate", {"parameters": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}),
    *_posts("/v2/models/every/generate", {"IN_FP16": 1.5}, {"IN_BOOL": True}, {"IN_FP64": [1, 2.5]}),
    *_posts("/v2/models/every/generate", {"IN_STRING": ["a", "b"]}),
    *_posts("/v2/models/fails/generate", {"HOW": "raise"}, {"HOW": "NOT_FOUND"}),
    *_posts("/v2/models/fails/generate_stream", {"HOW": "NOT_FOUND"}),
    *_posts("/v2/models/repeat/generate_stream", {"COUNT": 3}, {"COUNT": 2, "FAIL": True}),
    ("generate, packed", [post("/v2/models/says/generate", _HI, Content_Encoding="gzip")]),
    ("generate, accepting gzip", [post("/v2/models/says/generate", _HI, Accept_Encoding="gzip")]),
]

_REGIONS = "/v2/systemsharedmemory"
_FORGET = post(f"{_REGIONS}/unregister")
_R: Json = {"key": KEY, "offset": 0, "byte_size": KEY_BYTES}
_REGISTER = post(f"{_REGIONS}/region/r/register", _R)


def _registered(title: str, *requests: Http) -> Case:
    return title, [_REGISTER, *requests, _FORGET]


def _lent(title: str, **parameters: Any) -> list[Case]:
    """Make cases with the first input in shared memory, and with the first output."""
    to = {"shared_memory_region": "r", "shared_memory_byte_size": 16, **parameters}
    back = [output("OUTPUT0", **to)]
    return [
        _registered(f"input: {title}", infer("add_sub", {"inputs": [shared("INPUT0", **parameters), B]})),
        _registered(f"output: {title}", infer("add_sub", {**GOOD, "outputs": back})),
    ]  # fmt: skip


SHARED_MEMORY: list[Case] = [
    *_gets(f"{_REGIONS}/status", f"{_REGIONS}/region/r/status", f"{_REGIONS}/nothing"),
    *_methods(f"{_REGIONS}/status", "POST"),
    *_methods(f"{_REGIONS}/region/r/register", "GET"),
    *[
        (f"register {change!r}", [post(f"{_REGIONS}/region/r/register", {**_R, **change}), _FORGET])
        for change in (
            {"byte_size": "64"}, {"byte_size": -1}, {"byte_size": 0}, {"byte_size": 65}, {"byte_size": 4097},
            {"byte_size": 2**63}, {"offset": 32}, {"offset": 4096, "byte_size": 1}, {"offset": -1}, {"offset": "0"},
            {"key": 1}, {"key": ""}, {"key": "/moonpool_protocol_nothing"}, {"key": "/../etc/passwd"}, {"key": "/a/b"},
            {"more": 1}, {"offset": 16, "byte_size": 16},
        )
    ],
    *_posts(f"{_REGIONS}/region/r/register", {"byte_size": 64}, {"key": KEY}, b"x", b"", []),
    _registered("its status", get(f"{_REGIONS}/status"), get(f"{_REGIONS}/region/r/status")),
    _registered("the status of another", get(f"{_REGIONS}/region/s/status")),
    _registered("twice", _REGISTER),
    _registered("let go of twice", *[post(f"{_REGIONS}/region/r/unregister")] * 2),
    _registered("let go of another", post(f"{_REGIONS}/region/s/unregister"), get(f"{_REGIONS}/status")),
    *_lent("as it should be"),
    *_lent("of nobody", shared_memory_region="nope"),
    *_lent("without a name", shared_memory_region=""),
    *_lent("named by a number", shared_memory_region=1),
    *_lent("beyond the end", shared_memory_offset=56),
    *_lent("at the end", shared_memory_offset=64),
    *_lent("far away", shared_memory_offset=2**63),
    *_lent("around the corner", shared_memory_offset=2**64 - 8),
    *_lent("before the start", shared_memory_offset=-1),
    *_lent("offset as text", shared_memory_offset="0"),
    *_lent("size as text", shared_memory_byte_size="16"),
    *_lent("too small", shared_memory_byte_size=8),
    *_lent("larger than needed", shared_memory_byte_size=32),
    *_lent("larger than it is", shared_memory_byte_size=65),
    *_lent("with binary data", binary_data=True),
    *_lent("with a binary size", binary_data_size=16),
    *_lent("with classes", classification=1),
    _registered("with data", infer("add_sub", {"inputs": [{**shared("INPUT0"), "data": [1] * 4}, B]})),
    _registered("without a size", infer("add_sub", {"inputs": [{**A, "parameters": {"shared_memory_region": "r"}},
        B]})),
    _registered(
        "what one request writes the next one reads",
        infer("add_sub", {**GOOD, "outputs": [output("OUTPUT0", shared_memory_region="r", shared_memory_byte_size=16,
            shared_memory_offset=32)]}),
        infer("add_sub", {"inputs": [shared("INPUT0", shared_memory_offset=32), B]}),
    ),
    *_gets("/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/r/status"),
    *_posts("/v2/cudasharedmemory/region/r/register", {}, b"x"),
    *_methods("/v2/cudasharedmemory/unregister", "POST"),
]  # fmt: skip

_INDEX = "/v2/repository/index"
_LOAD, _UNLOAD = (f"/v2/repository/models/loadable/{what}" for what in ("load", "unload"))
_GONE = [post(_UNLOAD), infer("loadable", GOOD)._replace(until=404)]


# Triton counts a batch when its requests have been answered.
_STATISTICS = get("/v2/models/loadable/versions/3/stats")._replace(has=b'"execution_count":2')


def config(**more: Any) -> str:
    """Return the configuration of add_sub, as a client may send it."""
    sides = {
        side: [{"name": f"{side.upper()}{i}", "data_type": "TYPE_FP32", "dims": [4]} for i in (0, 1)]
        for side in ("input", "output")
    }  # fmt: skip
    return json.dumps({"backend": "python", **sides, "instance_group": [{"kind": "KIND_CPU"}], **more})


def _loaded(title: str, parameters: Any, *requests: Http) -> Case:
    return title, [post(_LOAD, {"parameters": parameters}), *requests, *_GONE]


_FILE = base64.b64encode(SOURCE).decode()
_SEVEN = {"config": config(version_policy={"specific": {"versions": [7]}}), "file:7/model.py": _FILE}
REPOSITORY: list[Case] = [
    *_posts(_INDEX, {"ready": True}, {"ready": "x"}, b"x"),
    *_methods(_INDEX, "GET"),
    *_methods(_LOAD, "GET"),
    *_posts("/v2/repository/models/nope/load", b""),
    *_posts("/v2/repository/models/%2e%2e/load", b""),
    *_posts("/v2/repository/x/models/add_sub/load", b""),
    *_posts("/v2/repository/models/nope/unload", b"", {"parameters": {"unload_dependents": True}}, b"x"),
    (
        "load, look, use, unload, look",
        [
            post(_LOAD), get("/v2/models/loadable"), get("/v2/models/loadable/versions/3"), infer("loadable", GOOD),
            post("/v2/models/loadable/versions/1/infer", GOOD), *_GONE, infer("loadable", GOOD),
            get("/v2/models/loadable"),
        ],
    ),
    (
        "statistics of what was used",
        [post(_LOAD), infer("loadable", GOOD), infer("loadable", GOOD), _STATISTICS, *_GONE],
    ),
    ("load twice", [post(_LOAD), post(_LOAD, {}), *_GONE]),
    ("load with no JSON", [post(_LOAD, b"x")]),
    ("load with an array for parameters", [post(_LOAD, {"parameters": []})]),
    ("load with null for parameters", [post(_LOAD, {"parameters": None})]),
    _loaded("load with a configuration", {"config": config(max_batch_size=2)}, get("/v2/models/loadable")),
    _loaded("load with a configuration of another name", {"config": config(name="x")}),
    _loaded("load with an object for the configuration", {"config": {}}),
    _loaded("load with nonsense for the configuration", {"config": "nonsense"}),
    _loaded("load with an empty configuration", {"config": ""}),
    _loaded("load with an unknown field in the configuration", {"config": config(nonsense=1)}),
    _loaded("load with an unknown parameter", {"nonsense": "1"}),
    _loaded("load with a number for a parameter", {"nonsense": 1}),
    _loaded("load with a file and no configuration", {"file:1/model.py": _FILE}),
    _loaded("load with a number for a file", {"config": config(), "file:1/model.py": 5}),
    _loaded("load with a file outside", {"config": config(), "file:../x.py": _FILE}),
    _loaded("load with files", {"config": config(), "file:1/model.py": _FILE}, get("/v2/models/loadable"),
        infer("loadable", GOOD)),
    _loaded("load with files from a slash on", {"config": config(), "file:/1/model.py": _FILE},
        get("/v2/models/loadable"), infer("loadable", GOOD)),
    _loaded("load with files from two slashes on", {"config": config(), "file://1/model.py": _FILE},
        get("/v2/models/loadable"), infer("loadable", GOOD)),
    _loaded("load with files of version 7", _SEVEN, infer("loadable", GOOD)),
    ("load what fails", [post("/v2/repository/models/broken/load"), get("/v2/models/broken"), infer("broken", GOOD),
        get("/v2/models/broken/stats"), get("/v2/models/broken/config"), get("/v2/models/broken/ready")]),
]  # fmt: skip

_TRACE, _LOG = "/v2/trace/setting", "/v2/logging"
_NO_TRACE = post(_TRACE, {"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None})
_USUAL_LOG = post(
    _LOG, {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0, "log_format": "default"}
)


def _set(path: str, usual: Http, *bodies: Any) -> list[Case]:
    return [(f"{path} {body!r}", [post(path, body), get(path), usual]) for body in bodies]


SETTINGS: list[Case] = [
    *_gets(_TRACE, "/v2/models/add_sub/trace/setting", "/v2/models/nope/trace/setting", _LOG),
    *_methods(_TRACE, "PUT"),
    *_methods(_LOG, "PUT"),
    *_posts("/v2/models/nope/trace/setting", {"trace_rate": "1"}),
    *_set(_TRACE, _NO_TRACE, {}, [], b"x", b"", {"nonsense": 1}, {"trace_level": ["TIMESTAMPS"]}),
    *_set(_TRACE, _NO_TRACE, {"trace_level": ["OFF"]}, {"trace_level": ["OFF", "TIMESTAMPS"]}),
    *_set(_TRACE, _NO_TRACE, {"trace_level": "TIMESTAMPS"}, {"trace_level": []}),
    *_set(_TRACE, _NO_TRACE, {"trace_rate": "10"}, {"trace_rate": 10}, {"trace_rate": "x"}),
    *_set(_TRACE, _NO_TRACE, {"trace_rate": ["1"]}, {"trace_rate": "0"}, {"trace_rate": "9" * 20}),
    *_set(_TRACE, _NO_TRACE, {"trace_count": "5"}, {"trace_count": "-1"}, {"trace_count": "-2"}),
    *_set(_TRACE, _NO_TRACE, {"trace_count": 5}, {"trace_count": "x"}, {"log_frequency": "3"}),
    *_set(_TRACE, _NO_TRACE, {"trace_file": "/x"}, {"trace_file": ""}, {"log_frequency": 0}),
    *_set(_LOG, _USUAL_LOG, {}, [], b"x", b"", {"nonsense": 1}, {"log_info": False}),
    *_set(_LOG, _USUAL_LOG, {"log_info": 1}, {"log_info": "true"}, {"log_warning": False}),
    *_set(_LOG, _USUAL_LOG, {"log_error": False}, {"log_verbose_level": 1}),
    *_set(_LOG, _USUAL_LOG, {"log_verbose_level": -1}, {"log_verbose_level": "1"}),
    *_set(_LOG, _USUAL_LOG, {"log_format": "ISO8601"}, {"log_format": "x"}, {"log_format": 1}),
    *_set(_LOG, _USUAL_LOG, {"log_file": "/x"}, {"log_file": ""}, {"log_info": None}),
]
