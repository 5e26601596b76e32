#include "model.h"

namespace moonpool {
namespace {

using wire::Word;

constexpr uint32_t kConfigVersion = 1;

std::string text_of(triton::Message* message) {
  const char* base;
  size_t size;
  check(triton::MessageSerializeToJson(message, &base, &size));
  return {base, size};
}

// Frees a message of the server that we own.
struct Delete {
  void operator()(triton::Message* message) const {
    complain(triton::MessageDelete(message), "a message cannot be deleted");
  }
};
using Owned = std::unique_ptr<triton::Message, Delete>;

}  // namespace

std::shared_ptr<Launcher> BackendState::launcher() {
  std::lock_guard lock(mutex_);
  if (launcher_ && !launcher_->is_gone()) return launcher_;
  const char *name, *directory;
  int kind;
  triton::Message* config;
  check(triton::BackendName(backend_, &name));
  check(triton::BackendArtifacts(backend_, &kind, &directory));
  check(triton::BackendConfig(backend_, &config));
  launcher_.reset();
  return launcher_ = std::make_shared<Launcher>(name, directory, text_of(config));
}

Model::Model(triton::Model* model, BackendState& backend) : model_(model), backend_(backend) {
  const char *name, *directory;
  int kind;
  bool completes;
  check(triton::ModelName(model, &name));
  check(triton::ModelVersion(model, &version_));
  check(triton::ModelRepository(model, &kind, &directory));
  check(triton::ModelServer(model, &server_));
  check(triton::ModelAutoCompleteConfig(model, &completes));
  name_ = name;
  directory_ = directory;
  std::lock_guard lock(mutex_);
  message_ = introduce(completes);
  facts_.emplace(message_->fields);
  for (const std::string_view each : facts_->inputs) inputs_.emplace_back(each);
  for (const std::string_view each : facts_->outputs) outputs_.emplace_back(each);
  if (facts_->config) {
    triton::Message* config;
    check(triton::MessageNewFromSerializedJson(&config, facts_->config->data(), facts_->config->size()));
    const Owned owned(config);
    try {
      check(triton::ModelSetConfig(model, kConfigVersion, config));
    } catch (const Failure& failure) {  // the server logs this text, which may have names from the model
      throw facts_->is_private ? Failure(failure.code, one_line(failure.what())) : failure;
    }
  }
}

Model::~Model() {
  std::lock_guard lock(mutex_);
  if (!launcher_ || launcher_->is_gone()) return;
  // Wait for the answer: after this the files may be deleted, or the same model loaded again.
  try {
    launcher_->ask<Word::END_MODEL>(number_);
  } catch (const Failure&) {  // then it has ended with the launcher
  }
}

std::shared_ptr<Launcher> Model::launcher(uint64_t* number) const {
  std::lock_guard lock(mutex_);
  if (launcher_->is_gone()) introduce(false);
  *number = number_;
  return launcher_;
}

// Introduces the model to a launcher, and returns its answer.
std::unique_ptr<LauncherMessage> Model::introduce(bool completes) const {
  auto launcher = backend_.launcher();
  launcher->send_log_levels();
  const uint64_t number = Launcher::new_number();
  auto message = launcher->ask<Word::MODEL>(number, name_, version_, directory_, config(), completes);
  // Set these only now: a launcher that refused the model does not know it, so the next request must introduce it
  // again.
  launcher_ = std::move(launcher);
  number_ = number;
  return message;
}

std::string Model::scrubbed(std::string_view text) const {
  if (!facts_->is_private) return std::string(text);
  uint64_t model;
  const auto knows = launcher(&model);
  const auto message = knows->ask<Word::SCRUB>(Launcher::new_number(), model, text);
  return std::string(wire::Scrubbed(message->fields).text);
}

std::string Model::config() const {
  triton::Message* message;
  check(triton::ModelConfig(model_, kConfigVersion, &message));
  return text_of(Owned(message).get());
}

}  // namespace moonpool
