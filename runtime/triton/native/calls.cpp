#include "calls.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "inference.h"
#include "parameters.h"
#include "pattern.h"
#include "stub.h"

namespace moonpool {
namespace {

using wire::Kind;

constexpr uint32_t kDecoupledFlag = 2;

wire::Error error_of(const Failure& failure, size_t most) {
  const bool is_code = failure.code >= triton::kUnknown && failure.code <= triton::kCancelled;
  return {static_cast<uint64_t>(is_code ? failure.code : triton::kInternal),
          std::string_view(failure.what()).substr(0, most)};
}

// Returns a writer for the value of an answer.
template <class T>
Calls::Write value_of(const char* name, T value) {
  return [=](Writer& writer) {
    writer.map(1);
    write_all(writer, name, value);
  };
}

std::string name_of(Kind kind) {
  for (const Message& message : wire::kCalls.messages) {
    if (message.kind == static_cast<uint8_t>(kind)) return message.name;
  }
  return "a message";
}

// Throws Failure, because the copies of this model are over their budget.
[[noreturn]] void refuse_copy(const CopyBudget& copies) {
  throw Failure(triton::kUnavailable, "messages of this model that are not answered yet take " +
                                          std::to_string(copies.taken()) +
                                          " bytes already; with this one they would be more than " +
                                          std::to_string(copies.most()));
}

// Reads a version as Triton does; -1 is the latest.
int64_t version_of(const std::string& text) {
  if (text.empty()) return -1;
  char* end;
  errno = 0;
  const long long number = std::strtoll(text.c_str(), &end, 10);
  const bool is_number = end != text.c_str() && errno == 0;
  if (is_number && number >= 0) return number;
  throw Failure(triton::kInvalidArg, "failed to get model version from specified version string '" + text + "'" +
                                         (is_number ? "" : " (details: stol)") +
                                         ", version should be an integral value > 0");
}

void load_model(triton::Server* server, const std::string& name, const std::string& config,
                const std::vector<std::pair<std::string, std::string>>& files) {
  if (config.empty() && files.empty()) return check(triton::ServerLoadModel(server, name.c_str()));
  Parameters parameters;
  if (!config.empty()) parameters.add("config", config);
  for (const auto& [path, contents] : files) parameters.add(path, Raw{contents});
  check(triton::ServerLoadModelWithParameters(server, name.c_str(), parameters.data(), parameters.size()));
}

// Returns true if the model is ready. A model that does not exist is not ready.
bool is_ready(triton::Server* server, const std::string& name, int64_t version) {
  bool is_ready = false;
  triton::Error* error = triton::ServerModelIsReady(server, name.c_str(), version, &is_ready);
  if (error) triton::ErrorDelete(error);
  return !error && is_ready;
}

}  // namespace

Calls::Calls(Channel channel, Stub& stub, const Model& model)
    : channel_(std::move(channel)), model_(model), metrics_(model.facts().is_private), stub_(&stub) {}

short Calls::events() {
  std::lock_guard lock(mutex_);
  return waiting_.empty() ? 0 : POLLOUT;
}

void Calls::send_waiting() {
  std::lock_guard lock(mutex_);
  if (waiting_bytes_ > 2 * wire::kUnreadBytes) {
    throw Violation("the stub leaves " + std::to_string(waiting_bytes_) + " bytes unread");
  }
  while (!waiting_.empty()) {
    if (channel_.send(waiting_.front()) == Channel::Sent::kFull) return;
    waiting_bytes_ -= waiting_.front().size() + wire::kUnreadAnswerBytes;
    waiting_.pop_front();
  }
}

bool Calls::read(RateLimiter& rate_limiter) {
  send_waiting();
  const Channel::Received received = channel_.receive(packet_, true);
  if (!is_there(received)) return received == Channel::Received::kNothing;
  auto question = decoded(wire::kCalls, packet_.bytes());
  rate_limiter.took(packet_.bytes().size(), wire::cost_of(question.kind()));
  if (question.kind() == Kind::INDIRECT) {
    const wire::Indirect where(question.fields);
    const std::string beginning = beginning_of(where, stub_->answers());
    if (!takes_in(where, beginning, rate_limiter)) return true;
    question = fetched(wire::kCalls, where, stub_->answers(), &stored_, UINT64_MAX);
    // The copy was charged by the kind and the call that the beginning had before the copy.
    Reader before(beginning, where.size);
    const Head head = head_of(before);
    if (head.kind != question.kind() || head.call != Reader(question.fields).uint()) {
      throw Violation("a message in memory that changed while it was read");
    }
    // A load costs no more for its size: kCopiedLoadsBytes bounds the loads in progress.
    if (question.kind() != Kind::LOAD_MODEL) rate_limiter.took(stored_.size(), 0);
  }
  handle(question);
  stored_ = {};
  return true;
}

Calls::Head Calls::head_of(Reader& reader) {
  reader.array();
  const uint64_t kind = reader.uint();
  const uint64_t call = reader.uint();
  if (reader.failed()) throw Violation("a message without a head");
  for (const Message& message : wire::kCalls.messages) {
    const bool is_stubs = message.sender != static_cast<uint8_t>(wire::Side::RUNTIME);
    if (message.kind == kind && is_stubs) return {static_cast<Kind>(kind), call};
  }
  throw Violation("a stored message of unknown kind " + std::to_string(kind));
}

// Decides by its beginning if a message in memory is copied. If not, the message was answered. Throws Violation.
bool Calls::takes_in(const wire::Indirect& where, std::string_view beginning, RateLimiter& rate_limiter) {
  Reader reader(beginning, where.size);
  const auto [kind, call] = head_of(reader);
  if (kind == Kind::WITHDRAW || kind == Kind::CANCEL_CALL || kind == Kind::LET_GO || kind == Kind::INDIRECT) {
    throw Violation(name_of(kind) + " that lies in memory");
  }
  rate_limiter.took(beginning.size(), wire::cost_of(kind));
  if (kind != Kind::LOAD_MODEL) {
    if (where.size <= wire::kMaxCallBytes) return true;
    throw Violation(name_of(kind) + " of " + std::to_string(where.size) + " bytes; " +
                    std::to_string(wire::kMaxCallBytes) + " is the most");
  }
  const std::string name(reader.text());
  if (reader.failed()) throw Violation("LOAD_MODEL without a name");
  check_new(call);
  try {
    check_tasks();
    check_may_load(name, true);
    charge_for_load(where.size);
    return true;
  } catch (const Failure& failure) {
    stub_->answers().release({where.region, where.offset});
    done(call, &failure);
    return false;
  }
}

void Calls::close() {
  std::map<uint64_t, std::shared_ptr<Inference>> open;
  {
    std::lock_guard lock(mutex_);
    stub_ = nullptr;
    open.swap(open_);
    waiting_.clear();
  }
  channel_.shut();
  for (const auto& [call, inference] : open) inference->cancel();
  metrics_.drop_all();
}

void Calls::handle(const Question& question) {
  try {
    perform(question);
  } catch (const Failure& failure) {
    done(Reader(question.fields).uint(), &failure);
  }
}

// Performs a question. Throws Failure for an error that DONE returns to the stub.
void Calls::perform(const Question& question) {
  const Reader& fields = question.fields;
  if (question.kind() == Kind::CANCEL_CALL) return cancel(wire::CancelCall(fields).call);
  if (question.kind() == Kind::WITHDRAW) return withdraw(wire::Withdraw(fields).call);
  if (question.kind() == Kind::LET_GO) return take_back(wire::LetGo(fields).places);
  check_new(Reader(fields).uint());
  switch (question.kind()) {
    case Kind::INFER:
      return infer(wire::Infer(fields));
    case Kind::LOAD_MODEL:
      return load(wire::LoadModel(fields));
    case Kind::UNLOAD_MODEL:
      return unload(wire::UnloadModel(fields));
    case Kind::IS_MODEL_READY:
      return answer_ready(wire::IsModelReady(fields));
    case Kind::NEW_METRIC: {
      const wire::NewMetric asked(fields);
      return done(asked.call, nullptr, value_of("metric", metrics_.hold(asked)));
    }
    case Kind::METRIC_VALUE: {
      const wire::MetricValue asked(fields);
      return done(asked.call, nullptr, value_of("value", metrics_.value(asked.metric)));
    }
    default:
      throw Violation(std::string(question.message->name) + " was not asked for");
  }
}

// Requests to other models

void Calls::infer(const wire::Infer& asked) {
  if (asked.blocks.size() > asked.inputs.size()) {
    throw Violation(std::to_string(asked.blocks.size()) + " blocks for " + std::to_string(asked.inputs.size()) +
                    " inputs");
  }
  take_back(asked.released);
  auto inference = std::make_shared<Inference>(shared_from_this(), asked.call, stub_->open_requests().batch());
  const uint64_t message_size = stored_.size();
  inference->hold(asked.blocks, stub_->borrowed_blocks(), stub_->answers());
  bool are_many;
  {
    std::lock_guard lock(mutex_);
    open_.emplace(asked.call, inference);
    are_many = open_.size() > wire::kMaxCalls;
  }
  try {
    if (are_many) {
      throw Failure(triton::kUnavailable, std::to_string(wire::kMaxCalls) + " requests of this model are open already");
    }
    if (message_size > 0) inference->charge_for_message(message_size);
    start(*inference, asked);
  } catch (const Failure& failure) {
    fail(asked.call, Failure(failure.code, "Model " + std::string(asked.model) +
                                               " - Error when running inference: " + failure.what()));
  }
}

void Calls::start(Inference& inference, const wire::Infer& asked) {
  const std::string name(asked.model);
  check_may_ask(name);
  uint32_t properties;
  void* unused;
  // Do not ask if the model is ready: this very thread may have to answer that question.
  check(triton::ServerModelTransactionProperties(model_.server(), name.c_str(), asked.version, &properties, &unused));
  if ((properties & kDecoupledFlag) != 0 && !asked.decoupled) {
    throw Failure(triton::kUnsupported,
                  "Model " + name +
                      " is using the decoupled. The current BLS request call doesn't support models "
                      "using the decoupled transaction policy. Please use 'decoupled=True' argument "
                      "to the 'exec' or 'async_exec' calls for decoupled models.'");
  }
  const auto trace = asked.details ? asked.details->trace : std::nullopt;
  inference.start(asked, model_.server(), trace ? stub_->open_requests().child_trace(*trace) : nullptr);
}

std::shared_ptr<Inference> Calls::find(uint64_t call) {
  std::lock_guard lock(mutex_);
  const auto open = open_.find(call);
  return open == open_.end() ? nullptr : open->second;
}

void Calls::cancel(uint64_t call) {
  // The call may have been answered meanwhile.
  if (const auto inference = find(call)) inference->cancel();
}

void Calls::withdraw(uint64_t call) {
  const auto inference = find(call);
  if (!inference) return;
  fail(call, Failure(triton::kCancelled, "Request cancelled"));
  inference->cancel();
}

void Calls::leave(uint64_t batch) {
  std::vector<uint64_t> left;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [call, inference] : open_) {
      if (inference->batch() == batch) left.push_back(call);
    }
  }
  for (const uint64_t call : left) withdraw(call);
}

