// Entry points of a backend, which Triton calls.

#include <cstdlib>
#include <memory>

#include "api.h"
#include "instance.h"
#include "model.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using moonpool::BackendState;
using moonpool::check;
using moonpool::guarded;
using moonpool::Instance;
namespace triton = moonpool::triton;

namespace {

template <class State, class Object>
State& state_of(Object* object, triton::Error* (*get)(Object*, void**)) {
  void* state;
  check(get(object, &state));
  return *static_cast<State*>(state);
}

// Returns the required functions that this server lacks. Servers differ in the entry point that they call first.
const std::string& missing_functions() {
  static const std::string missing = triton::resolve();
  return missing;
}

}  // namespace

EXPORT triton::Error* TRITONBACKEND_Initialize(triton::Backend* backend) {
  const std::string& missing = missing_functions();
  // Without this function, no error can be returned to the server.
  if (!triton::ErrorNew) std::abort();
  return guarded([&] {
    if (!missing.empty()) {
      throw moonpool::Failure(triton::kUnsupported, "this tritonserver is too old for moonpool; it lacks" + missing);
    }
    auto state = std::make_unique<BackendState>(backend);
    check(triton::BackendSetState(backend, state.get()));
    state.release();
  });
}

EXPORT triton::Error* TRITONBACKEND_Finalize(triton::Backend* backend) {
  return guarded([&] { delete &state_of<BackendState>(backend, triton::BackendState); });
}

EXPORT triton::Error* TRITONBACKEND_GetBackendAttribute(triton::Backend*, triton::BackendAttribute* attribute) {
  missing_functions();
  if (!triton::BackendAttributeSetParallelModelInstanceLoading) return nullptr;
  return triton::BackendAttributeSetParallelModelInstanceLoading(attribute, true);
}

EXPORT triton::Error* TRITONBACKEND_ModelInitialize(triton::Model* model) {
  return guarded([&] {
    triton::Backend* backend;
    check(triton::ModelBackend(model, &backend));
    auto state = std::make_unique<moonpool::Model>(model, state_of<BackendState>(backend, triton::BackendState));
    check(triton::ModelSetState(model, state.get()));
    state.release();
  });
}

EXPORT triton::Error* TRITONBACKEND_ModelFinalize(triton::Model* model) {
  return guarded([&] { delete &state_of<moonpool::Model>(model, triton::ModelState); });
}

EXPORT triton::Error* TRITONBACKEND_ModelInstanceInitialize(triton::ModelInstance* instance) {
  return guarded([&] {
    triton::Model* model;
    check(triton::ModelInstanceModel(instance, &model));
    auto state = std::make_unique<Instance>(instance, state_of<moonpool::Model>(model, triton::ModelState));
    check(triton::ModelInstanceSetState(instance, state.get()));
    state.release();
  });
}

EXPORT triton::Error* TRITONBACKEND_ModelInstanceFinalize(triton::ModelInstance* instance) {
  return guarded([&] { delete &state_of<Instance>(instance, triton::ModelInstanceState); });
}

EXPORT triton::Error* TRITONBACKEND_ModelInstanceReady(triton::ModelInstance* instance) {
  return guarded([&] { state_of<Instance>(instance, triton::ModelInstanceState).check_ready(); });
}

EXPORT triton::Error* TRITONBACKEND_ModelInstanceExecute(triton::ModelInstance* instance, triton::Request** requests,
                                                         uint32_t count) {
  return guarded([&] { state_of<Instance>(instance, triton::ModelInstanceState).execute(requests, count); });
}
