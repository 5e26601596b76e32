"""Counts in the folder MARKS the steps that happen once in each process, and answers which process made its state.

AT_IMPORT and AT_INITIALIZE name actions at these points.
"""

import ctypes
import json
import os
import random
import signal
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


def mark(what):
    with open(os.path.join(os.environ["MARKS"], what), "a") as file:
        file.write(f"{os.getpid()}\n")


def act(place):
    way = os.environ.get(place, "")
    if way == "exit":
        os._exit(3)
    elif way == "raise":
        raise ValueError("on purpose")
    elif way == "hang":
        threading.Event().wait()
    elif way == "thread":
        threading.Thread(target=threading.Event().wait, name="the model's", daemon=True).start()
    elif way == "load a model":
        pb_utils.load_model("another")
    elif way == "exit in a template":
        with open("/proc/self/cmdline") as file:
            if "_template" in file.read():
                os._exit(3)


IMPORTED_BY = os.getpid()
mark("imports")
act("AT_IMPORT")
np.ones((256, 256)) @ np.ones((256, 256))  # if the library has threads, they run now


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        mark("completions")
        return config

    def initialize(self, args):
        mark("initializes")
        act("AT_INITIALIZE")
        self.args = args
        self.weights = np.ones(int(os.environ.get("WEIGHTS", "1")), np.uint8)
        family = pb_utils.MetricFamily("preforked", "of the model", pb_utils.MetricFamily.COUNTER)
        self.metric = family.Metric({"instance": "all"})
        self.family = family
        print("initialized", args["model_instance_name"])

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        do = pb_utils.get_input_tensor_by_name(request, "DO").as_numpy()[0].decode()
        said = np.array([json.dumps(self.do(do)).encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)])

    def do(self, do):
        if do == "die":
            ctypes.string_at(0)
        elif do.startswith("exit "):
            os._exit(int(do.partition(" ")[2]))
        elif do == "draw":
            return [random.random(), float(np.random.random())]
        elif do == "count":
            self.metric.increment(1)
        elif do == "print":
            print("printed")
        elif do == "fork":
            child = os.fork()
            if not child:
                signal.pause()
            return child
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "imported_by": IMPORTED_BY,
            "instance": self.args["model_instance_name"],
            "weights": int(self.weights.sum()),
        }

    def finalize(self):
        mark("finalizes")
