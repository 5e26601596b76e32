#include "launcher.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

extern "C" char** environ;
// A wheel is linked to an older C library, which lacks this; those of tritonserver's images have it.
#pragma weak posix_spawn_file_actions_addclosefrom_np

namespace moonpool {
namespace {

using wire::Word;

constexpr int kGreetingMilliseconds = 60'000;
constexpr int kEndMilliseconds = 10'000;
// The number of the channel's descriptor in the launcher.
constexpr int kChannelFd = 3;
// A file beside this library, with two lines: the interpreter, and the program that it runs.
constexpr const char* kSettings = "moonpool.txt";

std::pair<std::string, std::string> settings() {
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&settings), &here);
  std::string path = here.dli_fname ? here.dli_fname : "";
  path.resize(path.rfind('/') + 1);
  path += kSettings;
  std::ifstream file(path);
  std::string interpreter, program;
  if (!std::getline(file, interpreter) || !std::getline(file, program)) {
    throw Failure(triton::kUnavailable, path +
                                            " does not name an interpreter and a program; install the backend with "
                                            "`moonpool triton install`");
  }
  return {interpreter, program};
}

}  // namespace

std::unique_ptr<LauncherMessage> Mailbox::next() {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [this] { return is_closed_ || !messages_.empty(); });
  if (messages_.empty()) throw Failure(triton::kUnavailable, "The launcher of moonpool's stubs has ended");
  auto message = std::move(messages_.front());
  messages_.pop_front();
  if (message->word != Word::REFUSED) return message;
  const wire::Refused refused(message->fields);
  throw Failure(static_cast<int>(refused.code), std::string(refused.message));
}

bool Mailbox::is_closed() {
  std::lock_guard lock(mutex_);
  return is_closed_;
}

bool Mailbox::is_empty() {
  std::lock_guard lock(mutex_);
  return messages_.empty();
}

void Mailbox::put(std::unique_ptr<LauncherMessage> message) {
  std::lock_guard lock(mutex_);
  if (message->word == Word::DIED) drop_ended();
  messages_.push_back(std::move(message));
  arrived_.notify_all();
}

// Unread messages about a process that has ended are useless, and hold its descriptors. An instance may be started
// again and again while no request comes that would read them. The oldest DIED stays, because it answers LOST.
void Mailbox::drop_ended() {
  while (!messages_.empty() && (messages_.back()->word != Word::DIED || messages_.size() > 1)) messages_.pop_back();
}

void Mailbox::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  arrived_.notify_all();
}

Launcher::Launcher(const std::string& backend, const std::string& directory, const std::string& config) {
  spawn(backend);
  try {
    greet();
  } catch (const Failure&) {
    bury();
    throw;
  }
  listener_ = std::thread([this] { listen(); });
  send<Word::BACKEND>(backend, directory, config, "triton");
  send_log_levels();
}

// Receives the launcher's first message, which may be a refusal.
void Launcher::greet() {
  Packet packet;
  std::string wrong = "it ended, or said nothing; the log has what it printed";
  channel_.limit_waiting(kGreetingMilliseconds);
  if (const auto message = receive(packet, &wrong)) {
    if (message->word == Word::HELLO) {
      const wire::Hello hello(message->fields);
      if (hello.version == wire::kLauncherVersion && hello.protocol == wire::kProtocolVersion) {
        return channel_.limit_waiting(0);
      }
      wrong = "it is of moonpool " + std::string(hello.moonpool) + ", and this library of another";
    }
  }
  throw Failure(triton::kUnavailable, "The launcher of moonpool's stubs could not be started: " + wrong);
}

Launcher::~Launcher() {
  channel_.shut();
  if (listener_.joinable()) listener_.join();
}

void Launcher::spawn(const std::string& backend) {
  auto [interpreter, program] = settings();
  if (!posix_spawn_file_actions_addclosefrom_np) {
    throw Failure(triton::kUnavailable,
                  "the C library is older than glibc 2.34, which hosting models in tritonserver needs");
  }
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) {
    throw Failure(triton::kUnavailable, std::string("no socket: ") + std::strerror(errno));
  }
  channel_ = Channel(Descriptor(ends[0]));
  Descriptor theirs(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, theirs.get(), kChannelFd);
  // Stubs must not inherit the server's sockets.
  posix_spawn_file_actions_addclosefrom_np(&actions, kChannelFd + 1);
  // Settings of the server's Python must not reach this one (-I). The launcher drops the rest of the environment
  // itself.
  std::string isolated = "-I", number = std::to_string(kChannelFd), name = backend;
  char* arguments[] = {interpreter.data(), isolated.data(), program.data(), number.data(), name.data(), nullptr};
  const int error = posix_spawn(&pid_, interpreter.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error) {
    throw Failure(triton::kUnavailable, interpreter + " cannot be started: " + std::strerror(error));
  }
  pidfd_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
}

uint64_t Launcher::new_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

