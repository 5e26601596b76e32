"""Attempts on the network and on services of the machine."""

import ctypes
import socket
import struct


def filter_a_socket():
    """Try SO_ATTACH_FILTER, with which the kernel runs a program of the caller."""
    program = (ctypes.c_ubyte * 8)(*struct.pack("HBBI", 6, 0, 0, 0))
    end, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    end.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxQ", 1, ctypes.addressof(program)))


def tcp(port, host="127.0.0.1"):
    with socket.create_connection((host, port), timeout=10) as peer:
        return peer.recv(16).decode()


def udp(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        return end.sendto(b"x", ("127.0.0.1", port))


def listen():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as end:
        end.bind(("127.0.0.1", 0))
        end.listen()


def unix(path):
    """Connect to a path, or to an abstract name after a @."""
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(address)


def unix_by_old_socket(path):
    """Connect a socket that was made as half of a pair, which may be allowed if others are not."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with here, there:
        here.connect(path)


def unix_by_left_socket(path):
    """Connect half of a pair whose other half is gone."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    there.close()
    with here:
        here.connect(path)


def unix_by_address(path):
    """Send with an address for each packet."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with here, there:
        here.sendto(b"x", path)


def serve_unix():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.bind("\0moonpool-hostile")


def bind_old_socket():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with here, there:
        here.bind("\0moonpool-hostile-pair")


def netlink():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as end:
        end.bind((0, 0))


def raw():
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()


def packets():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()


def cipher():
    """Try AF_ALG: the kernel's ciphers, which had holes."""
    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET, 0).close()


def virtual():
    """Try AF_VSOCK, to the host of a virtual machine."""
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()


def resolve(name):
    return len(socket.getaddrinfo(name, 80))


def metadata():
    """Connect to the address from which clouds give a machine its credentials."""
    with socket.create_connection(("169.254.169.254", 80), timeout=0.2):
        pass
