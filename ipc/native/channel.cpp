#include "channel.h"

#include <errno.h>
#include <linux/sockios.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "wire.h"

namespace moonpool {

namespace {
constexpr size_t kMaxDescriptors = 16;
}

uint64_t current_core() {
  const int core = sched_getcpu();
  return core < 0 ? wire::kNoCore : static_cast<uint64_t>(core) % wire::kNoCore;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

// One byte more than a packet may have, so that the length shows that a packet was cut short.
Packet::Packet() : bytes_(new char[wire::kMaxPacketBytes + 1]) {}

Channel::Sent Channel::send(std::string_view packet, int descriptor) const {
  iovec part{const_cast<char*>(packet.data()), packet.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  while (sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    return errno == EAGAIN ? Sent::kFull : Sent::kGone;
  }
  return Sent::kDone;
}

Channel::Received Channel::receive(Packet& packet, bool at_once, std::vector<Descriptor>* descriptors) const {
  iovec part{packet.bytes_.get(), wire::kMaxPacketBytes + 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  if (descriptors) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  ssize_t size;
  // If the peer ended with packets unread, a reset is reported once, before the packets that it sent.
  bool was_reset = false;
  while ((size = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | (at_once ? MSG_DONTWAIT : 0))) < 0) {
    if (errno == EAGAIN) return Received::kNothing;
    if (errno != EINTR && (errno != ECONNRESET || was_reset)) return Received::kGone;
    was_reset = errno == ECONNRESET;
  }
  if (descriptors) {
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= header->cmsg_len; at += sizeof(int)) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
        descriptors->emplace_back(fd);
      }
    }
  }
  if (size == 0) return Received::kGone;
  if (static_cast<size_t>(size) > wire::kMaxPacketBytes) return Received::kTooLong;
  packet.size_ = size;
  return Received::kDone;
}

void Channel::limit_waiting(int milliseconds) const {
  timeval limit{milliseconds / 1000, milliseconds % 1000 * 1000};
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

bool Channel::is_half_full() const {
  int unread = 0, most = 0;
  socklen_t size = sizeof most;
  if (ioctl(socket_.get(), SIOCOUTQ, &unread) < 0) return false;
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &most, &size) < 0) return false;
  return unread > most / 2;
}

void Channel::shut() const { shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace moonpool
