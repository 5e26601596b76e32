"""Ends badly at a given point in a given way.

While it is loaded and ended, `FAULT_AT` ("place:way") in its environment decides; while it executes, the
input COMMAND does. The command "answer" is answered with the process's id.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
from moonpool.stub.peers import placement
from moonpool.stub.peers.batch import Batch
from moonpool.stub.peers.peer import Peer
from moonpool.stub.peers.port import StubPort


def end(way):
    if way == "SIGSEGV":
        ctypes.string_at(0)
    elif way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "SIGTERM by default":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    elif way == "abort":
        os.abort()
    elif way == "_exit 0":
        os._exit(0)
    elif way == "_exit 3":
        os._exit(3)
    elif way == "libc exit":
        ctypes.CDLL(None).exit(4)
    elif way == "exception":
        raise ValueError("on purpose")
    elif way == "SystemExit":
        sys.exit("on purpose")
    elif way == "KeyboardInterrupt":
        raise KeyboardInterrupt("on purpose")
    elif way == "unprintable":
        raise Unprintable
    elif way == "hang":
        threading.Event().wait()
    elif way.startswith("once "):
        marker = way.partition(" ")[2]
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(3)
    elif way.startswith("wait for "):
        marker = way.partition(" for ")[2]
        while not os.path.exists(marker):
            time.sleep(0.005)
    elif way.startswith("exit after "):
        end(f"wait for {way.partition(' after ')[2]}")
        os._exit(3)
    elif way.startswith("touch "):
        open(way.partition(" ")[2], "w").close()
    elif way == "hang in C":
        # Holds the interpreter's lock, and no Python signal handler will run.
        ctypes.PyDLL(None).pause()
        ctypes.PyDLL(None).sleep(3600)
    elif way == "spin":
        while True:
            pass
    elif way == "memory":
        np.ones(1 << 34, np.uint8)
    elif way == "recursion":
        end(way)
    elif way == "stack":
        # Some Pythons count frames in C, but more of them than fit into so small a stack.
        sys.setrecursionlimit(1 << 30)
        threading.stack_size(1 << 16)
        thread = threading.Thread(target=overflow)
        thread.start()
        thread.join()
    else:
        raise LookupError(way)


def overflow():
    list(map(lambda _: overflow(), [0]))


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def end_here(place):
    told, _, way = os.environ.get("FAULT_AT", "").partition(":")
    if told == place:
        end(way)


def hook(owner, name, way, *, after):
    """Make a method of the stub itself end badly at its next call."""
    real = getattr(owner, name)

    def replacement(*args):
        setattr(owner, name, real)
        if after:
            real(*args)
        end(way)

    setattr(owner, name, replacement)


end_here("import")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        end_here("auto_complete_config")
        return config

    def __init__(self):
        end_here("__init__")

    def initialize(self, args):
        end_here("initialize")
        atexit.register(end_here, "atexit")
        # The hooks are in the layers, which the compiled port would not call.
        Peer._made_port = lambda peer: StubPort(peer.conversation.channel)
        for each in gc.get_objects():
            if type(each) is Peer:
                each.port = each._made_port()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
        place, _, way = command.partition(":")
        if place == "execute":
            end(way)
        elif place == "reading the next input":
            hook(Batch, "open", way, after=False)
        elif place == "writing the output":
            hook(placement, "place_copies", way, after=False)
        elif place == "sending the answer":
            hook(Peer, "send", way, after=False)
        elif place == "after the answer":
            hook(Peer, "send", way, after=True)
        elif place == "a thread":
            thread = threading.Thread(target=end, args=(way,))
            thread.start()
            thread.join()
        elif command != "answer":
            raise LookupError(command)
        output = pb_utils.Tensor("PID", np.array([os.getpid()], np.int64))
        return pb_utils.InferenceResponse([output])

    def finalize(self):
        end_here("finalize")
