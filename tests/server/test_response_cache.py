"""A server with a response cache: its options, and clients over both protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.server.libraries import _gevent_is_there, _grpc_is_there  # noqa: F401
from tests.server.repositories import CONFIG, write
from tests.server.running import running

from moonpool.runtime.server.options.protocols import cache_bytes
from moonpool.runtime.server.options.sources import BadOption
from moonpool.runtime.server.options.table import ServerOptions

CACHED = CONFIG + "response_cache { enable: true }"


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "`--cache-config=local,size=…` keeps responses of models with `response_cache`, for clients of both protocols.",
)
@pytest.mark.parametrize("flag", ["--cache-config=local,size=1048576", "--response-cache-byte-size=1048576"])
def test_clients_of_both_protocols_share_the_cache(tmp_path: Path, flag: str) -> None:
    write(tmp_path, "m", config=CACHED)
    data = np.arange(4, dtype=np.float32).reshape(1, 4)
    with running(tmp_path, flag) as server:
        clients: list[tuple[Any, str]] = [(tritonclient.http, server.http), (tritonclient.grpc, server.grpc)]
        for module, address in clients * 2:
            with module.InferenceServerClient(address) as client:
                given = module.InferInput("IN", [1, 4], "FP32")
                given.set_data_from_numpy(data)
                for number in range(3):
                    answer = client.infer("m", [given], request_id=str(number))
                    assert answer.as_numpy("OUT").tolist() == data.tolist()
        (stats,) = server.get("/v2/models/m/stats")[1]["model_stats"]
        assert stats["execution_count"] == 1
        assert stats["inference_stats"]["cache_hit"]["count"] == 11


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"cache_config": ("local,size=1",), "response_cache_byte_size": 1},
            "Incompatible flags --response-cache-byte-size and --cache-config both provided.",
        ),
        (
            {"cache_config": ("local",)},
            "No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got local",
        ),
        ({"cache_config": ("local,size",)}, "No cache specified."),
        ({"cache_config": ("redis,host=x",)}, "there is no cache 'redis', only 'local'"),
        ({"cache_config": ("local,size=1", "redis,host=x")}, "there is no cache 'redis', only 'local'"),
        ({"cache_config": ("local,sze=1",)}, "the cache 'local' has the setting 'size', and no other"),
        ({"cache_config": ("local,size=0",)}, "size must be a number of bytes above 0, not '0'"),
        ({"cache_config": ("local,size=-5",)}, "size must be a number of bytes above 0"),
        ({"cache_config": ("local,size=abc",)}, "size must be a number of bytes above 0"),
    ],
)
def test_options_that_make_no_cache_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadOption) as caught:
        cache_bytes(ServerOptions(**options))
    assert text in str(caught.value)


def test_a_size_may_be_given_in_two_ways() -> None:
    assert cache_bytes(ServerOptions(cache_config=("local,size=7",))) == 7
    assert cache_bytes(ServerOptions(response_cache_byte_size=8)) == 8
    assert cache_bytes(ServerOptions()) is None
