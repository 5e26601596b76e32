"""Serves the models of `moonpool conformance` in an MLServer, each as `moonpool.testing` runs it.

python mlserver_models.py REPOSITORY FOLDER      writes the settings into a new folder
cd FOLDER && mlserver start .                    with this file and moonpool on PYTHONPATH
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from moonpool.runtime.cli.conformance import LOADED

    repository, folder = map(Path, sys.argv[1:])
    for name in LOADED:
        parameters = {"uri": str((repository / name).resolve()), "version": "1"}
        settings = {"name": name, "implementation": "mlserver_models.TritonModel", "parameters": parameters}
        (folder / name).mkdir(parents=True)
        (folder / name / "model-settings.json").write_text(json.dumps(settings))
    (folder / "settings.json").write_text(json.dumps({"debug": False, "parallel_workers": 0}))
else:
    import numpy as np
    from mlserver import MLModel, types
    from mlserver.codecs import NumpyCodec, StringCodec
    from mlserver.errors import InferenceError

    import moonpool.testing

    class TritonModel(MLModel):
        """Is a model of Triton."""

        async def load(self) -> bool:
            self._model = moonpool.testing.load(Path(self._settings.parameters.uri))
            return True

        async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
            try:
                outputs = self._model.infer({each.name: _decoded(each) for each in payload.inputs})
                wanted = [each.name for each in payload.outputs or []] or list(outputs)
                made = [_encoded(name, outputs[name]) for name in wanted]
            except Exception as error:  # whatever a model raises
                raise InferenceError(str(error)) from error
            return types.InferenceResponse(model_name=self.name, model_version="1", id=payload.id, outputs=made)

    def _decoded(given: types.RequestInput) -> Any:
        if given.datatype != "BYTES":
            return NumpyCodec.decode_input(given)
        texts = [each.encode() if isinstance(each, str) else each for each in StringCodec.decode_input(given)]
        return np.array(texts, object).reshape(given.shape)

    def _encoded(name: str, value: Any) -> types.ResponseOutput:
        if value.dtype == object:
            texts = [each.decode() if isinstance(each, bytes) else each for each in value.ravel()]
            output = StringCodec.encode_output(name, texts)
        else:
            output = NumpyCodec.encode_output(name, value)
        # As the model has it: one dimension would become two, and its codec a parameter.
        output.shape, output.parameters = list(value.shape), None
        return output
