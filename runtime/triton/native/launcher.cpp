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

namespace moonpool {
namespace {

using wire::Word;

constexpr int kGreetingMilliseconds = 60'000;
constexpr int kEndMilliseconds = 10'000;
// The descriptor that the launcher finds its channel at.
constexpr int kChannelFd = 3;
// Beside this library: the interpreter, and the program that it is to run, each on a line.
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

std::unique_ptr<Letter> Mailbox::next() {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [this] { return is_closed_ || !letters_.empty(); });
  if (letters_.empty()) throw Failure(triton::kUnavailable, "The launcher of moonpool's stubs has ended");
  auto letter = std::move(letters_.front());
  letters_.pop_front();
  if (letter->word != Word::REFUSED) return letter;
  const wire::Refused refused(letter->fields);
  throw Failure(static_cast<int>(refused.code), std::string(refused.message));
}

bool Mailbox::is_closed() {
  std::lock_guard lock(mutex_);
  return is_closed_;
}

bool Mailbox::is_empty() {
  std::lock_guard lock(mutex_);
  return letters_.empty();
}

void Mailbox::put(std::unique_ptr<Letter> letter) {
  std::lock_guard lock(mutex_);
  if (letter->word == Word::DIED) drop_ended();
  letters_.push_back(std::move(letter));
  arrived_.notify_all();
}

// Of a process that has ended, unread letters are of no use, and hold its descriptors. An instance may be started again and
// again while no request comes that would read them. The oldest DIED stays: it answers LOST.
void Mailbox::drop_ended() {
  while (!letters_.empty() && (letters_.back()->word != Word::DIED || letters_.size() > 1)) letters_.pop_back();
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
  tell_log_levels();
}

// It speaks first, and may have to say why it will not.
void Launcher::greet() {
  Packet packet;
  std::string wrong = "it ended, or said nothing; the log has what it printed";
  channel_.limit_waiting(kGreetingMilliseconds);
  if (const auto letter = receive(packet, &wrong)) {
    if (letter->word == Word::HELLO) {
      const wire::Hello hello(letter->fields);
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
  // The server's sockets are not for anybody's stubs.
  posix_spawn_file_actions_addclosefrom_np(&actions, kChannelFd + 1);
  // Not a setting of the server's Python is for this one. What else it has of the server it gives up itself.
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
  // No letter comes any more, and a thread that waits for one would wait for ever.
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
  // One that does not read is of no use either.
  if (sent == Channel::Sent::kFull) channel_.shut();
}

// On a thread of its own, until the launcher's end.
void Launcher::listen() {
  Packet packet;
  std::string wrong;
  while (auto letter = receive(packet, &wrong)) deliver(std::move(letter));
  if (!wrong.empty()) log(triton::kError, "The launcher is not listened to any more: " + wrong);
  bury();
  std::lock_guard lock(mutex_);
  is_gone_ = true;
  for (auto& [number, mailbox] : mailboxes_) mailbox->close();
}

std::unique_ptr<Letter> Launcher::receive(Packet& packet, std::string* wrong) {
  auto letter = std::make_unique<Letter>();
  if (channel_.receive(packet, false, &letter->descriptors) != Channel::Received::kDone) {
    return nullptr;
  }
  letter->packet = packet.bytes();
  auto decoded = decode(wire::kLauncher, wire::End::LAUNCHER, letter->packet);
  if (decoded && decoded.kind() == Word::LONG && !letter->descriptors.empty()) {
    const Descriptor file = std::move(letter->descriptors.front());
    letter->descriptors.erase(letter->descriptors.begin());
    std::string whole(wire::Long(decoded.fields).size, '\0');
    const ssize_t size = pread(file.get(), whole.data(), whole.size(), 0);
    whole.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
    letter->packet = std::move(whole);
    decoded = decode(wire::kLauncher, wire::End::LAUNCHER, letter->packet);
  }
  if (!decoded || decoded.kind() == Word::LONG) {
    *wrong = decoded ? "LONG that stands for nothing" : decoded.wrong;
    return nullptr;
  }
  letter->word = decoded.kind();
  letter->fields = decoded.fields;
  return letter;
}

void Launcher::deliver(std::unique_ptr<Letter> letter) {
  if (letter->word == Word::NOTE) {
    const wire::Note note(letter->fields);
    // The launcher has made one line of it, or knows why there may be more.
    log_from(static_cast<int>(note.level), note.file, static_cast<int>(note.line), note.message);
    return;
  }
  if (!is_whole(*letter)) return;
  // All others are led by the number of whom they are about.
  const uint64_t number = Reader(letter->fields).uint();
  std::lock_guard lock(mutex_);
  const auto mailbox = mailboxes_.find(number);
  if (mailbox == mailboxes_.end()) return;
  if (letter->word == Word::GROWN) {
    mailbox->second->grown_generation_ = wire::Grown(letter->fields).generation;
  } else {
    mailbox->second->put(std::move(letter));
  }
}

// False where descriptors of a process did not come with the letter: the server may have none left. That is told at once,
// as the next request may be long in coming.
bool Launcher::is_whole(const Letter& letter) {
  constexpr size_t kOfBorn = 5, kOfStarted = 1;
  constexpr const char* kWhy = "it has no descriptor left";
  if (letter.word == Word::BORN && letter.descriptors.size() < kOfBorn) {
    const wire::Born born(letter.fields);
    has_no_room(born.instance, born.generation, kWhy);
    return false;
  }
  if (letter.word == Word::STARTED && letter.descriptors.size() < kOfStarted) {
    const wire::Started started(letter.fields);
    has_no_room(started.instance, started.generation, kWhy);
    return false;
  }
  return true;
}

// It ends by itself when its channel does; wait for that, and help where it takes too long.
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
