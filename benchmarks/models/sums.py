"""add_sub as moonpool's own kind of model: the rows of a batch in one array."""

from moonpool import Batch, Float32, Outputs


class AddSub:
    def __call__(self, INPUT0: Float32[Batch, 4], INPUT1: Float32[Batch, 4]) -> Outputs(  # noqa: N803
        OUTPUT0=Float32[Batch, 4], OUTPUT1=Float32[Batch, 4]
    ):
        return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}
