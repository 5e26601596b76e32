"""Takes the resources that its input COMMAND names, and answers with the figure asked for."""

import os
import subprocess
import tempfile
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

KEPT = []
NEVER = threading.Event()


def keep(size):
    # Touch every page: memory that is only promised is not resident.
    KEPT.append(np.ones(int(size), np.uint8))


def threads(count):
    for _ in range(int(count)):
        thread = threading.Thread(target=NEVER.wait, daemon=True)
        thread.start()
        KEPT.append(thread)


def descriptors(count):
    KEPT.extend(os.dup(1) for _ in range(int(count)))


def one_file(size):
    with tempfile.NamedTemporaryFile(delete=False, buffering=0) as file:
        for _ in range(int(size) >> 16):
            file.write(bytes(1 << 16))


def many_files(size):
    for _ in range(int(size) >> 18):
        one_file(1 << 18)


def processors():
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


COMMANDS = {
    "keep": keep,
    "threads": threads,
    "descriptors": descriptors,
    "one file": one_file,
    "many files": many_files,
    "processors": processors,
    "nice": lambda: str(os.getpriority(os.PRIO_PROCESS, 0)),
    "wait": NEVER.wait,
    "leave": lambda: str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid),
    "pid": lambda: str(os.getpid()),
}


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
        command, _, argument = text.partition(":")
        said = COMMANDS[command](*argument.split()) or "done"
        tensor = pb_utils.Tensor("SAID", np.array([said], np.object_))
        return pb_utils.InferenceResponse([tensor])
