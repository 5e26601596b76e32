"""The network, and services of the machine that listen on sockets."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import load_attacker
from tests.hostile.attempts import REFUSED, Attempt, made
from tests.hostile.conftest import Attackers

import moonpool

ATTEMPTS = {
    "TCP to this machine": Attempt("network.tcp", {"port": "$tcp"}),
    "UDP to this machine": Attempt("network.udp", {"port": "$udp"}),
    "a port of its own": Attempt("network.listen"),
    "a service by its path": Attempt("network.unix", {"path": "$path"}),
    "a service by an abstract name": Attempt("network.unix", {"path": "$abstract"}),
    "a service by half of a pair": Attempt("network.unix_by_old_socket", {"path": "$datagrams"}),
    "a service by half of a pair that is left": Attempt(
        "network.unix_by_left_socket", {"path": "$path"}, (*REFUSED, "EISCONN"), ("EISCONN",)
    ),
    "a service by an address": Attempt("network.unix_by_address", {"path": "$datagrams"}),
    "a service of its own": Attempt("network.serve_unix"),
    "a service of half of a pair": Attempt("network.bind_old_socket"),
    "the kernel's own": Attempt("network.netlink", off=()),
    "raw packets": Attempt("network.raw", off=()),
    "packets of the wire": Attempt("network.packets", off=()),
    "the kernel's ciphers": Attempt("network.cipher", strict=(*REFUSED, "EAFNOSUPPORT"), off=()),
    "the host": Attempt("network.virtual", strict=(*REFUSED, "EAFNOSUPPORT"), off=()),
    "the cloud's credentials": Attempt("network.metadata", off=()),
    "a name": Attempt("network.resolve", {"name": "localhost"}, ("OSError", "EPERM"), ()),
}


def serve(listener: socket.socket) -> None:
    """Greet each who connects, until the listener is shut."""
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer, suppress(OSError):  # a client that only connected may be gone
            peer.sendall(b"hello")


@pytest.fixture(scope="module")
def scene() -> Iterator[dict[str, Any]]:
    """Services of the machine that welcome everybody."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-hostile-")))
        folder.chmod(0o755)
        path, datagrams = folder / "stream", folder / "datagrams"
        listeners = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(path)),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0moonpool{folder}"),
            (socket.AF_UNIX, socket.SOCK_DGRAM, str(datagrams)),
        ):
            end = stack.enter_context(socket.socket(family, kind))
            end.bind(address)
            listeners.append(end)
            if kind == socket.SOCK_STREAM:
                end.listen()
                thread = threading.Thread(target=serve, args=(end,))
                thread.start()
                stack.callback(thread.join)
                stack.callback(end.shutdown, socket.SHUT_RDWR)
        for each in (path, datagrams):
            each.chmod(0o777)
        yield {
            "tcp": listeners[0].getsockname()[1],
            "other_tcp": listeners[1].getsockname()[1],
            "udp": listeners[2].getsockname()[1],
            "path": str(path),
            "abstract": f"@moonpool{folder}",
            "datagrams": str(datagrams),
        }


@pytest.mark.promise(
    "The sandbox: `strict`",
    "It has no network: no TCP, UDP, names, netlink, raw packets, and no socket of a service on "
    "the machine, by path or abstract name.",
)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_there_is_no_network(attackers: Attackers, scene: dict[str, Any], attempt: str) -> None:
    outcome = made(attackers("strict"), ATTEMPTS[attempt], scene)

    assert outcome.word in ATTEMPTS[attempt].strict, outcome


@pytest.mark.promise("Hostile models", "The same attacks succeed without a …")
@pytest.mark.parametrize("attempt", [name for name, each in ATTEMPTS.items() if each.off])
def test_without_a_sandbox_there_is_a_network(attackers: Attackers, scene: dict[str, Any], attempt: str) -> None:
    outcome = made(attackers("off"), ATTEMPTS[attempt], scene)

    assert outcome.word in ATTEMPTS[attempt].off, outcome


@pytest.mark.promise(
    "The sandbox: `strict`", "Its sockets are pairs between its own threads, and take no program for the kernel to run."
)
def test_a_socket_takes_no_program_for_the_kernel(attackers: Attackers) -> None:
    assert attackers("strict").tries("network.filter_a_socket").word == "EPERM"
    assert attackers("off").tries("network.filter_a_socket").word == "done"


@pytest.mark.promise("The sandbox: grants", "What is granted …")
def test_a_granted_port_can_be_connected_to_and_nothing_else(
    runtime: moonpool.Runtime, model_folder: Path, scene: dict[str, Any]
) -> None:
    port = scene["tcp"]
    attacker = load_attacker(runtime, "strict", model_folder, "connects", SANDBOX_PORTS=port)
    try:
        assert attacker.finds("network.tcp", port=port) == "hello"
        assert attacker.tries("network.tcp", port=scene["other_tcp"]).word == "EACCES"
        for name, attempt in ATTEMPTS.items():
            if name not in ("TCP to this machine", "a name"):
                outcome = made(attacker, attempt, scene)
                assert outcome.word in (*attempt.strict, "EACCES"), (name, outcome)
    finally:
        runtime.unload("connects")
