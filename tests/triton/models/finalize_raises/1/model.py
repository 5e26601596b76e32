"""Raises in `finalize`."""


class TritonPythonModel:
    def finalize(self):
        undefined_variable
