"""Triton's module for models, in processes that a model starts and that are no stubs.

A child that `multiprocessing` starts by spawn or forkserver is a new interpreter, which has the paths of the stub and
none of its modules. There a model's file finds this one. It has the classes and functions of the stub's module; what
asks the runtime is refused.
"""

import importlib
import os
import runpy
import sys

if "moonpool.stub" not in sys.modules:
    _folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    _boot = runpy.run_path(os.path.join(_folder, "boot.py"), run_name="moonpool.stub.boot")
    # As in a stub: the interpreter may have no moonpool, or be unable to read all of it.
    _boot["make_importable"]("moonpool", os.path.dirname(_folder))

_utilities = importlib.import_module("moonpool.stub.pb_utils")
for _name in ("triton_python_backend_utils", "c_python_backend_utils"):
    sys.modules[_name] = _utilities
