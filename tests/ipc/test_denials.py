"""Denials have words, and an option only if the option would be read as it is written."""

from __future__ import annotations

import pytest

from moonpool.ipc.denials import (
    BIND,
    CONNECT,
    EXEC,
    FORK,
    KILL,
    KINDS,
    OPEN,
    RESOLVE,
    SOCKET,
    TCP,
    WRITE,
    in_words,
    option_for,
    would_allow,
)
from moonpool.runtime.model.config.model import ModelConfig, minimal
from moonpool.runtime.model.config.options import ModelOptions

pytestmark = pytest.mark.promise("Seeing sandboxes", "If the sandbox refused an act …")

PATHS, PORTS, CALLS = ("MOONPOOL_SANDBOX_PATHS", "MOONPOOL_SANDBOX_PORTS", "MOONPOOL_SANDBOX_SYSCALLS")


@pytest.mark.promise("Seeing sandboxes", "If an error or the …")
@pytest.mark.parametrize(
    ("kind", "text", "option"),
    [
        (OPEN, "/data/weights", f"{PATHS}=ro:/data/weights"),
        (WRITE, "/data/out/file", f"{PATHS}=rw:/data/out"),
        (CONNECT, "10.0.0.1:443", f"{PORTS}=443"),
        (RESOLVE, "a.b:443", f"{PORTS}=443,53"),
        (SOCKET, TCP, PORTS),
        (FORK, "", f"{CALLS}=fork"),
        (EXEC, "ls", f"{CALLS}=fork,execve"),
        # No option allows these, or none can be named for this text.
        (SOCKET, "family 2, type 2, protocol 0", ""),
        (BIND, "('', 80)", ""),
        (KILL, "1", ""),
        (OPEN, "/", PATHS),
        (WRITE, "/file", PATHS),
        (OPEN, "weights", PATHS),
        (OPEN, "/a,rw:/etc", PATHS),
        (OPEN, "/a\n/b", PATHS),
        (OPEN, "/a\u202e/b", PATHS),
        (OPEN, "/a/../b", PATHS),
        (OPEN, "/a ", PATHS),
        (OPEN, "/a b/c", PATHS),
        (OPEN, "/a/$(reboot)", PATHS),
        (OPEN, "/a/`reboot`", PATHS),
        (OPEN, "/a;reboot", PATHS),
        (OPEN, "/a*/b", PATHS),
        (WRITE, "/a'/b", PATHS),
        (OPEN, '/a" } } parameters { key: "MOONPOOL_SANDBOX', PATHS),
        (OPEN, "/a=b/c", PATHS),
        (OPEN, "/proc/17/fd", PATHS),
        (OPEN, "/proc/cpuinfo", f"{PATHS}=ro:/proc/cpuinfo"),
        (OPEN, "/gr\u00fcn/a_b-c.d+1@2%3", f"{PATHS}=ro:/gr\u00fcn/a_b-c.d+1@2%3"),
        (OPEN, "/" + "a" * 1023, PATHS),
        (CONNECT, "host:0", PORTS),
        (CONNECT, "host:99999", PORTS),
        (CONNECT, "host:99999999999999999999", PORTS),
        (RESOLVE, "a.b", PORTS),
    ],
)
def test_the_option_that_would_allow_it_is_named(kind: int, text: str, option: str) -> None:
    assert option_for(kind, text) == option
    expected = f"{option} would allow it" if option else "no option allows it"
    assert would_allow(kind, text) == expected
    name, _, value = option.partition("=")
    if value:  # a configuration can have it in this form
        raw = minimal("m") | {"parameters": {name: {"string_value": value}}}
        read = ModelOptions.from_parameters(ModelConfig.from_dict(raw, partial=True))
        assert read != ModelOptions()


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_kind_has_words(kind: int) -> None:
    assert in_words(kind, "x").partition(" ")[0].isalpha()
    assert in_words(kind, "") == in_words(kind, "").strip()
