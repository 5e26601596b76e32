"""Does to its process what its input HOW names, and answers with a number that the name explains."""

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def print_100_mb():
    line = "x" * 99 + "\n"
    for _ in range(1000):
        sys.stdout.write(line * 1049)


def endless_line():
    for _ in range(64):
        sys.stdout.write("y" * 65536)
    sys.stdout.flush()


def half_a_line():
    sys.stdout.write("half a line")
    sys.stdout.flush()


def print_escapes():
    print("\x1b[31mred\x1b[0m \x07\x08 over\rwritten \x85 \x9b31m end")
    print("first\r\nsecond")


def log_escapes():
    pb_utils.Logger.log_warn("\x1b[31mred\x1b[0m\n[sibling_0] a line of another")
    logging.getLogger("mine").error("by logging\r\n[sibling_0] another")


def not_utf_8():
    sys.stdout.flush()
    os.write(1, b"caf\xe9 \xff\xfe\n")
    print("\ud800 a lone half")


def close_all():
    # A little later, so that the answer to this request may still be on its way.
    os.closerange(0, 4096)


def replace_streams():
    sys.stdout = sys.stderr = io.StringIO()
    print("into nothing")


def no_streams():
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
    print("into nothing")
    pb_utils.Logger.log_info("still here")


def close_streams():
    sys.stdout.close()
    sys.stderr.close()


def close_descriptors():
    os.close(0)
    os.close(1)
    os.close(2)


def ignore_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def interrupt_itself():
    os.kill(os.getpid(), signal.SIGINT)


def change_place():
    os.chdir("/")
    sys.path.clear()
    os.environ.clear()
    os.umask(0o777)


def child():
    return subprocess.Popen(["sleep", "3600"]).pid


def child_with_our_descriptors():
    return subprocess.Popen(["sleep", "3600"], close_fds=False).pid


def thread():
    threading.Thread(target=threading.Event().wait).start()


def busy_thread():
    def spin():
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()


def deep():
    def down(n):
        return 0 if n == 0 else 1 + down(n - 1)

    sys.setrecursionlimit(20_000)
    return down(10_000)


def warn():
    import warnings

    warnings.simplefilter("error")
    warnings.warn("on purpose")


def break_modules():
    for name in list(sys.modules):
        if not name.startswith("_") and name not in ("sys", "builtins"):
            del sys.modules[name]


def die_in_a_while():
    def die():
        time.sleep(0.05)
        os._exit(5)

    threading.Thread(target=die).start()


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            number = 0 if how == "answer" else globals()[how]()
            output = pb_utils.Tensor("Y", np.array([number or 0], np.int64))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
