// Triton's C interface, as far as this backend uses it: looked up at run time and never linked, so that one
// library loads into every server, whatever its version, and into programs that hold the server as a library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace moonpool::triton {

// Types of the server, TRITONSERVER_ and TRITONBACKEND_ with these names. We only hold pointers to them.
struct Error;
struct InferenceRequest;
struct InferenceResponse;
struct InferenceTrace;
struct Message;
struct Metric;
struct MetricArgs;
struct MetricFamily;
struct Parameter;
struct ResponseAllocator;
struct Server;
struct Backend;
struct BackendAttribute;
struct Input;
struct Model;
struct ModelInstance;
struct Output;
struct Request;
struct Response;
struct ResponseFactory;
using Trace = InferenceTrace;

// The numbers of Triton's enumerations, which travel as `int`. Codes of errors and of datatypes are those of
// moonpool's own wire.
enum ErrorCode : int {
  kUnknown,
  kInternal,
  kNotFound,
  kInvalidArg,
  kUnavailable,
  kUnsupported,
  kAlreadyExists,
  kCancelled
};
enum LogLevel : int { kInfo, kWarning, kError, kVerbose };
enum MemoryType : int { kCpu, kCpuPinned, kGpu };
enum ParameterType : int { kString, kInt, kBool, kParameterBytes, kDouble };
enum ReleaseFlag : uint32_t { kReleaseAll = 1, kReleaseReschedule = 2 };
enum ResponseFlag : uint32_t { kResponseFinal = 1 };
constexpr int kBytes = 13;

// Callbacks of the server for our requests: allocate and free an output, release the request, deliver a response.
using Allocate = Error*(ResponseAllocator*, const char* output, size_t size, int memory_type, int64_t memory_type_id,
                        void* user, void** buffer, void** buffer_user, int* actual_type, int64_t* actual_id);
using Deallocate = Error*(ResponseAllocator*, void* buffer, void* buffer_user, size_t size, int memory_type,
                          int64_t memory_type_id);
using Begin = Error*(ResponseAllocator*, void* user);
using Released = void(InferenceRequest*, uint32_t flags, void* user);
using Responded = void(InferenceResponse*, uint32_t flags, void* user);

