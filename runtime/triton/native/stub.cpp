#include "stub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace moonpool {
namespace {

using wire::Kind;
using wire::Word;

// How long a stub keeps memory that it grew by and does not need, and how often it is looked whether clients
// have left.
constexpr int kKeepMilliseconds = 5'000;
constexpr int kLookMilliseconds = 50;
// As in Triton.
constexpr auto kReadiness = std::chrono::seconds(5);
// More than a socket holds.
constexpr int kMostLastMessages = 1024;
constexpr size_t kMostLetGo = 1 << 20;

bool is_readable(const pollfd& end) { return (end.revents & (POLLIN | POLLHUP | POLLERR)) != 0; }

}  // namespace

Stub::Stub(std::shared_ptr<Launcher> launcher, Mailbox& mailbox, const Model& model, const std::string& name,
           const wire::Born& born, std::vector<Descriptor> descriptors)
    : launcher_(std::move(launcher)),
      mailbox_(mailbox),
      model_(model),
      name_(name),
      instance_(born.instance),
      generation_(born.generation),
      control_(std::move(descriptors.at(0))),
      pidfd_(std::move(descriptors.at(2))),
      wakes_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_region_(wire::kFirstRegion),
      loans_(std::make_shared<Region>(born.request_region, born.request_size, std::move(descriptors.at(3))), *this),
      answers_(std::make_shared<Region>(born.response_region, born.response_size, std::move(descriptors.at(4))), *this),
      open_requests_(model),
      calls_(std::make_shared<Calls>(Channel(std::move(descriptors.at(1))), *this, model)),
      log_lines_(static_cast<double>(model.facts().log_lines_per_s)),
      listener_([this] { listen(); }) {}

Stub::~Stub() {
  leave();
  control_.shut();
  wake();
  wait();
}

void Stub::leave() {
  std::unique_lock lock(mutex_);
  is_stopping_ = true;
  lock.unlock();
  if (has_ended_) wait();
}

void Stub::wait() {
  if (listener_.joinable()) listener_.join();
}

void Stub::begin(const wire::Started& started, Descriptor work) {
  std::unique_lock lock(mutex_);
  work_ = Channel(std::move(work));
  work_.limit_waiting(kLookMilliseconds);
  has_is_ready_ = started.has_is_ready;
  has_begun_ = true;
  if (!has_ended_) return;
  // Before anybody was to be told.
  lock.unlock();
  report();
}

void Stub::catch_up() {
  if (!calls_->has_metrics()) return;
  const std::lock_guard lock(listening_);
  if (!has_ended_) read_control(kMostLastMessages);
}

void Stub::take_back_late() {
  std::lock_guard lock(mutex_);
  for (const wire::Place& place : let_go_) loans_.take_back(place);
  let_go_.clear();
}

void Stub::tell_packet(std::string_view packet, int descriptor) {
  if (control_.send(packet, descriptor) == Channel::Sent::kFull) {
    throw Violation("it does not read its control channel");
  }
}

void Stub::tell_cancelled() {
  const uint64_t deserted = open_requests_.each_cancelled([this](uint64_t batch, uint64_t index) {
    // Many may leave at the same time. Those that a stub has no time to hear of are told later, so that there is room
    // for what it has to be told.
    const bool is_told = !control_.is_half_full();
    if (is_told) tell<Kind::CANCEL>(batch, index);
    return is_told;
  });
  if (deserted) calls_->leave(deserted);
}

void Stub::wake() const { eventfd_write(wakes_.get(), 1); }

bool Stub::check_ready() {
  if (has_ended_) return false;
  if (!has_is_ready_) return true;
  std::unique_lock lock(mutex_);
  // Those who ask at the same time share one question.
  if (question_ == answered_question_) tell<Kind::READY>(++question_);
  const uint64_t question = question_;
  const bool is_answered =
      answered_.wait_for(lock, kReadiness, [&] { return has_ended_ || answered_question_ >= question; });
  if (!is_answered) {
    throw Failure(triton::kUnavailable, "Timed out waiting for user-defined is_ready() response");
  }
  if (has_ended_) return false;
  if (reason_) throw Failure(triton::kUnavailable, *reason_);
  return true;
}

void Stub::distrust(const std::string& why) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = std::string(beginning(why, wire::kShort));
  }
  control_.shut();
  wake();
}

void Stub::overdue() { launcher_->send<Word::OVERDUE>(instance_, generation_); }

const Failure& Stub::death() {
  // It may live on without some of its channels.
  distrust("");
  wait();
  return *death_;
}

