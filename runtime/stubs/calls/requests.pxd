# The types of a call, for the compiled form of `requests.py`.


cdef class ModelCall:
    cdef public object model, number, request, scheduler, _answer
    cdef public long long batch
    cdef public bint is_cancelled, takes_many

    cpdef respond(self, outcome)
    cpdef resolve(self, outcome)
