"""`batch_input` and `batch_output` that no backend could carry out: they are refused with the same texts, for Python
models, too.
"""

from __future__ import annotations

import re

import pytest
from tests.triton.core.conftest import Core

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity",
        "A `batch_input` or `batch_output` that contradicts the inputs and outputs is refused with the text of a real "
        "Triton.",
    ),
]
COUNT = "batch_input { kind: BATCH_ELEMENT_COUNT target_name: 'N' data_type: TYPE_INT32 "
CUT = "batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE "
REFUSED = {
    "two sources": COUNT + "source_input: [ 'X', 'X' ] }",
    "an unknown source": COUNT + "source_input: 'Z' }",
    "another datatype": COUNT.replace("INT32", "INT64") + "source_input: 'X' }",
    "an unknown output": CUT + "target_name: 'Z' source_input: 'X' }",
    "an output twice": CUT + "target_name: [ 'Y', 'Y' ] source_input: 'X' }",
}
CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


@pytest.mark.parametrize("what", REFUSED)
def test_a_load_fails_with_the_same_text(core: Core, what: str) -> None:
    name = f"batch_tensors_{what.replace(' ', '_')}"
    core.write(
        name,
        f"""
        backend: "python" max_batch_size: 4
        input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
        output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
        instance_group [ {{ kind: KIND_CPU }} ]
        {REFUSED[what]}
        """,
        CODE,
    )

    theirs, ours = core.triton.load(name), core.moonpool.load(name)

    assert theirs is not None
    assert ours is not None
    assert re.sub(r"^[^ ]*config\.pbtxt:\d+: \S+: ", "", ours.text) == theirs.text
    assert ours.code == theirs.code
