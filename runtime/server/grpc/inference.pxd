# The types of ModelInfer, for the compiled form of `inference.py`.
cimport cython
cimport moonpool.runtime.server.inference._call as calls

from moonpool.runtime.server.grpc._call cimport GrpcCall as CallType
from moonpool.runtime.server.inference._call cimport InferCall as InferType


cdef class GrpcInference(calls.Inference):
    cdef object _forwarding


@cython.final
cdef class GrpcInferCall(calls.InferCall):
    cdef CallType _call
    cdef object _message
