# The types of responses over HTTP, for the compiled form of `infer_response.py`.
cimport cython

from moonpool.runtime.server.http._infer_request cimport HttpRequestPlan as PlanType

# Found without a look into the module's dictionary.
cdef object orjson, _models, _outputs

@cython.locals(plan=PlanType, parts=list, text=list, described=list, is_first=cython.bint)
cpdef render(service, model, plan, response, most_json_bytes)
cpdef tuple finished(list text, list parts)
@cython.locals(key=tuple)
cdef bytes _model_text(model)
@cython.locals(key=tuple)
cdef bytes _output_text(name, datatype)
cdef dict _root(model, request_id, outputs, parameters)
cdef dict _describe(service, name, output, how, parts)
cdef tuple _headers(text_bytes, parts)
