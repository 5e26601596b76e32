"""The backend whose stubs execute for another process: it starts and ends them, and says why they died."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moonpool.runtime.environment_variables import OF_THE_INTERPRETER
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.triton.lent_instance import LentInstance
from moonpool.runtime.triton.lent_stub import LentStub

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.link import Link
    from moonpool.runtime.request import InferenceRequest


class LentBackend(PythonBackend):
    """Its instances are all `LentInstance`."""

    # PYTHONPATH has packages for the server's Python, and not for a model that brings another one.
    _leading = (*OF_THE_INTERPRETER, "PYTHONPATH")

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        lent = _lent(instance)
        lent.generation += 1
        try:
            self.start_stub(lent, partial(LentStub, born=lent.born))
        except BaseException as error:
            lent.reason = error
            raise

    def explain(self, instance: ModelInstance, error: BaseException) -> BaseException:
        lent = _lent(instance)
        lent.reason = super().explain(lent, error)
        return lent.reason

    def model_instance_execute(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest]
    ) -> Link:
        raise NotImplementedError(f"{instance.name} has its {len(requests)} requests elsewhere")


def _lent(instance: ModelInstance) -> LentInstance:
    if not isinstance(instance, LentInstance):
        raise TypeError(f"{instance!r} is of another backend")
    return instance
