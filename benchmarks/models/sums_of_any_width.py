"""add_sub as moonpool's own kind of model, for rows of any width."""

from moonpool import Batch, Float32, Outputs


class AddSub:
    def __call__(self, INPUT0: Float32[Batch, :], INPUT1: Float32[Batch, :]) -> Outputs(  # noqa: N803
        OUTPUT0=Float32[Batch, :], OUTPUT1=Float32[Batch, :]
    ):
        return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}
