// A version of a model in this server, and the backend that it is of.
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

// One for each name that the library serves under: the server's `python`, and every backend that is but a model.py. Any
// thread may call any method.
class BackendState {
 public:
  explicit BackendState(triton::Backend* backend) : backend_(backend) {}

  // The launcher; one that is gone is replaced by another. Throws Failure.
  std::shared_ptr<Launcher> launcher();

 private:
  triton::Backend* const backend_;
  std::mutex mutex_;
  std::shared_ptr<Launcher> launcher_;
};

// Any thread may call any method. What it knows of the model stays as it is.
class Model {
 public:
  // Has the launcher look at it, and completes the configuration. Throws Failure with the reason why it cannot be served.
  Model(triton::Model* model, BackendState& backend);
  ~Model();

  // The launcher, which knows the model under this number. Throws Failure.
  std::shared_ptr<Launcher> launcher(uint64_t* number) const;

  const std::string& name() const { return name_; }
  triton::Server* server() const { return server_; }
  const std::vector<std::string>& inputs() const { return inputs_; }
  const std::vector<std::string>& outputs() const { return outputs_; }
  // What the launcher has found out about it.
  const wire::ModelReady& facts() const { return *facts_; }
  // What clients are told of an error that its model speaks of. Throws Failure.
  std::string told(std::string_view text) const;

 private:
  std::unique_ptr<Letter> introduce(bool completes) const;
  std::string config() const;

  triton::Model* const model_;
  BackendState& backend_;
  std::string name_, directory_;
  uint64_t version_ = 0;
  triton::Server* server_ = nullptr;
  std::vector<std::string> inputs_, outputs_;
  std::unique_ptr<Letter> letter_;
  std::optional<wire::ModelReady> facts_;  // in the letter

  // Guards what follows: the launcher that knows the model, and by which number.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<Launcher> launcher_;
  mutable uint64_t number_ = 0;
};

}  // namespace moonpool
