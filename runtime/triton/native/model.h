// A version of a model in this server, and its backend.
//
// Theory of operation. All models of a backend share one launcher. If it has died, the next use starts another one,
// under the lock of `BackendState`. Each model introduces itself to it again, under its own lock, before it is used
// there.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "launcher.h"

namespace moonpool {

// One backend of the server. The library serves as `moonpool`, as `python`, and for every backend that is a model.py.
// Any thread may call any method.
class BackendState {
 public:
  explicit BackendState(triton::Backend* backend) : backend_(backend) {}

  // Returns the launcher, and starts another one if it has died. Throws Failure.
  std::shared_ptr<Launcher> launcher();

 private:
  triton::Backend* const backend_;
  std::mutex mutex_;
  std::shared_ptr<Launcher> launcher_;
};

// A version of a model. Any thread may call any method. Its facts never change.
class Model {
 public:
  // Lets the launcher load it, and completes the configuration. Throws Failure with the reason if it cannot be served.
  Model(triton::Model* model, BackendState& backend);
  ~Model();

  // Returns the launcher, and the number by which it knows the model. Throws Failure.
  std::shared_ptr<Launcher> launcher(uint64_t* number) const;

  const std::string& name() const { return name_; }
  triton::Server* server() const { return server_; }
  const std::vector<std::string>& inputs() const { return inputs_; }
  const std::vector<std::string>& outputs() const { return outputs_; }
  // The launcher's description of the model.
  const wire::ModelReady& facts() const { return *facts_; }
  // Returns the part of the model's error text that clients may see. Throws Failure.
  std::string scrubbed(std::string_view text) const;

 private:
  std::unique_ptr<LauncherMessage> introduce(bool completes) const;
  std::string config() const;

  triton::Model* const model_;
  BackendState& backend_;
  std::string name_, directory_;
  uint64_t version_ = 0;
  triton::Server* server_ = nullptr;
  std::vector<std::string> inputs_, outputs_;
  std::unique_ptr<LauncherMessage> message_;
  std::optional<wire::ModelReady> facts_;  // in the message

  // Guards the launcher that knows the model, and the number by which it does.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<Launcher> launcher_;
  mutable uint64_t number_ = 0;
};

}  // namespace moonpool
