class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("on purpose")
