"""A contained model cannot forge lines in the log of a tritonserver that was told not to escape texts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.triton.backend import zoo
from tests.triton.backend.hosting import TIMEOUT_S, Client, HostingServer
from tests.triton.server import interpreter
from tests.waiting import wait_until
from tritonclient.utils import InferenceServerException

from moonpool.runtime.process.terminal import SHOWN_CODES, one_line

pytestmark = pytest.mark.promise(
    "The launcher of a tritonserver",
    "A contained model forges no line of a tritonserver's log: each message, print and error of "
    "it is one line with its name and without control characters, even if the server escapes "
    "nothing. The traceback of other models keeps its lines.",
)

FORGED = "E1122 10:00:00.000000 1 model_lifecycle.cc:654]"
HOSTILE = f"first\n{FORGED} " + "".join(map(chr, SHOWN_CODES[1:])) + "ä €\U0001f600 end"
# The model passes this off as the place in the server's source from which a line comes.
PLACE = f"x.cc:1] \n{FORGED}"
MODEL = f"""
import builtins
import triton_python_backend_utils as pb_utils

HOSTILE = {HOSTILE!a}

class TritonPythonModel:
    def initialize(self, args):
        say = compile("logger.log_info(text)", {PLACE!a}, "exec")
        exec(say, {{"logger": pb_utils.Logger, "text": "logged " + HOSTILE}})
        print("printed " + HOSTILE, flush=True)
        raise ValueError("raised " + HOSTILE)
"""
STRICT = 'parameters { key: "MOONPOOL_SANDBOX" value { string_value: "strict" } }'


class PlainServer(HostingServer):
    """A server that does not escape texts in its log, by an operator's wish or because it is an older one."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the log of a server that loaded two models which try to forge lines. One of them is contained."""
    folder = tmp_path_factory.mktemp("forging")
    for name, more in (("contained", STRICT), ("trusted", "")):
        config = zoo.MODELS["identity"][0] + more
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(config)
        (folder / "models" / name / "1" / "model.py").write_text(MODEL)
    server = PlainServer(interpreter(), folder / "models", folder)
    server.start()
    client = Client(server)
    try:
        for name in ("contained", "trusted"):
            with pytest.raises(InferenceServerException):
                client.load(name)
        # What a model logs and what it prints reach the log in ways of their own, maybe after the error.
        said = ("[contained_0_0] logged", "[contained_0_0] printed", "[trusted_0_0] printed")
        wait_until(lambda: all(each in server.log() for each in said), TIMEOUT_S)
        yield server.log_file.read_bytes().decode()
    finally:
        client.close()
        server.stop()


def _of(log: str, begin: str, end: str) -> str:
    """Return the part of the log that belongs to one of the models, which were loaded one after the other."""
    return log.partition(f"loading: {begin}")[2].partition(end)[0]


@pytest.mark.promise(
    "The sandbox: `standard`",
    "In a tritonserver too a model forges no line of the log, also not by the error and traceback of its load.",
)
def test_a_contained_model_forges_no_line(log: str) -> None:
    said = _of(log, "contained:1", "loading: trusted")
    assert FORGED in said
    assert not any(line.startswith(FORGED) for line in said.split("\n"))
    assert {ord(each) for each in said} & set(SHOWN_CODES) == {10}


def test_a_contained_model_is_known_by_its_name_and_names_no_place(log: str) -> None:
    (logged,) = [line for line in log.split("\n") if f"logged {one_line(HOSTILE)}" in line][:1]
    assert f"[contained_0_0] logged {one_line(HOSTILE)} ({one_line(PLACE)}:1)" in logged
    assert " moonpool:0] " in logged


def test_the_error_of_a_contained_model_is_one_line_wherever_the_server_logs_it(log: str) -> None:
    said = _of(log, "contained:1", "loading: trusted").split("\n")
    (failed,) = [line for line in said if "failed to load 'contained' version 1" in line]
    assert f"raised {one_line(HOSTILE)}" in failed
    (traceback,) = [line for line in said if "Traceback" in line]
    assert "\\n  File " in traceback


def test_the_traceback_of_a_model_that_is_not_contained_keeps_its_lines(log: str) -> None:
    said = log.partition("loading: trusted:1")[2]
    assert '\n  File "' in said
    assert any(line.startswith(FORGED) for line in said.split("\n"))