void Calls::take_back(const List<wire::Place>& places) {
  for (const wire::Place& place : places) stub_->borrowed_blocks().take_back(place);
}

void Calls::charge_for_strings(uint64_t size) {
  std::lock_guard lock(mutex_);
  if (copies_.take(size)) return;
  throw Failure(triton::kUnavailable, "the strings in open requests of this model take " +
                                          std::to_string(copies_.taken()) + " bytes already");
}

void Calls::charge_for_message(uint64_t size) {
  std::lock_guard lock(mutex_);
  if (!messages_.take(size)) refuse_copy(messages_);
}

void Calls::charge_for_load(uint64_t size, uint64_t own) {
  std::lock_guard lock(mutex_);
  if (!copies_.take(size, own)) refuse_copy(copies_);
}

void Calls::give_copies_back(uint64_t size, uint64_t message_size) {
  std::lock_guard lock(mutex_);
  copies_.give_back(size);
  messages_.give_back(message_size);
}

View Calls::lend(uint64_t size, Spot* spot) {
  std::lock_guard lock(mutex_);
  if (!stub_) throw Failure(triton::kUnavailable, "the model that asked has ended");
  char* memory;
  *spot = stub_->borrowed_blocks().lend(std::max<uint64_t>(size, 1), &memory, true);
  return stub_->borrowed_blocks().look({spot->region, spot->offset, size});
}

