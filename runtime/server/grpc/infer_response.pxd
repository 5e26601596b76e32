# The types of responses over gRPC, for the compiled form of `infer_response.py`.
cimport cython


cpdef answer(service, model, plan, request_id, response)
cpdef answer_in_stream(service, model, plan, request_id, response, final)
@cython.locals(tensors=list, described=list)
cdef list _pieces(service, model, plan, request_id, response, final)
cdef bytes _head(tuple key)
