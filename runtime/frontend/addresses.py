"""Where front ends listen."""

from __future__ import annotations

import asyncio
import os
import socket

from moonpool.ipc.errors import MoonpoolError


class CannotListen(MoonpoolError):
    """An address or a port that cannot be had."""

    code = "UNAVAILABLE"

    def __init__(self, protocol: str, address: str, port: int, error: OSError) -> None:
        # Event loops add words of their own.
        is_system_s = error.errno is not None and error.errno > 0
        why = os.strerror(error.errno) if is_system_s else error.strerror or str(error)  # type: ignore[arg-type]
        super().__init__(f"cannot listen at {address}, port {port} ({protocol}): {why}")


async def bound_sockets(address: str, port: int, *, reuse_port: bool) -> list[socket.socket]:
    """Bind sockets to this port, one for each address of the name; none listens yet. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            bound.append(one)
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # The same address in the other family has a socket of its own.
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(place)
    except OSError:
        for one in bound:
            one.close()
        raise
    return bound
