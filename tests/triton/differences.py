"""The test of each row of docs/FIDELITY.md and docs/site/PROTOCOL_DIFFERENCES.md, and why moonpool differs there.

Tests without a folder are in `tests/triton` and compare both sides. Tests with a folder show moonpool's side only.
"""

from __future__ import annotations

TESTS = {
    # Why: pybind11's text shows C++ signatures, which a Python author cannot use.
    "The text of a TypeError for an argument of a wrong type": "test_snippets.py",
    # Why: CPython shows the module of types that are written in C only.
    "Type names in Python's own error texts": "test_snippets.py",
    # Why: the caller knows which request failed.
    "The request id in errors": "test_values.py::test_a_wrong_request_is_refused_in_the_same_words",
    # Why: the mistake is in the model's frames.
    "Frames of a traceback": "test_stages.py::test_a_model_that_cannot_be_loaded_says_the_same",
    # Why: the author looks for the line that raised.
    "The line number of a frame whose `finally` or `except` ran afterwards": (
        "test_returns.py::test_the_line_of_a_frame_is_where_it_raised_not_where_it_ended"
    ),
    # Why: the innermost frame alone does not say who called it.
    "Frames of a coroutine that raises after an `await`": (
        "test_senders.py::test_a_coroutine_that_raises_later_fails_its_request"
    ),
    # Why: the author can correct the file without searching.
    "A missing class, or a syntax error in the model's file": (
        "test_stages.py::test_a_model_that_cannot_be_loaded_says_the_same"
    ),
    # Why: a model may run in another environment than the server.
    "A module that is not installed": "test_stages.py::test_a_model_that_cannot_be_loaded_says_the_same",
    # Why: a model that reads a required input can only fail.
    "A request with the optional inputs only": (
        "test_values.py::test_requests_that_triton_lets_through_or_misreports_are_refused"
    ),
    # Why: the batch size is wrong, the byte size is right.
    "An empty batch": "test_values.py::test_requests_that_triton_lets_through_or_misreports_are_refused",
    # Why: the response was complete when the mistake happened.
    "A model that is not decoupled sends its response, and then sends or returns another one or raises": (
        "test_differences.py::test_an_answer_that_was_sent_stands"
    ),
    # Why: nobody can read the remaining responses.
    "A model drops an iterator over responses before their end": "tests/e2e/test_bls_streams.py::test_a_stream_is_left",
    # Why: a call from Python has no protocol to speak of.
    "`Runtime.infer` of a decoupled model": "test_senders.py::test_a_decoupled_model_needs_a_stream",
    # Why: nothing polls there.
    "A client loads or unloads with `--model-control-mode=none`": (
        "tests/server/test_serve_requests.py::test_nobody_controls_the_models_in_the_other_modes"
    ),
    # Why: a model can tell a wrong request from a failed one.
    "Error codes of a model's requests to other models": "test_differences.py",
    # Why: a dropped error looks like success.
    "An error between two responses to a model that asked": "test_differences.py",
    # Why: `struct.error` does not say which element is wrong.
    "Bad bytes in `deserialize_bytes_tensor`": "test_differences.py",
    # Why: the author sees which element it was.
    "An element of a BYTES array whose `__str__` raises": "test_differences.py",
    # Why: the function is public, and works here.
    "`Tensor.triton_dtype()`": "test_differences.py",
    # Why: both are valid uses of DLPack.
    "`Tensor.from_dlpack` called on a tensor, or with a producer whose `__dlpack__` takes no `stream`": (
        "test_differences.py"
    ),
    # Why: KServe clients send floats.
    "Parameters of type float": "test_differences.py",
    # Why: every other unsigned argument raises TypeError.
    "A negative `correlation_id`": "test_differences.py",
    # Why: Triton's documentation allows string ids.
    "A correlation id of type string as a control input": (
        "test_sequences.py::test_an_id_that_is_given_to_the_model_as_text_arrives_here"
    ),
    # Why: the model would compute on values that nobody sent.
    "A control input or a `state` with the name of an input": "test_sequences.py",
    # Why: the field has an effect for all other models.
    "`state` in a sequence batcher, for Python models": (
        "tests/triton/core/test_states.py::test_a_python_model_gets_its_state_back_here_alone"
    ),
    # Why: a configuration must not lose a state.
    "A `state` without name, datatype or dims, or one of two with the same name": (
        "tests/runtime/model/config/test_sequences.py"
    ),
    # Why: it is a wish about memory.
    "`use_growable_memory` of a `state` in ordinary memory": (
        "tests/e2e/test_states.py::test_a_state_of_variable_size_grows"
    ),
    # Why: the file says how large it is.
    "An `initial_state` of a state of variable size": (
        "tests/e2e/test_states.py::test_an_initial_state_says_how_large_a_variable_one_is"
    ),
    # Why: an operator has to see that requests are lost.
    "A request that finds the queue of its model full": (
        "test_watching.py::test_a_request_that_a_full_queue_refuses_counts_here_alone"
    ),
    # Why: an operator reads there what clients asked for.
    "Warm-up requests in the statistics": "tests/triton/core/test_warmup.py::test_warm_up_does_not_count_here",
    # Why: a model that checks its inputs would fail its own load.
    "`random_data` of a warm-up sample": "tests/triton/core/test_warmup.py::test_random_numbers_are_numbers",
    # Why: it is a misspelt name.
    "An input of a warm-up sample that the model does not have": (
        "tests/e2e/test_warmup.py::test_data_that_does_not_fit_is_refused"
    ),
    # Why: one configuration must not end the server.
    "A warm-up batch of several requests for a model without batches": (
        "tests/e2e/test_warmup.py::test_a_model_without_batches_is_warmed_up_with_several_requests"
    ),
    # Why: a client must not get what another one asked for.
    "Equal requests of the response cache": (
        "tests/triton/core/test_response_cache.py::test_parameters_and_shapes_are_part_of_the_key_here"
    ),
    # Why: otherwise a slow model ends its own sequences.
    "The idle time of a sequence": "tests/runtime/schedule/test_sequences.py",
    # Why: a model keeps one state for one id.
    "A new sequence under an id whose previous sequence still has unanswered requests": (
        "tests/runtime/schedule/test_sequences.py"
    ),
    # Why: uninitialised memory may hold another client's data.
    "Tensors of an empty slot": "tests/e2e/test_sequences.py",
    "A model asks a model that does not exist": "test_differences.py::test_a_text_is_that_of_todays_triton",
    "The file of a model is missing": (
        "tests/server/test_serve.py::test_a_model_file_that_is_missing_is_logged_in_tritons_words"
    ),
    "A client asks for the readiness of a model whose instances have no process": (
        "tests/server/test_serve.py::test_each_probe_of_an_instance_that_is_down_is_logged_in_todays_words"
    ),
    # Why: Triton writes the reason to its log only, where a client cannot look.
    "Why a model cannot be loaded": "tests/triton/protocol/test_protocol.py",
    # Why: an empty override changes nothing.
    "An empty configuration for a load": "tests/triton/protocol/test_protocol.py",
    # Why: the model would compute on other numbers than the client sent.
    "Whole numbers beyond their datatype": "tests/triton/protocol/test_protocol.py",
    # Why: no JSON parser can read such a response.
    "BYTES that are no UTF-8, in JSON": "tests/triton/protocol/test_protocol.py",
    # Why: one mistake has one text, wherever it is made.
    "What is wrong with bytes that are to be BYTES": "tests/triton/protocol/test_protocol.py",
    # Why: the client has to change that output.
    "Which output cannot be sent, or classified": "tests/triton/protocol/test_protocol.py",
    # Why: people correct a request from its beginning.
    "Which input is wrong, if several are": "tests/triton/protocol/test_protocol.py",
    # Why: the client has to remove that input.
    "An input too many": "tests/triton/protocol/test_protocol.py",
    # Why: the batch size is wrong, the byte size is right.
    "An empty batch, over the network": "tests/triton/protocol/test_protocol.py",
    # Why: the product overflows, so nothing may be computed with it.
    "A shape with more elements than memory can hold": "tests/triton/protocol/test_protocol.py",
    # Why: without the header the whole body is JSON.
    "Bytes behind JSON without a header length": "tests/triton/protocol/test_protocol.py",
    # Why: a float loses the lowest bits of an id.
    "Whole numbers of 64 bits as parameters": "tests/triton/protocol/test_protocol.py",
    # Why: an empty id cannot name a sequence.
    "An empty text for a sequence": "tests/triton/protocol/test_protocol.py",
    # Why: both are the same mistake.
    "A version below 0": "tests/triton/protocol/test_protocol.py",
    # Why: the client sees which of them is wrong.
    "An object that is smaller than the region": "tests/triton/protocol/test_protocol.py",
    # Why: moonpool maps memory when a tensor needs it.
    "A region of no bytes": "tests/triton/protocol/test_protocol.py",
    # Why: an unregister request with an empty name removes all regions.
    "A region without a name": "tests/triton/protocol/test_protocol.py",
    # Why: moonpool maps from the beginning of the page.
    "A region that begins inside a page": "tests/triton/protocol/test_protocol.py",
    # Why: a key never makes the server look outside `/dev/shm`.
    "A key that can be no name of an object": "tests/triton/protocol/test_protocol.py",
    # Why: the request was correct.
    "The status of what was cancelled": "tests/triton/protocol/test_protocol.py",
    # Why: no JSON parser can read such a body.
    "Parameters that are NaN or infinite": (
        "tests/server/http/test_inference.py::test_a_response_parameter_that_json_does_not_have_is_an_error"
    ),
    # Why: a proxy in front may check the other one.
    "`Host`, `Origin` or `Authorization` in two lines": (
        "tests/server/http/test_limits.py::test_bytes_that_are_not_http_are_refused_and_end_the_connection"
    ),
    # Why: any web page can make a browser send such a body.
    "Changes by a body of the type `text/plain` or `multipart/form-data`": (
        "tests/server/http/test_restrictions.py::test_requests_that_a_form_can_send_change_nothing"
    ),
    # Why: the page could load a model, which runs code.
    "A browser's request for a page of another origin": (
        "tests/server/page/test_hostile_pages.py::test_forms_in_frames_are_refused"
    ),
    # Why: people try these addresses first.
    "`GET /v2/models`, `/docs` and `/metrics` on the port for HTTP": (
        "tests/server/http/test_signposts.py::test_the_models_that_are_ready_are_listed"
    ),
    # Why: one client must not take the memory of all others.
    "Tensors of over a million strings, or 8 million integers, as numbers and strings of a gRPC message": (
        "tests/server/grpc/test_hostile.py::test_fields_that_would_take_more_memory_than_the_message_are_refused"
    ),
    # Why: one client must not take the memory of all others.
    "A client that does not read its gRPC stream": (
        "tests/server/grpc/test_stream.py::test_a_client_that_does_not_read_is_left_when_too_much_waits_for_it"
    ),
    # Why: the server cannot know which value the client meant.
    "A parameter that stands twice in `generate`": "tests/triton/protocol/test_protocol.py",
    # Why: KServe's own REST client reads it.
    "The body of a health check": "tests/triton/protocol/test_protocol.py",
    # Why: a header must not set what the body did not.
    "A forwarded header with the name of a parameter of Triton's own": "tests/server/http/test_forwarding.py",
    # Why: both are the same mistake.
    "A setting of traces that is out of range": "tests/triton/protocol/test_protocol.py",
    "A shape of 2⁴⁰ elements in JSON, with one value": (
        "tests/server/hostile/test_requests.py::test_sizes_that_nothing_has_are_refused"
    ),
    "An error of a stream as its status (`triton_grpc_error`)": "tests/server/grpc/test_stream.py",
    "Classification of BYTES": "tests/server/hostile/test_requests.py::test_classes_of_texts_are_refused",
    "`Tensor.from_dlpack` of a numpy array": "test_differences.py::test_calls_that_triton_dies_of_do_no_harm",
    "`is_cancelled()` of a request that a model made": "test_differences.py::test_calls_that_triton_dies_of_do_no_harm",
    "A response that is an error and has no outputs, to a model that asked": (
        "test_differences.py::test_calls_that_triton_dies_of_do_no_harm"
    ),
    "`is_cancelled()` of a sender after the last response": (
        "test_differences.py::test_a_sender_may_be_asked_after_the_end"
    ),
    "An exception, or a response, after the last response was sent": (
        "test_differences.py::test_an_exception_after_the_last_response_harms_nobody"
    ),
    "A sender is dropped before it sent the last flag": (
        "test_differences.py::test_a_request_that_nobody_can_answer_ends"
    ),
    "`load_model` of a model that no repository has": "test_differences.py::test_calls_that_triton_dies_of_do_no_harm",
    "A metric with an invalid name": "test_differences.py::test_calls_that_triton_dies_of_do_no_harm",
    "`execute` returns a generator": "test_differences.py::test_a_generator_is_a_wrong_return",
    "A request with END is rescheduled, or a request to a model that is not iterative": "tests/e2e/test_iterative.py",
    # Why: a load that cannot end must fail.
    "A model loads itself in `initialize`, or models load each other there": (
        "tests/e2e/test_model_control.py::test_models_that_load_each_other_are_told"
    ),
    # Why: the author of the calling model does not see the server's log.
    "The reason why `load_model` cannot read a model": (
        "tests/e2e/test_model_control.py::test_an_impossible_load_is_refused_in_tritons_words"
    ),
    # Why: the caller meant to send a file.
    "A key of `files` without `file:`": (
        "tests/e2e/test_model_control.py::test_an_impossible_load_is_refused_in_tritons_words"
    ),
    # Why: the author meant to set it.
    "A value that does not fit the schema in a completed configuration": (
        "tests/e2e/test_auto_complete.py::test_a_mistake_in_it_fails_the_load"
    ),
}