void Calls::take_back(Spot spot) noexcept {
  std::lock_guard lock(mutex_);
  if (!stub_) return;
  try {
    stub_->borrowed_blocks().take_back(spot);
  } catch (const std::exception& error) {
    stub_->distrust(error.what());
  }
}

void Calls::release(const std::vector<Spot>& answers, const std::vector<Spot>& borrowed_blocks) noexcept {
  std::lock_guard lock(mutex_);
  if (!stub_) return;
  for (const Spot& spot : answers) stub_->answers().release(spot);
  for (const Spot& spot : borrowed_blocks) stub_->borrowed_blocks().release(spot);
}

bool Calls::reply(uint64_t call, bool is_final, const Write& write) noexcept {
  std::shared_ptr<Inference> ended;  // outlives the lock, which it takes at its own end
  std::lock_guard lock(mutex_);
  const auto open = open_.find(call);
  if (!stub_ || open == open_.end()) return false;
  const bool is_full = !is_final && waiting_bytes_ >= wire::kUnreadBytes;
  if (is_full) is_final = true;
  if (is_final) {
    ended = std::move(open->second);
    open_.erase(open);
  }
  try {
    if (!is_full) return send_reply(call, is_final, write);
    ended->cancel();
    send_reply(call, true, only(Failure(triton::kUnavailable, "the model that asked leaves responses unread")));
  } catch (const std::exception& error) {
    stub_->distrust(error.what());
  }
  return false;
}

