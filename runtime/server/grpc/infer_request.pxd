# The types of requests for inference over gRPC, for the compiled form of `infer_request.py`.
cimport cython
cimport moonpool.runtime.server.grpc._wire as wire
cimport moonpool.runtime.server.inference._request as requests

from moonpool.runtime.server.grpc._wire cimport FieldReader as FieldReaderType
from moonpool.runtime.server.inference._request cimport RequestPlan as PlanType

# Found without a look into the module's dictionary.
cdef dict CODES
cdef object InputPlan, RegionPlace
cdef Py_ssize_t MAX_DIMS
cdef int MOST_PARTS
cdef unsigned long long _MODEL, _VERSION, _ID, _PARAMETERS, _INPUTS, _OUTPUTS, _TENSORS
cdef unsigned long long _NAME, _DATATYPE, _SHAPE, _DIM
cdef unsigned long long _INPUT_PARAMETER, _OUTPUT_PARAMETER, _KEY, _VALUE, _FLAG, _NUMBER, _TEXT
cdef int _USUAL_FIELDS


@cython.final
cdef class GrpcRequestPlan(requests.RequestPlan):
    cdef public bint is_large
    cdef public object contents, parameters
    cdef public dict classes

    cdef list _planned(self, list inputs, tensors)
    cdef _add_output(self, output)
    cdef _details(self, request_id, forwarded)
    cpdef details_of(self, request_id, forwarded)


cdef class InferMessage:
    cdef object __weakref__
    cdef list _inputs, _outputs
    cdef dict _places
    cdef public list tensors
    cdef object _rest
    cdef public object data, model, request_id, version
    cdef public GrpcRequestPlan plan
    cdef public bint is_placed
    cdef bint _wants_empty_final
    cdef public long long read_ns

    @cython.locals(
        fields=cython.int, others=cython.int, tag=cython.ulonglong, rest=list, parameters=list, flags=dict,
        inner=FieldReaderType,
    )
    cdef list _take_apart(self, FieldReaderType reader, bint is_cut)
    cpdef GrpcRequestPlan read(self)
    cdef dict _arrays(self, plan, service, hosted)
    cdef _of_contents(self, plan, index)
    cdef _refused(self, error, plan, hosted)


@cython.locals(message=InferMessage)
cpdef begun(bytes first)
@cython.locals(fields=cython.int, tag=cython.ulonglong, shape=list, parameters=dict)
cdef _usual_input(FieldReaderType reader)
@cython.locals(parameters=dict)
cdef _usual_output(FieldReaderType reader, dict places)
@cython.locals(entry=FieldReaderType, value=FieldReaderType)
cdef bint _add_parameter(FieldReaderType reader, dict parameters) except -1
cdef _usual_place(dict parameters)
cdef _of_memory(service, hosted, name, code, shape, place)
cdef _input_plan(tensor)
cdef _packed(name, code, values)
cdef _check_described(plan, hosted)
cdef _parameters_of(given)
cdef _place_of(tensor, parameters)
cdef _value(tensor, parameters, name, kind)
