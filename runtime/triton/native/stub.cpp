#include "stub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

namespace moonpool {
namespace {

using wire::Kind;
using wire::Word;

// The time between two checks if clients have left.
constexpr int kLookMilliseconds = 50;
// Triton allows a model this time to tell if it is ready.
constexpr auto kReadiness = std::chrono::seconds(5);
// A socket holds fewer messages.
constexpr int kMostLastMessages = 1024;

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
      borrowed_blocks_(std::make_shared<Region>(born.request_region, born.request_size, std::move(descriptors.at(3))),
                       *this),
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
  // The stub ended before this, when its end was not to be reported. Report it now.
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
  for (const wire::Place& place : released_early_) borrowed_blocks_.take_back(place);
  released_early_.clear();
}

void Stub::send_packet(std::string_view packet, int descriptor) {
  if (control_.send(packet, descriptor) == Channel::Sent::kFull) {
    throw Violation("it does not read its control channel");
  }
}

void Stub::send_cancelled() {
  const uint64_t deserted = open_requests_.each_cancelled([this](uint64_t batch, uint64_t index) {
    // Many clients may leave at the same time. While the stub is slow to read, CANCEL waits, so that the socket has
    // space for necessary messages.
    const bool is_sent = !control_.is_half_full();
    if (is_sent) send<Kind::CANCEL>(batch, index);
    return is_sent;
  });
  if (deserted) calls_->leave(deserted);
}

void Stub::wake() const { eventfd_write(wakes_.get(), 1); }

bool Stub::check_ready() {
  if (has_ended_) return false;
  if (!has_is_ready_) return true;
  std::unique_lock lock(mutex_);
  // Threads that ask at the same time share one question.
  if (question_ == answered_question_) send<Kind::READY>(++question_);
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
  // The process may live on without some of its channels.
  distrust("");
  wait();
  return *death_;
}

std::shared_ptr<Region> Stub::create(wire::Side writer, uint64_t present, uint64_t needed) {
  const uint64_t id = next_region_++;
  const auto message = launcher_->ask<Word::MEMORY>(Launcher::new_number(), instance_, generation_,
                                                    static_cast<uint64_t>(writer), id, present, needed);
  const wire::SetAside made(message->fields);
  if (message->descriptors.empty()) {
    throw Failure(triton::kUnavailable, "the server has no descriptor left for more memory");
  }
  auto region = std::make_shared<Region>(id, made.size, std::move(message->descriptors.at(0)));
  // Wake the listener, so that it checks later if the memory is still needed.
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
  send_packet(message.bytes(), region.fd());
}

void Stub::retire(uint64_t region) { send<Kind::RETIRE>(region); }

// The methods below run on the listener.

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
    // A thread that waits for an answer wakes up, after the packets sent before the end.
    work_.shut();
  }
  control_.shut();
  {
    // The instance's thread may still be in `catch_up`, and change the metrics that end here.
    const std::lock_guard lock(listening_);
    calls_->close();
  }
  if (has_begun) report();
}

void Stub::listen_until_end() {
  pollfd ends[] = {{control_.fd(), 0, 0}, {calls_->fd(), 0, 0}, {wakes_.get(), POLLIN, 0}, {pidfd_.get(), POLLIN, 0}};
  for (;;) {
    const int pause = rate_limiter_.pause_milliseconds();
    // Pause both, because a question may refer to an earlier message of the control channel. The ends are seen in any
    // case.
    ends[0].events = pause ? 0 : POLLIN;
    ends[1].events = static_cast<short>(ends[0].events | calls_->events());
    const int ready = poll(ends, std::size(ends), pause ? pause : wait_milliseconds());
    // Without memory, or with a limit of descriptors below the number of ends, it fails at once, and may do so for
    // long.
    if (ready < 0 && errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(kLookMilliseconds));
    const std::lock_guard lock(listening_);
    if (ready == 0 && !pause) tidy();
    if (ready <= 0) continue;
    if (is_readable(ends[2])) {
      eventfd_t count;
      eventfd_read(wakes_.get(), &count);
    }
    const bool has_exited = is_readable(ends[3]);
    // Read the control channel first: a question may refer to a message there.
    if ((is_readable(ends[0]) || is_readable(ends[1])) && !read_control()) return;
    if ((ends[1].revents & POLLOUT) != 0) calls_->send_waiting();
    // A stub that closed this channel may still answer.
    if (is_readable(ends[1]) && !calls_->read(rate_limiter_)) ends[1].fd = -1;
    if (answers_.has_many_released()) send_released();
    rate_limiter_.settle();
    if (open_requests_.are_open()) send_cancelled();
    if (has_exited) {
      // Read the messages that it sent before its end. Limit them: a process that still holds the channel may send for
      // ever.
      read_control(kMostLastMessages);
      return;
    }
  }
}

int Stub::wait_milliseconds() {
  if (open_requests_.are_open()) return kLookMilliseconds;
  return borrowed_blocks_.has_grown() || answers_.has_grown() ? static_cast<int>(wire::kKeepMs) : -1;
}

