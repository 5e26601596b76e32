// Descriptors, and packets between processes: one SEQPACKET socket for each channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace moonpool {

// Returns the number of the core that this thread runs on, as EXECUTE and ANSWER tell it to the peer.
uint64_t current_core();

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// A buffer for one packet, reused for the next.
class Packet {
 public:
  Packet();
  std::string_view bytes() const { return {bytes_.get(), size_}; }

 private:
  friend class Channel;
  std::unique_ptr<char[]> bytes_;
  size_t size_ = 0;
};

// One end of a channel. One thread at a time may receive. Any thread may send, because the kernel takes packets whole.
class Channel {
 public:
  enum class Sent { kDone, kFull, kGone };
  enum class Received { kDone, kNothing, kGone, kTooLong };

  Channel() = default;
  explicit Channel(Descriptor socket) : socket_(std::move(socket)) {}
  int fd() const { return socket_.get(); }

  // Send a packet, with a descriptor if there is one. Never blocks.
  Sent send(std::string_view packet, int descriptor = -1) const;
  // Receive the next packet. Waits for as long as `limit_waiting` allows, and not at all with `at_once`. Descriptors
  // that come with it are kept only if there are `descriptors`.
  Received receive(Packet& packet, bool at_once, std::vector<Descriptor>* descriptors = nullptr) const;
  void limit_waiting(int milliseconds) const;
  // Returns true if the peer leaves so much unread that only necessary messages should be sent.
  bool is_half_full() const;
  // End the channel. A thread that waits at either end sees its end, after the packets sent before. From any thread.
  void shut() const;

 private:
  Descriptor socket_;
};

}  // namespace moonpool