// The functions have their names without TRITONSERVER_ or TRITONBACKEND_. An OPTIONAL one is null in a server that is
// too old to have it.
#define MOONPOOL_TRITON_FUNCTIONS(REQUIRED, OPTIONAL)                                                                \
  REQUIRED(TRITONSERVER_, ErrorNew, Error*, (int code, const char* message))                                         \
  REQUIRED(TRITONSERVER_, ErrorDelete, void, (Error*))                                                               \
  REQUIRED(TRITONSERVER_, ErrorCode, int, (Error*))                                                                  \
  REQUIRED(TRITONSERVER_, ErrorMessage, const char*, (Error*))                                                       \
  REQUIRED(TRITONSERVER_, LogIsEnabled, bool, (int level))                                                           \
  REQUIRED(TRITONSERVER_, LogMessage, Error*, (int level, const char* file, int line, const char* message))          \
  REQUIRED(TRITONSERVER_, MessageNewFromSerializedJson, Error*, (Message**, const char* text, size_t size))          \
  REQUIRED(TRITONSERVER_, MessageSerializeToJson, Error*, (Message*, const char** text, size_t* size))               \
  REQUIRED(TRITONSERVER_, MessageDelete, Error*, (Message*))                                                         \
  REQUIRED(TRITONSERVER_, InferenceRequestAddInput, Error*,                                                          \
           (InferenceRequest*, const char* name, int datatype, const int64_t* shape, uint64_t dims))                 \
  REQUIRED(TRITONSERVER_, InferenceRequestAddRequestedOutput, Error*, (InferenceRequest*, const char* name))         \
  REQUIRED(TRITONSERVER_, InferenceRequestAppendInputData, Error*,                                                   \
           (InferenceRequest*, const char* name, const void*, size_t size, int memory_type, int64_t memory_type_id)) \
  OPTIONAL(TRITONSERVER_, InferenceRequestCancel, Error*, (InferenceRequest*))                                       \
  REQUIRED(TRITONSERVER_, InferenceRequestDelete, Error*, (InferenceRequest*))                                       \
  REQUIRED(TRITONSERVER_, InferenceRequestNew, Error*,                                                               \
           (InferenceRequest**, Server*, const char* model, int64_t version))                                        \
  REQUIRED(TRITONSERVER_, InferenceRequestSetBoolParameter, Error*, (InferenceRequest*, const char* name, bool))     \
  REQUIRED(TRITONSERVER_, InferenceRequestSetCorrelationId, Error*, (InferenceRequest*, uint64_t))                   \
  REQUIRED(TRITONSERVER_, InferenceRequestSetCorrelationIdString, Error*, (InferenceRequest*, const char*))          \
  OPTIONAL(TRITONSERVER_, InferenceRequestSetDoubleParameter, Error*, (InferenceRequest*, const char* name, double)) \
  REQUIRED(TRITONSERVER_, InferenceRequestSetFlags, Error*, (InferenceRequest*, uint32_t))                           \
  REQUIRED(TRITONSERVER_, InferenceRequestSetId, Error*, (InferenceRequest*, const char*))                           \
  REQUIRED(TRITONSERVER_, InferenceRequestSetIntParameter, Error*, (InferenceRequest*, const char* name, int64_t))   \
  REQUIRED(TRITONSERVER_, InferenceRequestSetReleaseCallback, Error*, (InferenceRequest*, Released*, void* user))    \
  REQUIRED(TRITONSERVER_, InferenceRequestSetResponseCallback, Error*,                                               \
           (InferenceRequest*, ResponseAllocator*, void* allocator_user, Responded*, void* user))                    \
  REQUIRED(TRITONSERVER_, InferenceRequestSetStringParameter, Error*,                                                \
           (InferenceRequest*, const char* name, const char*))                                                       \
  REQUIRED(TRITONSERVER_, InferenceRequestSetTimeoutMicroseconds, Error*, (InferenceRequest*, uint64_t))             \
  REQUIRED(TRITONSERVER_, InferenceResponseDelete, Error*, (InferenceResponse*))                                     \
  REQUIRED(TRITONSERVER_, InferenceResponseError, Error*, (InferenceResponse*))                                      \
  REQUIRED(                                                                                                          \
      TRITONSERVER_, InferenceResponseOutput, Error*,                                                                \
      (InferenceResponse*, uint32_t index, const char** name, int* datatype, const int64_t** shape, uint64_t* dims,  \
       const void**, size_t* size, int* memory_type, int64_t* memory_type_id, void** buffer_user))                   \
  REQUIRED(TRITONSERVER_, InferenceResponseOutputCount, Error*, (InferenceResponse*, uint32_t*))                     \
  REQUIRED(TRITONSERVER_, InferenceResponseParameter, Error*,                                                        \
           (InferenceResponse*, uint32_t index, const char** name, int* type, const void**))                         \
  REQUIRED(TRITONSERVER_, InferenceResponseParameterCount, Error*, (InferenceResponse*, uint32_t*))                  \
  OPTIONAL(TRITONSERVER_, MetricArgsDelete, Error*, (MetricArgs*))                                                   \
  OPTIONAL(TRITONSERVER_, MetricArgsNew, Error*, (MetricArgs**))                                                     \
  OPTIONAL(TRITONSERVER_, MetricArgsSetHistogram, Error*, (MetricArgs*, const double* buckets, uint64_t count))      \
  REQUIRED(TRITONSERVER_, MetricDelete, Error*, (Metric*))                                                           \
  REQUIRED(TRITONSERVER_, MetricFamilyDelete, Error*, (MetricFamily*))                                               \
  REQUIRED(TRITONSERVER_, MetricFamilyNew, Error*,                                                                   \
           (MetricFamily**, int kind, const char* name, const char* description))                                    \
  REQUIRED(TRITONSERVER_, MetricIncrement, Error*, (Metric*, double))                                                \
  REQUIRED(TRITONSERVER_, MetricNew, Error*, (Metric**, MetricFamily*, const Parameter** labels, uint64_t count))    \
  OPTIONAL(TRITONSERVER_, MetricNewWithArgs, Error*,                                                                 \
           (Metric**, MetricFamily*, const Parameter** labels, uint64_t count, const MetricArgs*))                   \
  OPTIONAL(TRITONSERVER_, MetricObserve, Error*, (Metric*, double))                                                  \
  REQUIRED(TRITONSERVER_, MetricSet, Error*, (Metric*, double))                                                      \
  REQUIRED(TRITONSERVER_, MetricValue, Error*, (Metric*, double*))                                                   \
  REQUIRED(TRITONSERVER_, ParameterBytesNew, Parameter*, (const char* name, const void*, uint64_t size))             \
  REQUIRED(TRITONSERVER_, ParameterDelete, void, (Parameter*))                                                       \
  REQUIRED(TRITONSERVER_, ParameterNew, Parameter*, (const char* name, int type, const void*))                       \
  REQUIRED(TRITONSERVER_, ResponseAllocatorNew, Error*, (ResponseAllocator**, Allocate*, Deallocate*, Begin*))       \
  REQUIRED(TRITONSERVER_, ServerInferAsync, Error*, (Server*, InferenceRequest*, Trace*))                            \
  REQUIRED(TRITONSERVER_, ServerLoadModel, Error*, (Server*, const char* name))                                      \
  REQUIRED(TRITONSERVER_, ServerLoadModelWithParameters, Error*,                                                     \
           (Server*, const char* name, const Parameter**, uint64_t count))                                           \
  REQUIRED(TRITONSERVER_, ServerModelIsReady, Error*, (Server*, const char* name, int64_t version, bool*))           \
  REQUIRED(TRITONSERVER_, ServerModelTransactionProperties, Error*,                                                  \
           (Server*, const char* name, int64_t version, uint32_t* flags, void** unused))                             \
  REQUIRED(TRITONSERVER_, ServerUnloadModel, Error*, (Server*, const char* name))                                    \
  REQUIRED(TRITONSERVER_, ServerUnloadModelAndDependents, Error*, (Server*, const char* name))                       \
  OPTIONAL(TRITONSERVER_, InferenceTraceContext, Error*, (Trace*, const char** context))                             \
  OPTIONAL(TRITONSERVER_, InferenceTraceSpawnChildTrace, Error*, (Trace*, Trace * *child))                           \
  OPTIONAL(TRITONBACKEND_, BackendAttributeSetParallelModelInstanceLoading, Error*, (BackendAttribute*, bool))       \
  REQUIRED(TRITONBACKEND_, BackendArtifacts, Error*, (Backend*, int* kind, const char** location))                   \
  REQUIRED(TRITONBACKEND_, BackendConfig, Error*, (Backend*, Message**))                                             \
  REQUIRED(TRITONBACKEND_, BackendName, Error*, (Backend*, const char**))                                            \
  REQUIRED(TRITONBACKEND_, BackendSetState, Error*, (Backend*, void*))                                               \
  REQUIRED(TRITONBACKEND_, BackendState, Error*, (Backend*, void**))                                                 \
  REQUIRED(TRITONBACKEND_, InputBuffer, Error*,                                                                      \
           (Input*, uint32_t index, const void**, uint64_t* size, int* memory_type, int64_t* memory_type_id))        \
  REQUIRED(TRITONBACKEND_, InputProperties, Error*,                                                                  \
           (Input*, const char** name, int* datatype, const int64_t** shape, uint32_t* dims, uint64_t* size,         \
            uint32_t* buffers))                                                                                      \
  REQUIRED(TRITONBACKEND_, ModelAutoCompleteConfig, Error*, (Model*, bool*))                                         \
  REQUIRED(TRITONBACKEND_, ModelBackend, Error*, (Model*, Backend**))                                                \
  REQUIRED(TRITONBACKEND_, ModelConfig, Error*, (Model*, uint32_t version, Message**))                               \
  REQUIRED(TRITONBACKEND_, ModelName, Error*, (Model*, const char**))                                                \
  REQUIRED(TRITONBACKEND_, ModelRepository, Error*, (Model*, int* kind, const char** location))                      \
  REQUIRED(TRITONBACKEND_, ModelServer, Error*, (Model*, Server**))                                                  \
  REQUIRED(TRITONBACKEND_, ModelSetConfig, Error*, (Model*, uint32_t version, Message*))                             \
  REQUIRED(TRITONBACKEND_, ModelSetState, Error*, (Model*, void*))                                                   \
  REQUIRED(TRITONBACKEND_, ModelState, Error*, (Model*, void**))                                                     \
  REQUIRED(TRITONBACKEND_, ModelVersion, Error*, (Model*, uint64_t*))                                                \
  REQUIRED(TRITONBACKEND_, ModelInstanceDeviceId, Error*, (ModelInstance*, int32_t*))                                \
  REQUIRED(TRITONBACKEND_, ModelInstanceKind, Error*, (ModelInstance*, int*))                                        \
  REQUIRED(TRITONBACKEND_, ModelInstanceModel, Error*, (ModelInstance*, Model**))                                    \
  REQUIRED(TRITONBACKEND_, ModelInstanceName, Error*, (ModelInstance*, const char**))                                \
  REQUIRED(                                                                                                          \
      TRITONBACKEND_, ModelInstanceReportBatchStatistics, Error*,                                                    \
      (ModelInstance*, uint64_t batch, uint64_t start, uint64_t compute_start, uint64_t compute_end, uint64_t end))  \
  REQUIRED(TRITONBACKEND_, ModelInstanceReportStatistics, Error*,                                                    \
           (ModelInstance*, Request*, bool success, uint64_t start, uint64_t compute_start, uint64_t compute_end,    \
            uint64_t end))                                                                                           \
  REQUIRED(TRITONBACKEND_, ModelInstanceSetState, Error*, (ModelInstance*, void*))                                   \
  REQUIRED(TRITONBACKEND_, ModelInstanceState, Error*, (ModelInstance*, void**))                                     \
  REQUIRED(TRITONBACKEND_, OutputBuffer, Error*,                                                                     \
           (Output*, void**, uint64_t size, int* memory_type, int64_t* memory_type_id))                              \
  REQUIRED(TRITONBACKEND_, InferenceRequestTimeoutMicroseconds, Error*, (Request*, uint64_t*))                       \
  REQUIRED(TRITONBACKEND_, RequestCorrelationId, Error*, (Request*, uint64_t*))                                      \
  REQUIRED(TRITONBACKEND_, RequestCorrelationIdString, Error*, (Request*, const char**))                             \
  REQUIRED(TRITONBACKEND_, RequestFlags, Error*, (Request*, uint32_t*))                                              \
  REQUIRED(TRITONBACKEND_, RequestId, Error*, (Request*, const char**))                                              \
  REQUIRED(TRITONBACKEND_, RequestInputByIndex, Error*, (Request*, uint32_t index, Input**))                         \
  REQUIRED(TRITONBACKEND_, RequestInputCount, Error*, (Request*, uint32_t*))                                         \
  OPTIONAL(TRITONBACKEND_, RequestIsCancelled, Error*, (Request*, bool*))                                            \
  REQUIRED(TRITONBACKEND_, RequestOutputCount, Error*, (Request*, uint32_t*))                                        \
  REQUIRED(TRITONBACKEND_, RequestOutputName, Error*, (Request*, uint32_t index, const char**))                      \
  REQUIRED(TRITONBACKEND_, RequestParameter, Error*,                                                                 \
           (Request*, uint32_t index, const char** key, int* type, const void** value))                              \
  REQUIRED(TRITONBACKEND_, RequestParameterCount, Error*, (Request*, uint32_t*))                                     \
  REQUIRED(TRITONBACKEND_, RequestRelease, Error*, (Request*, uint32_t flags))                                       \
  OPTIONAL(TRITONBACKEND_, RequestTrace, Error*, (Request*, Trace**))                                                \
  REQUIRED(TRITONBACKEND_, ResponseFactoryDelete, Error*, (ResponseFactory*))                                        \
  OPTIONAL(TRITONBACKEND_, ResponseFactoryIsCancelled, Error*, (ResponseFactory*, bool*))                            \
  REQUIRED(TRITONBACKEND_, ResponseFactoryNew, Error*, (ResponseFactory**, Request*))                                \
  REQUIRED(TRITONBACKEND_, ResponseFactorySendFlags, Error*, (ResponseFactory*, uint32_t flags))                     \
  REQUIRED(TRITONBACKEND_, ResponseNew, Error*, (Response**, Request*))                                              \
  REQUIRED(TRITONBACKEND_, ResponseNewFromFactory, Error*, (Response**, ResponseFactory*))                           \
  REQUIRED(TRITONBACKEND_, ResponseOutput, Error*,                                                                   \
           (Response*, Output**, const char* name, int datatype, const int64_t* shape, uint32_t dims))               \
  REQUIRED(TRITONBACKEND_, ResponseSend, Error*, (Response*, uint32_t flags, Error*))                                \
  REQUIRED(TRITONBACKEND_, ResponseSetBoolParameter, Error*, (Response*, const char* name, bool))                    \
  OPTIONAL(TRITONBACKEND_, ResponseSetDoubleParameter, Error*, (Response*, const char* name, double))                \
  REQUIRED(TRITONBACKEND_, ResponseSetIntParameter, Error*, (Response*, const char* name, int64_t))                  \
  REQUIRED(TRITONBACKEND_, ResponseSetStringParameter, Error*, (Response*, const char* name, const char* value))

