"""The usual way of a request in C++, where moonpool was built with it.

Theory of operation. The code in Python is the one definition of what the runtime does, and is complete without this. The quick
forms replace some of its functions, one by one, for the case that most requests are: plain arrays of known shapes, an idle
instance or a plain queue, an answer with nothing but outputs. A quick form works on the same objects as the function it replaces. It
looks if everything is as usual before it changes anything. If not, it declines, and the function does all of it. So
either form may take any step of a request, and both give the same by construction.

Each module teaches the quick forms its classes (`learn`) when it is imported. A form that does not know a class declines.

`MOONPOOL_PURE=1` in the environment leaves the quick forms out. `MOONPOOL_PURE=contained` leaves out those that read what a stub
says, for models under `best-effort` and `strict`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.port import compiled

# The module of the forms, None if there are only those in Python. `_quick.pyi` has their signatures. They stand on the
# compiled port.
forms: Any = (
    load_if_there("moonpool.runtime.quick._quick") if is_wanted() and compiled is not None else None
)


def learn(kind: type, *arguments: object) -> None:
    """Let the forms know a class. The arguments are those of its `__new__`."""
    if forms is not None:
        # An instance that nobody uses. The forms see where it keeps its attributes.
        forms.learn(kind.__name__, kind.__new__(kind, *arguments))


def learn_object(name: str, value: object) -> None:
    """Let the forms use an object that stands for nothing in tables of the runtime."""
    if forms is not None:
        forms.learn(name, value)


if forms is not None:
    forms.start(np.ndarray, np.dtype("u1"))
