"""Executes the lines of CODE one after the other, and answers with the value of `said`."""

import gc
import logging
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

Logger = pb_utils.Logger
log = logging.getLogger("talks")


class Parting:
    """Prints something when it is collected: it is part of a cycle."""

    def __init__(self, text):
        self.me, self.text = self, text

    def __del__(self):
        Logger.log_info(self.text)


def in_fork(action):
    """Run a statement in a forked child, and return its status."""
    pid = os.fork()
    if not pid:
        try:
            action()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_thread(action):
    """Run a statement in another thread, and wait for its end."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def everything():
    """Log one message of each level, in both ways."""
    for number, say in enumerate((Logger.log_info, Logger.log_warn, Logger.log_error, Logger.log_verbose)):
        say(f"Logger {number}")
    for number, level in enumerate((logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)):
        log.log(level, f"logging {number}")


class TritonPythonModel:
    def initialize(self, args):
        logging.root.setLevel(logging.DEBUG)
        self.names = dict(globals())

    def execute(self, requests):
        responses = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
            self.names["said"] = None
            exec(code, self.names)
            said = np.array([repr(self.names["said"])], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)]))
        return responses
