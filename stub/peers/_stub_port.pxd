# What the port of batches and the asker of calls share: the attributes of objects, and memory.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

from moonpool.ipc.port._port cimport Block
from moonpool.ipc.slots._slots cimport SlotChannel


# Attributes of objects that a model may have are read as pointers, as one that was deleted is null.

cdef class TensorBase:
    cdef object _array, _datatype, _name, _shape, _strings, _wire


cdef class InferenceResponseBase:
    cdef object _error, _outputs, _parameters


cdef class InferenceRequestBase:
    cdef object _cancelled, _inputs, _model_name, _model_version, _origin, _preferred_memory, _release_flags, _reply
    cdef object _requested_output_names, _row, _sender, _trace


cdef class BatchBase:
    cdef object has_copies, kept, lent, places, targets


cdef class AnswerBase:
    cdef object blocks, layouts, remarks, states


# A tensor that is copied: so many bytes of an array that has `whole`, from `source` on.
cdef struct Output:
    uint64_t index, datatype, size, offset, source, whole
    size_t first_dim, dims


cdef class OwnBlocks:
    cdef object _regions, _returned, _take_returned, _acquire, _release, _arena
    cdef dict _spares
    # The first region of the arena: its number, itself, and the blocks in it.
    cdef int64_t _first
    cdef object _region
    cdef dict _live

    cdef allocate(self, uint64_t size)
    cdef int give_back(self, block) except -1
    cdef Block fill(self, block, list arrays, const vector[Output]& placed, list targets, uint64_t size,
                    SlotChannel slots, size_t announced) except *
    cdef take_spare(self, uint64_t size)
    cdef _spare(self, uint64_t size)
    cdef bint _find_first(self) except -1


cdef bint is_small_int(PyObject* found, int64_t* number) noexcept
cdef bint is_tensor(object) noexcept
cdef bint is_request(object) noexcept
cdef array_of(TensorBase tensor, Output* output, vector[int64_t]* dims)
cdef bint add_lease(dict regions, Block block, list leases, list places, list lent) except -1
cdef TensorBase tensor_over(name, uint64_t datatype, const int64_t* dims, uint64_t count, uint64_t offset,
                            uint64_t size, lease)
cdef InferenceResponseBase response_of(list outputs)