std::shared_ptr<Region> Stub::create(wire::Side writer, uint64_t present, uint64_t needed) {
  const uint64_t id = next_region_++;
  const auto letter = launcher_->ask<Word::MEMORY>(Launcher::new_number(), instance_, generation_,
                                                   static_cast<uint64_t>(writer), id, present, needed);
  const wire::SetAside made(letter->fields);
  if (letter->descriptors.empty()) throw Failure(triton::kUnavailable, "the server has no descriptor left for more memory");
  auto region = std::make_shared<Region>(id, made.size, std::move(letter->descriptors.at(0)));
  // Somebody is to look whether it is still needed later.
  wake();
  return region;
}

void Stub::give_back(wire::Side writer, uint64_t region) {
  launcher_->send<Word::RETURNED>(instance_, generation_, static_cast<uint64_t>(writer), region);
}

void Stub::announce(const Region& region, wire::Side writer) {
  Writer message;
  wire::encode<Kind::REGION>(message, region.id(), region.size(), static_cast<uint64_t>(writer), wire::kNoDevice,
                             Raw{});
  tell_packet(message.bytes(), region.fd());
}

void Stub::retire(uint64_t region) { tell<Kind::RETIRE>(region); }

// What follows is for the thread that listens.

void Stub::listen() noexcept {
  try {
    listen_until_end();
  } catch (const std::exception& error) {
    distrust(error.what());
  }
  bool has_begun;
  {
    std::lock_guard lock(mutex_);
    has_ended_ = true;
    has_begun = has_begun_;
    answered_.notify_all();
    // Whoever waits for an answer wakes up, after what was sent before the end.
    work_.shut();
  }
  control_.shut();
  calls_->close();
  if (has_begun) report();
}

void Stub::listen_until_end() {
  pollfd ends[] = {{control_.fd(), 0, 0}, {calls_->fd(), 0, 0}, {wakes_.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}};
  for (;;) {
    const int pause = flow_.pause_milliseconds();
    // Both, as what is asked may be about what was told before. Their ends are seen in any case.
    ends[0].events = pause ? 0 : POLLIN;
    ends[1].events = static_cast<short>(ends[0].events | calls_->events());
    const int ready = poll(ends, std::size(ends), pause ? pause : wait_milliseconds());
    const std::lock_guard lock(listening_);
    if (ready == 0 && !pause) tidy();
    if (ready <= 0) continue;
    if (is_readable(ends[2])) {
      eventfd_t count;
      eventfd_read(wakes_.get(), &count);
    }
    const bool has_exited = is_readable(ends[3]);
    // A question may be about what was said here before.
    if ((is_readable(ends[0]) || is_readable(ends[1])) && !read_control()) return;
    if ((ends[1].revents & POLLOUT) != 0) calls_->send_waiting();
    // A stub that asks nothing any more may still answer.
    if (is_readable(ends[1]) && !calls_->read(flow_)) ends[1].fd = -1;
    if (answers_.has_many_released()) tell_released();
    flow_.settle();
    if (open_requests_.are_open()) tell_cancelled();
    if (has_exited) {
      // What it sent before its end is not lost. Whoever holds its end of the channel yet may send on for ever.
      read_control(kMostLastMessages);
      return;
    }
  }
}

int Stub::wait_milliseconds() {
  if (open_requests_.are_open()) return kLookMilliseconds;
  return loans_.has_grown() || answers_.has_grown() ? kKeepMilliseconds : -1;
}

// False at the end of the channel.
bool Stub::read_control(int most) {
  const bool is_open = take_in_control(most);
  // After all that is there has been looked at: who asks for memory waits, and asks for nothing more.
  if (growth_) {
    const wire::Grow wish = *std::exchange(growth_, std::nullopt);
    grow(wish.size, wish.device);
  }
  return is_open;
}

bool Stub::take_in_control(int most) {
  std::string stored;
  for (int i = 0; i < most; ++i) {
    const Channel::Received received = control_.receive(packet_, true);
    if (received != Channel::Received::kDone) return received == Channel::Received::kNothing;
    const auto message = opened(wire::kControl, packet_.bytes(), answers_, &stored);
    // Responses are work that was asked for. Growth takes memory, and an honest stub asks for ever more.
    if (message.kind() != Kind::RESPONSES) {
      const double cost = message.kind() == Kind::GROW ? wire::kGrowthCost : 1;
      flow_.took(stored.empty() ? packet_.bytes().size() : stored.size(), cost);
    }
    handle(message);
  }
  return true;
}

