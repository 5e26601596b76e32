# The types of plans of requests, for the compiled form of `request.py`.
cimport cython


cdef class RequestPlan:
    cdef object __weakref__
    cdef public object details, inputs, outputs, places
    cdef public bint has_classes, has_shared

    cpdef clear(self)
