# The types of a signature, for the compiled form of `signature.py`.

cimport cython

# Found without a look into the module's dictionary.
cdef object details_of


@cython.final
cdef class Signature:
    cdef object __weakref__
    cdef public object _model, _note, _intake, _max_batch_size, _inputs, _reshaped, _in_order, _usual, _required
    cdef public object _all_outputs, _outputs, _shapes, usual

    cpdef request(self, inputs, outputs=*, details=*)
    cdef _detailed(self, request, outputs, details)