void Stub::handle(const Decoded<Kind>& message) {
  switch (message.kind()) {
    case Kind::RESPONSES:
      for (const wire::Response& row : wire::Responses(message.fields).responses) {
        open_requests_.take(row, answers_);
      }
      if (answers_.has_many_released()) tell_released();
      return;
    case Kind::LOG:
      log_of_model(wire::Log(message.fields));
      return;
    case Kind::GROW:
      if (growth_) throw Violation("GROW came before the last one was answered");
      growth_.emplace(message.fields);
      return;
    case Kind::RETIRE:
      answers_.retire(wire::Retire(message.fields).region);
      return;
    case Kind::RELEASE: {
      std::lock_guard lock(mutex_);
      for (const wire::Place& place : wire::Release(message.fields).places) let_go_.push_back(place);
      if (let_go_.size() > kMostLetGo) throw Violation("it releases more than it was given");
      return;
    }
    case Kind::METRICS:
      flow_.took(0, static_cast<double>(calls_->change_metrics(wire::Metrics(message.fields))) / wire::kObservationsPerMessage);
      return;
    case Kind::READINESS: {
      const wire::Readiness answer(message.fields);
      std::lock_guard lock(mutex_);
      if (answer.question == 0 || answer.question > question_) {
        throw Violation("READINESS answers " + std::to_string(answer.question) + ", which was not asked");
      }
      if (answer.question < question_) return;
      answered_question_ = answer.question;
      reason_ = answer.reason;
      answered_.notify_all();
      return;
    }
    default:
      throw Violation(std::string(message.message->name) + " was not asked for");
  }
}

// What is left out is counted, and told before the next line that is not.
void Stub::log_of_model(const wire::Log& line) {
  if (!log_lines_.spend(1 + static_cast<double>(line.message.size() / wire::kLogLineBytes))) {
    ++lines_left_out_;
    return;
  }
  if (lines_left_out_) {
    log(triton::kWarning, "model '" + model_.name() + "': " + std::to_string(lines_left_out_) +
                              " lines of an instance were left out: too many a second "
                              "(MOONPOOL_LOG_LINES_PER_S is " +
                              std::to_string(model_.facts().log_lines_per_s) + ")");
    lines_left_out_ = 0;
  }
  const int level = static_cast<int>(line.level), number = static_cast<int>(line.line);
  if (!model_.facts().is_private) return log_from(level, line.file, number, line.message);
  // One that is contained names no place in front of the line, which could be one of the server's own files.
  std::string where;
  if (number) where = " (" + std::string(line.file.substr(line.file.rfind('/') + 1)) + ":" + std::to_string(number) + ")";
  log(level, "[" + name_ + "] " + one_line(line.message) + where);
}

void Stub::grow(uint64_t needed, int64_t device) {
  // With word of all that is free again, which may be enough.
  tell_released();
  try {
    if (device != wire::kNoDevice) {
      throw Failure(triton::kUnsupported, "inside of tritonserver, outputs lie in ordinary memory");
    }
    answers_.grow(needed);
  } catch (const Failure& failure) {
    tell<Kind::REFUSED>(failure.what());
  }
}

void Stub::tell_released() {
  for (;;) {
    answers_.take_released(&released_, wire::kMaxPlacesInPacket);
    if (released_.empty()) return;
    tell<Kind::RELEASE>(released_);
  }
}

void Stub::tidy() {
  if (open_requests_.are_open()) {
    tell_cancelled();
    return;
  }
  if (!is_executing_) take_back_late();
  loans_.tidy();
  tell_released();
}

// Tell the launcher of the end, and hear why it came.
void Stub::report() noexcept {
  std::string why;
  {
    std::lock_guard lock(mutex_);
    if (is_stopping_) {
      death_.emplace(triton::kUnavailable, "the model was unloaded");
    }
    why = why_;
  }
  if (!death_) {
    launcher_->send<Word::LOST>(instance_, generation_, is_executing_.load(), false, why);
    try {
      const auto letter = mailbox_.next();
      if (letter->word != Word::DIED) throw Failure(triton::kInternal, "the launcher does not say why it died");
      const wire::Died died(letter->fields);
      death_.emplace(static_cast<int>(died.code), std::string(died.message));
      is_final_ = !died.restarts_in_ms;
    } catch (const Failure& failure) {
      death_ = failure;
    }
  }
  const std::lock_guard lock(listening_);
  open_requests_.fail(*death_);
}

}  // namespace moonpool
