"""Models that cannot be loaded, by name: the text of `model.py`."""

from __future__ import annotations

import textwrap

CONFIG = """
backend: "python"
input [{ name: "X" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [4] }]
instance_group [{ kind: KIND_CPU }]
"""

_HEAD = "import triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"


def _method(signature: str, *lines: str, decorator: str = "") -> str:
    body = "\n".join(lines)
    method = f"{decorator}\ndef {signature}:\n{textwrap.indent(body, '    ')}\n".lstrip("\n")
    return _HEAD + textwrap.indent(method, "    ")


def _completes(*lines: str) -> str:
    return _method("auto_complete_config(config)", *lines, decorator="@staticmethod")


BROKEN: dict[str, str] = {
    "syntax_error": "class TritonPythonModel:\n    def execute(self, requests:\n",
    "import_error": "import nothing_of_that_name\n\n\nclass TritonPythonModel: pass\n",
    "raises_at_import": "raise ValueError('on purpose')\nclass TritonPythonModel: pass\n",
    "exits_at_import": "import sys\nsys.exit(3)\nclass TritonPythonModel: pass\n",
    "no_class": "# TritonPythonModel is not here\nclass Other: pass\n",
    "constructor_raises": _method("__init__(self)", "raise ValueError('on purpose')"),
    "constructor_takes_arguments": _method("__init__(self, x)", "pass"),
    "initialize_raises": _method("initialize(self, args)", "raise ValueError('on purpose')"),
    "initialize_raises_model_exception": _method(
        "initialize(self, args)", "raise pb_utils.TritonModelException('on purpose')"
    ),
    "initialize_raises_deep": _method("initialize(self, args)", "def deeper(): undefined_name", "deeper()"),
    "initialize_raises_from": _method(
        "initialize(self, args)",
        "try: 1 / 0",
        "except ZeroDivisionError as error: raise ValueError('two\\nlines') from error",
    ),
    "initialize_exits": _method("initialize(self, args)", "raise SystemExit(5)"),
    "initialize_takes_nothing": _method("initialize(self)", "pass"),
    "initialize_reads_a_key": _method("initialize(self, args)", "args['nothing']"),
    "auto_complete_raises": _completes("raise ValueError('on purpose')"),
    "auto_complete_returns_none": _completes("pass"),
    "auto_complete_returns_a_dict": _completes("return {}"),
    "auto_complete_is_no_function": _HEAD + "    auto_complete_config = 7\n",
    "max_batch_size_too_small": _completes("config.set_max_batch_size(-1)", "return config"),
    "input_without_name": _completes("config.add_input({'data_type': 'TYPE_FP32', 'dims': [4]})"),
    "input_without_datatype": _completes("config.add_input({'name': 'Z', 'dims': [4]})"),
    "input_without_dims": _completes("config.add_input({'name': 'Z', 'data_type': 'TYPE_FP32'})"),
    "input_with_more": _completes("config.add_input({'name': 'Z', 'data_type': 'TYPE_FP32', 'dims': [4], 'more': 1})"),
    "nameless_input_with_more": _completes("config.add_input({'more': 1})"),
    "input_of_another_datatype": _completes("config.add_input({'name': 'X', 'data_type': 'TYPE_INT32', 'dims': [4]})"),
    "input_of_other_dims": _completes("config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [16]})"),
    "input_becomes_optional": _completes(
        "config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [4], 'optional': True})"
    ),
    "output_without_name": _completes("config.add_output({'data_type': 'TYPE_FP32', 'dims': [4]})"),
    "output_without_datatype": _completes("config.add_output({'name': 'Z', 'dims': [4]})"),
    "output_without_dims": _completes("config.add_output({'name': 'Z', 'data_type': 'TYPE_FP32'})"),
    "output_with_more": _completes(
        "config.add_output({'name': 'Z', 'data_type': 'TYPE_FP32', 'dims': [4], 'optional': True})"
    ),
    "output_of_another_datatype": _completes(
        "config.add_output({'name': 'Y', 'data_type': 'TYPE_INT32', 'dims': [4]})"
    ),
    "output_of_other_dims": _completes("config.add_output({'name': 'Y', 'data_type': 'TYPE_FP32', 'dims': [16]})"),
    "policy_with_more": _completes("config.set_model_transaction_policy({'more': True})"),
    "input_is_no_dict": _completes("config.add_input(None)"),
}