std::shared_ptr<Mailbox> Launcher::open(uint64_t number) {
  auto mailbox = std::make_shared<Mailbox>();
  std::lock_guard lock(mutex_);
  if (is_gone_) mailbox->close();
  mailboxes_[number] = mailbox;
  return mailbox;
}

void Launcher::close(uint64_t number) {
  std::lock_guard lock(mutex_);
  const auto mailbox = mailboxes_.find(number);
  if (mailbox == mailboxes_.end()) return;
  // No message comes any more, so a thread that waits for one would wait for ever.
  mailbox->second->close();
  mailboxes_.erase(mailbox);
}

void Launcher::post(std::string_view packet) {
  Channel::Sent sent;
  if (packet.size() <= wire::kMaxPacketBytes) {
    sent = channel_.send(packet);
  } else {
    Descriptor file(memfd_create("moonpool-message", MFD_CLOEXEC));
    if (::write(file.get(), packet.data(), packet.size()) != static_cast<ssize_t>(packet.size())) {
      throw Failure(triton::kUnavailable, "no memory for a message to the launcher");
    }
    Writer writer;
    wire::encode<Word::LONG>(writer, packet.size());
    sent = channel_.send(writer.bytes(), file.get());
  }
  // A launcher that does not read is of no use either.
  if (sent == Channel::Sent::kFull) channel_.shut();
}

// Runs on a thread of its own, until the launcher's end.
void Launcher::listen() {
  Packet packet;
  std::string wrong;
  while (auto message = receive(packet, &wrong)) deliver(std::move(message));
  if (!wrong.empty()) log(triton::kError, "No more messages of the launcher are read: " + wrong);
  bury();
  std::lock_guard lock(mutex_);
  is_gone_ = true;
  for (auto& [number, mailbox] : mailboxes_) mailbox->close();
}

std::unique_ptr<LauncherMessage> Launcher::receive(Packet& packet, std::string* wrong) {
  auto message = std::make_unique<LauncherMessage>();
  if (channel_.receive(packet, false, &message->descriptors) != Channel::Received::kDone) {
    return nullptr;
  }
  message->packet = packet.bytes();
  auto decoded = decode(wire::kLauncher, wire::End::LAUNCHER, message->packet);
  if (decoded && decoded.kind() == Word::LONG && !message->descriptors.empty()) {
    const Descriptor file = std::move(message->descriptors.front());
    message->descriptors.erase(message->descriptors.begin());
    std::string whole(wire::Long(decoded.fields).size, '\0');
    const ssize_t size = pread(file.get(), whole.data(), whole.size(), 0);
    whole.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
    message->packet = std::move(whole);
    decoded = decode(wire::kLauncher, wire::End::LAUNCHER, message->packet);
  }
  if (!decoded || decoded.kind() == Word::LONG) {
    *wrong = decoded ? "LONG that refers to nothing" : decoded.wrong;
    return nullptr;
  }
  message->word = decoded.kind();
  message->fields = decoded.fields;
  return message;
}

void Launcher::deliver(std::unique_ptr<LauncherMessage> message) {
  if (message->word == Word::NOTE) {
    const wire::Note note(message->fields);
    // The launcher has made one line of the text, or allows it more.
    log_from(static_cast<int>(note.level), note.file, static_cast<int>(note.line), note.message);
    return;
  }
  if (!is_whole(*message)) return;
  // All other messages begin with the number of their model or instance.
  const uint64_t number = Reader(message->fields).uint();
  std::lock_guard lock(mutex_);
  const auto mailbox = mailboxes_.find(number);
  if (mailbox == mailboxes_.end()) return;
  if (message->word == Word::GROWN) {
    mailbox->second->grown_generation_ = wire::Grown(message->fields).generation;
  } else {
    mailbox->second->put(std::move(message));
  }
}

// Returns false if descriptors of a process did not come with the message, because the server may have none left. It
// reports that at once, as the next request may come much later.
bool Launcher::is_whole(const LauncherMessage& message) {
  constexpr size_t kOfBorn = 5, kOfStarted = 1;
  constexpr const char* kWhy = "it has no descriptor left";
  if (message.word == Word::BORN && message.descriptors.size() < kOfBorn) {
    const wire::Born born(message.fields);
    report_shortage(born.instance, born.generation, kWhy);
    return false;
  }
  if (message.word == Word::STARTED && message.descriptors.size() < kOfStarted) {
    const wire::Started started(message.fields);
    report_shortage(started.instance, started.generation, kWhy);
    return false;
  }
  return true;
}

// Waits for the launcher, which ends when its channel does, and kills it if that takes too long.
void Launcher::bury() {
  channel_.shut();
  pollfd end{pidfd_.get(), POLLIN, 0};
  if (poll(&end, 1, kEndMilliseconds) == 0) {
    log(triton::kWarning, "The launcher of moonpool's stubs does not end; killing it");
    kill(pid_, SIGKILL);
  }
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace moonpool