Calls::Write Calls::only(const Failure& failure, size_t most) {
  return [failure, most](Writer& writer) {
    writer.array(0);
    writer.array(0);
    writer.nil();
    error_of(failure, most).write(writer);
  };
}

void Calls::fail(uint64_t call, const Failure& failure) noexcept { reply(call, true, only(readable(failure))); }

Failure Calls::readable(const Failure& failure) const noexcept {
  if (!model_.facts().is_private) return failure;
  try {
    // The server's texts may have any bytes. Those that are not UTF-8 would break the launcher's protocol.
    std::string text;
    std::istringstream lines(std::string(failure.what()).substr(0, wire::kLongestError / 8));
    for (std::string line; std::getline(lines, line);) text += (text.empty() ? "" : "\n") + one_line(line);
    return Failure(failure.code, model_.scrubbed(text));
  } catch (const std::exception&) {  // the launcher has ended
    return Failure(failure.code, "internal error; see the server's log");
  }
}

bool Calls::send_reply(uint64_t call, bool is_final, const Write& write) {
  stub_->answers().take_released(&released_, wire::kMaxPlacesInPacket);
  const auto send_with = [&](const Write& rest) {
    begin<Kind::REPLY>(call);
    write_all(message_, is_final, released_);
    rest(message_);
    send();
  };
  try {
    send_with(write);
    return true;
  } catch (const Failure& failure) {  // it is larger than what memory there is
    send_with(only(failure, wire::kShortMessage));
    return false;
  }
}

// Other models themselves

// Throws Failure if the model may not load that one, or may not bring files.
void Calls::check_may_load(const std::string& name, bool brings_files) const {
  check_may_ask(name);
  if (model_.facts().may_ask && brings_files) {
    throw Failure(triton::kUnsupported,
                  "a model in a sandbox cannot bring the configuration or files of model '" + name +
                      "' inside of tritonserver, which would not check what they give it; put them into the "
                      "model repository and load it by its name alone");
  }
}

void Calls::load(const wire::LoadModel& asked) {
  // The copy of a message that lay in memory was charged before it was made.
  uint64_t copied = stored_.size();
  const std::string name(asked.model), config(asked.config);
  std::vector<std::pair<std::string, std::string>> files;
  try {
    if (asked.files) {
      for (const wire::LoadModelFiles& file : *asked.files) {
        files.emplace_back(file.path, file.contents.bytes);
      }
    }
    check_tasks();
    check_may_load(name, !(config.empty() && files.empty()));
    charge_for_load(wire::kJsonFactor * config.size(), copied);
    copied += wire::kJsonFactor * config.size();
    spend_time(
        asked.call,
        [=, files = std::move(files), server = model_.server()] {
          load_model(server, name, config, files);
          return Write();
        },
        copied);
  } catch (...) {
    give_copies_back(copied, 0);
    throw;
  }
}

void Calls::unload(const wire::UnloadModel& asked) {
  const std::string name(asked.model);
  if (name != model_.name()) check_may_ask(name);
  // Only the server knows which models these are, and it asks nobody.
  if (asked.dependents) check_may_ask_all("unload the members of model '" + name + "' with it");
  spend_time(asked.call, [=, dependents = asked.dependents, server = model_.server()] {
    check(dependents ? triton::ServerUnloadModelAndDependents(server, name.c_str())
                     : triton::ServerUnloadModel(server, name.c_str()));
    return Write();
  });
}