// Returns false at the end of the channel.
bool Stub::read_control(int most) {
  const bool is_open = take_in_control(most);
  // Grow after all messages were read: a stub that asks for memory waits, and sends no second GROW.
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
    if (!is_there(received)) return received == Channel::Received::kNothing;
    const auto message = opened(wire::kControl, packet_.bytes(), answers_, &stored);
    // Responses were asked for, so they are not charged. GROW is charged like all others: it takes memory.
    if (message.kind() != Kind::RESPONSES) {
      rate_limiter_.took(stored.empty() ? packet_.bytes().size() : stored.size(), wire::cost_of(message.kind()));
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
      if (answers_.has_many_released()) send_released();
      return;
    case Kind::LOG:
      log_of_model(wire::Log(message.fields));
      return;
    case Kind::DENIALS:
      log_denials(wire::Denials(message.fields));
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
      for (const wire::Place& place : wire::Release(message.fields).places) released_early_.push_back(place);
      if (released_early_.size() > borrowed_blocks_.count()) {
        throw Violation("the stub releases more blocks than it was given");
      }
      return;
    }
    case Kind::METRICS:
      rate_limiter_.took(0, static_cast<double>(calls_->change_metrics(wire::Metrics(message.fields))) /
                                wire::kObservationsPerMessage);
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
      throw Violation(std::string(message.message->name) + " came unasked");
  }
}

// Returns the first lines of a text, as many as the budget allows, and counts the others.
std::string_view Stub::lines_that_may_be_logged(std::string_view text) {
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (!log_lines_.spend(1 + static_cast<double>((end - begin) / wire::kLogLineBytes))) {
      lines_left_out_ += 1 + static_cast<uint64_t>(std::count(text.begin() + begin, text.end(), '\n'));
      break;
    }
    begin = end + 1;
  }
  return text.substr(0, std::max<size_t>(begin, 1) - 1);
}

// Logs a message of the model. Before it comes a line with the number of lines left out.
void Stub::log_of_model(const wire::Log& said) {
  std::string_view message = said.message;
  while (!message.empty() && message.back() == '\n') message.remove_suffix(1);
  const uint64_t left_out = std::exchange(lines_left_out_, 0);
  const std::string_view lines = lines_that_may_be_logged(message);
  if (lines.empty() && lines_left_out_ > 0) {
    lines_left_out_ += left_out;
    return;
  }
  if (left_out) {
    log(triton::kWarning, "model '" + model_.name() + "': " + std::to_string(left_out) +
                              " lines of an instance were left out: too many a second "
                              "(MOONPOOL_LOG_LINES_PER_S is " +
                              std::to_string(model_.facts().log_lines_per_s) + ")");
  }
  const int level = static_cast<int>(said.level), number = static_cast<int>(said.line);
  if (!model_.facts().is_private) {
    return log_from(level, said.file, number, lines.size() == message.size() ? said.message : lines);
  }
  // A contained model gets no place in front of the line: it could name one of the server's own files.
  std::string where;
  if (number) {
    where = " (" + std::string(said.file.substr(said.file.rfind('/') + 1)) + ":" + std::to_string(number) + ")";
  }
  log(level, "[" + name_ + "] " + one_line(lines) + where);
}

// Logs each denial with a text once, up to kMostDenialsLogged. The stub may lie about them.
void Stub::log_denials(const wire::Denials& denials) {
  if (!model_.facts().is_private) throw Violation("DENIALS came of a model that is not contained");
  for (const wire::DenialsDenials& row : denials.denials) {
    // A row without a text only counts. Fork never has one.
    if (row.text.empty() && row.what != wire::kFork) continue;
    if (denials_logged_.size() == kMostDenialsLogged) return;
    if (!denials_logged_.emplace(row.what, row.text).second) continue;
    const std::string times = row.count > 1 ? " (" + std::to_string(row.count) + " times)" : "";
    log(triton::kInfo, "[" + name_ + "] its sandbox did not let it " + std::string(wire::kDenialWords[row.what]) +
                           (row.text.empty() ? "" : " ") + one_line(row.text) + times + "; " +
                           std::string(wire::kDenialOptions[row.what]));
  }
}

void Stub::grow(uint64_t needed, int64_t device) {
  // Send releases first: the freed memory may be enough.
  send_released();
  try {
    if (device != wire::kNoDevice) {
      throw Failure(triton::kUnsupported, "inside of tritonserver, outputs lie in ordinary memory");
    }
    answers_.grow(needed);
  } catch (const Failure& failure) {
    send<Kind::REFUSED>(failure.what());
  }
}

void Stub::send_released() {
  for (;;) {
    answers_.take_released(&released_, wire::kMaxPlacesInPacket);
    if (released_.empty()) return;
    send<Kind::RELEASE>(released_);
  }
}

void Stub::tidy() {
  if (open_requests_.are_open()) {
    send_cancelled();
    return;
  }
  if (!is_executing_) take_back_late();
  borrowed_blocks_.tidy();
  send_released();
}

// Reports the end to the launcher, and waits for the reason.
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
      const auto message = mailbox_.next();
      if (message->word != Word::DIED) throw Failure(triton::kInternal, "the launcher does not say why it died");
      const wire::Died died(message->fields);
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