#define MOONPOOL_DECLARE(prefix, name, result, arguments) extern result(*name) arguments;
MOONPOOL_TRITON_FUNCTIONS(MOONPOOL_DECLARE, MOONPOOL_DECLARE)
#undef MOONPOOL_DECLARE

// Find the functions in this process. Returns the names of required ones that are missing, "" if all are there.
std::string resolve();

}  // namespace moonpool::triton

namespace moonpool {

// An error that ends a request or a load, with Triton's code and a text for the client.
struct Failure : std::runtime_error {
  Failure(int number, const std::string& text) : std::runtime_error(text), code(number) {}
  int code;
};

// Throws Triton's error, if there is one.
void check(triton::Error* error);

// Returns the text as one line of a log, as `one_line` in runtime/process/terminal.py does: newlines, control
// characters, characters that change the direction of text, and bytes that are not UTF-8 become escapes.
std::string one_line(std::string_view text);

// Logs an error that nobody can handle any more.
void complain(triton::Error* error, const char* doing) noexcept;

// Writes to the server's log without a change, as if from a place in a model's source.
void log_from(int level, std::string_view file, int line, std::string_view text) noexcept;
// Writes one line to the server's log, whatever characters the text has.
void log(int level, std::string_view text) noexcept;

// Runs the body of an entry point. No exception leaves it; an exception becomes Triton's error.
template <typename Action>
triton::Error* guarded(Action action) noexcept {
  try {
    action();
    return nullptr;
  } catch (const Failure& failure) {
    return triton::ErrorNew(failure.code, failure.what());
  } catch (const std::exception& error) {
    return triton::ErrorNew(triton::kInternal, error.what());
  }
}

}  // namespace moonpool
