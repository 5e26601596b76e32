"""Its `finalize` fails."""


class TritonPythonModel:
    def finalize(self):
        undefined_variable
