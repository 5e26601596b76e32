# The types of the models of steps, for the compiled form of `members.py`.
cimport cython

from moonpool.ipc.port._port cimport RequestBase as RequestType
from moonpool.runtime.model._signature cimport Signature as SignatureType


# Found without a look into the module's dictionary.
cdef object BYTES, Response, WireTensor, _NO_SEQUENCE, _ndarray


cdef class Shaping:
    cdef object _batches, _dims, _mixed
    cdef public bint is_mixed

    cpdef fitted(self, name, array)


@cython.final
cdef class AskedOutputs:
    cdef object outputs
    cdef bint feeds_caller


@cython.final
cdef class StepModel:
    cdef object _asked, _outputs
    cdef Shaping _shaping
    cdef bint _has_strings
    cdef object _step
    cdef public object hosted

    cpdef inputs(self, tensors)
    @cython.locals(asked=AskedOutputs, request=RequestType, signature=SignatureType)
    cpdef request(self, flow, inputs, sequence, RequestType asked_by)
    cdef _ask(self, flow)


@cython.final
cdef class StepModels:
    cdef object _graph, _find
    cdef dict _models

    @cython.locals(model=StepModel)
    cpdef of(self, step)


@cython.final
cdef class EnsembleCaller:
    cdef object _names, _outputs, _written
    cdef Shaping _shaping
    cdef public object as_they_are

    @cython.locals(given=dict)
    cpdef dict given(self, RequestType request)
    cpdef response(self, RequestType request, tensors)
