"""Has the names that a native model imports from `moonpool`, for processes that it starts under an interpreter without
moonpool.
"""

import importlib
import os
import runpy
import sys

_folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_boot = runpy.run_path(os.path.join(_folder, "boot.py"), run_name="moonpool.stub.boot")
_boot["make_importable"]("moonpool", os.path.dirname(_folder))

importlib.import_module("moonpool.stub.native.hints").publish()
# The statement that imports this package gets it from here.
sys.modules[__name__] = sys.modules["moonpool"]
