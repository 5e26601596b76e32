# The types of requests for inference over gRPC, for the compiled form of `infer_request.py`.
cimport cython


cdef class InferMessage:
    cdef object __weakref__
    cdef object _message, _parts
    cdef public object data, model, plan, request_id, version
    cdef public bint is_placed
    cdef public long long read_ns

    cpdef read(self)
    cdef dict _inputs(self, plan, service, hosted)
    cdef _of_contents(self, plan, index)
    cdef _refused(self, error, plan, hosted)


cpdef begun(bytes first)
cdef _of_memory(service, hosted, name, code, shape, place)
cdef _input_plan(tensor)
cdef _packed(name, code, values)
cdef _check_described(plan, hosted)
cdef _parameters_of(given)
cdef _place_of(tensor, parameters)
cdef _value(tensor, parameters, name, kind)