void Calls::answer_ready(const wire::IsModelReady& asked) {
  const std::string name(asked.model);
  const int64_t version = version_of(std::string(asked.version));
  check_may_ask(name);
  // It may be this very model, whose readiness this very thread has to receive. So ask on another thread.
  spend_time(asked.call, [=, server = model_.server()] { return value_of("ready", is_ready(server, name, version)); });
}

// Runs a long task on a thread of its own, and sends the stub its result. Throws Failure.
void Calls::spend_time(uint64_t call, std::function<Write()> task, uint64_t copied) {
  check_tasks();
  {
    std::lock_guard lock(mutex_);
    tasks_.insert(call);
  }
  try {
    std::thread([self = shared_from_this(), call, task = std::move(task), copied]() mutable noexcept {
      Write values;
      std::optional<Failure> failure;
      try {
        values = task();
      } catch (const Failure& failed) {
        failure = failed;
      } catch (const std::exception& error) {  // there is no memory for it
        failure.emplace(triton::kInternal, error.what());
      }
      // Free the files of a load before the stub learns of its end.
      task = nullptr;
      self->give_copies_back(copied, 0);
      self->done(call, failure ? &*failure : nullptr, values);
    }).detach();
  } catch (const std::system_error& error) {
    throw Failure(triton::kUnavailable, error.what());
  }
}

void Calls::done(uint64_t call, const Failure* failure, const Write& values) noexcept {
  const auto public_failure = failure ? std::make_optional(readable(*failure)) : std::nullopt;
  std::lock_guard lock(mutex_);
  tasks_.erase(call);
  if (!stub_) return;
  try {
    begin<Kind::DONE>(call);
    if (public_failure) {
      error_of(*public_failure, wire::kShortMessage).write(message_);
    } else {
      message_.nil();
    }
    if (values) {
      values(message_);
    } else {
      message_.map(0);
    }
    send();
  } catch (const std::exception& error) {
    stub_->distrust(error.what());
  }
}

void Calls::check_tasks() {
  std::lock_guard lock(mutex_);
  if (tasks_.size() < wire::kMaxTasks) return;
  throw Failure(triton::kUnavailable, std::to_string(wire::kMaxTasks) + " of these are on their way already");
}

// Common parts of questions and answers

void Calls::check_new(uint64_t call) {
  std::lock_guard lock(mutex_);
  if (open_.count(call) > 0 || tasks_.count(call) > 0) {
    throw Violation("call " + std::to_string(call) + " is open already");
  }
}

void Calls::check_may_ask(const std::string& name) const {
  const auto& patterns = model_.facts().may_ask;
  if (!patterns) return;
  if (one_line(name) != name) {
    throw Failure(triton::kNotFound, "no model has a name with control characters in it, as '" + one_line(name) + "'");
  }
  for (const std::string_view pattern : *patterns) {
    if (fits(pattern, name)) return;
  }
  throw Failure(triton::kUnavailable, "the sandbox of model '" + model_.name() + "' does not let it ask for model '" +
                                          name +
                                          "'; MOONPOOL_SANDBOX_MODELS in its configuration names those that it may");
}

void Calls::check_may_ask_all(const std::string& what) const {
  const auto& patterns = model_.facts().may_ask;
  if (!patterns) return;
  for (const std::string_view pattern : *patterns) {
    if (!pattern.empty() && pattern.find_first_not_of('*') == std::string_view::npos) return;
  }
  throw Failure(triton::kUnavailable, "the sandbox of model '" + model_.name() + "' does not let it " + what +
                                          "; inside of tritonserver this takes MOONPOOL_SANDBOX_MODELS=*, and each "
                                          "model can be unloaded by its own name");
}

template <Kind kind>
void Calls::begin(uint64_t call) {
  message_.clear();
  message_.array(1 + wire::field_count(kind));
  write_all(message_, static_cast<uint64_t>(kind), call);
}

void Calls::send() {
  pack(message_, stub_->borrowed_blocks(), true);
  const std::string_view packet = message_.bytes();
  if (waiting_.empty()) {
    // The listener sees the end of the channel.
    if (channel_.send(packet) != Channel::Sent::kFull) return;
    stub_->wake();
  }
  waiting_.emplace_back(packet);
  waiting_bytes_ += packet.size() + wire::kUnreadAnswerBytes;
}

}  // namespace moonpool
