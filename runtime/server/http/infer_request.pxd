# The types of requests for inference over HTTP, for the compiled form of `infer_request.py`.

cdef _missing(name)
cdef _array(root, name)
cdef _object(root, name)
cdef _text(root, name)
cdef _number(root, name)
cdef _place(parameters)
cdef _input(value)
cdef _output(value)
cpdef request_details(request_id, parameters, trace_context=*)
cdef _custom(parameters)
cdef _flag(parameters, name)
cdef _sequence(parameters)
