# The types of requests for inference over HTTP, for the compiled form of `infer_request.py`.
cimport cython
cimport moonpool.runtime.server.inference._request as requests

from moonpool.runtime.server.inference._request cimport RequestPlan as PlanType

# Found without a look into the module's dictionary.
cdef object InputPlan, UINT64, _BINARY, _BINARY_ALONE, _MISSING, _VALUES, scan


@cython.final
cdef class HttpRequestPlan(requests.RequestPlan):
    cdef public bint is_plain
    cdef public object request_id, rest
    cdef public bytes id_text
    cdef public dict wanted

    @cython.locals(parameters=dict, outputs=dict)
    cdef _take(self, tuple found)
    @cython.locals(names=set)
    cdef _add_inputs(self, list values)
    cdef _refuse_repeated(self)
    cdef _add_outputs(self, list values)


cdef _missing(name)
cdef list _array(dict root, name)
cdef dict _object(dict root, name)
cdef _text(dict root, name)
cdef _number(dict root, name)
cdef _place(dict parameters)
@cython.locals(given=dict, parameters=dict, shape=list, has_data=cython.bint, has_region=cython.bint)
cdef _input(value)
cdef _ambiguous(dict given, dict parameters)
@cython.locals(given=dict, parameters=dict)
cdef _output(value)
cpdef request_details(request_id, parameters)
cdef _custom(parameters)
cdef _flag(parameters, name)
cdef _sequence(parameters)
