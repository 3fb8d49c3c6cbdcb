// One request, one answer, per connection.
#include "comm/shm/courier.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"

namespace hpcomm::shm {

namespace {

struct Request {
  KeyWord key_word;
  std::uint64_t name;
};

constexpr auto kOnePeer = std::chrono::milliseconds(500);  // that asks for memory, while others wait

[[noreturn]] void give_up(const std::string& what, int error) {
  throw Error(ErrorKind::kTransport, str("passing shared memory: ", what, ": ", std::strerror(error)));
}

control::Fd open_socket(int flags) {
  return control::Fd::open([flags] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0); });
}

socklen_t fill(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  // A leading zero byte: the abstract namespace, which dies with the socket.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

void limit(int fd, std::chrono::milliseconds time) {
  const auto ms = std::max<long>(1, static_cast<long>(time.count()));
  const timeval value{ms / 1000, (ms % 1000) * 1000};
  (void)::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
  (void)::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value);
}

bool same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

// Space for the control message that carries one descriptor.
union Ancillary {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

bool equal(const KeyWord& a, const KeyWord& b) {
  unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

// What a system call says, other than that a signal came. With a limit to its wait it does not go on by itself,
// whatever the handler asked for (signal(7)); each try has the whole limit, so there are none after `deadline`.
template <typename Call>
auto uninterrupted(Deadline deadline, const Call& call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) {
      return result;
    }
    if (Clock::now() >= deadline) {
      errno = ETIMEDOUT;
      return result;
    }
  }
}

control::Fd spare_file() {
  return control::Fd::open([] { return ::eventfd(0, EFD_CLOEXEC); });
}

}  // namespace

KeyWord random_key_word() {
  KeyWord word{};
  if (::getrandom(word.data(), word.size(), 0) != static_cast<ssize_t>(word.size())) {
    give_up("random numbers", errno);
  }
  return word;
}

Courier::Courier() : generation_(fork_generation()), key_word_(random_key_word()) {
  for (const unsigned char byte : random_key_word()) {
    constexpr const char* kDigits = "0123456789abcdef";
    address_ += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  address_ = "hpcomm-" + address_;
  listener_ = open_socket(SOCK_NONBLOCK);
  stop_ = control::Fd::open([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  spare_ = spare_file();
  sockaddr_un address;
  const socklen_t length = fill(address, address_);
  if (!listener_.valid() || !stop_.valid() ||
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener_.get(), 128) != 0) {
    give_up("a Unix socket", errno);
  }
  thread_ = Thread("hpcomm:courier", [this] { serve(); });
}

Courier::~Courier() {
  if (fork_generation() != generation_) {
    return;  // the thread is the parent's
  }
  const std::uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void Courier::publish(std::uint64_t name, int descriptor) {
  auto copy = control::Fd::open([descriptor] { return ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0); });
  if (!copy.valid()) {
    give_up("a descriptor", errno);
  }
  std::lock_guard lock(mutex_);
  offered_[name] = std::move(copy);
}

void Courier::withdraw(std::uint64_t name) {
  std::lock_guard lock(mutex_);
  offered_.erase(name);
}

void Courier::serve() {
  for (;;) {
    pollfd fds[] = {{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    (void)::poll(fds, 2, -1);
    if (fds[1].revents != 0) {
      return;
    }
    const auto accept = [this] { return ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC); };
    auto connection = control::Fd::open(accept);
    if (!connection.valid() && (errno == EMFILE || errno == ENFILE)) {
      // The peer waits for an answer, and the listener would call again at once: this takes one file for a moment.
      spare_ = {};
      connection = control::Fd::open(accept);
      if (!connection.valid()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // another thread has it
      }
    }
    if (connection.valid() && same_user(connection.get())) {
      limit(connection.get(), kOnePeer);
      answer(connection);
    }
    connection = {};
    if (!spare_.valid()) {
      spare_ = spare_file();
    }
  }
}

void Courier::answer(const control::Fd& connection) {
  Request request{};
  const auto hear = [&] { return ::recv(connection.get(), &request, sizeof request, 0); };
  if (uninterrupted(deadline_after(kOnePeer), hear) != sizeof request || !equal(request.key_word, key_word_)) {
    return;
  }
  char found = 0;
  iovec part{&found, 1};
  Ancillary ancillary{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::lock_guard lock(mutex_);  // sending to an empty socket does not wait
  if (const auto offer = offered_.find(request.name); offer != offered_.end()) {
    found = 1;
    message.msg_control = ancillary.bytes;
    message.msg_controllen = sizeof ancillary.bytes;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int descriptor = offer->second.get();
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  (void)!::sendmsg(connection.get(), &message, MSG_NOSIGNAL);
}

Errand::Errand(const std::string& address, const KeyWord& key_word, std::uint64_t name)
    : address_(address), key_word_(key_word), name_(name), connection_(open_socket(SOCK_NONBLOCK)) {
  if (!connection_.valid()) {
    give_up("a Unix socket", errno);
  }
  if (address.size() + 1 > sizeof sockaddr_un{}.sun_path) {
    give_up("the peer's address", ENAMETOOLONG);
  }
}

// False as long as too many others wait for that courier.
bool Errand::ask() {
  sockaddr_un target;
  const socklen_t length = fill(target, address_);
  if (::connect(connection_.get(), reinterpret_cast<const sockaddr*>(&target), length) != 0) {
    if (errno == EAGAIN || errno == EINTR) {
      return false;
    }
    give_up("connecting to the peer", errno);
  }
  if (!same_user(connection_.get())) {
    give_up("the peer belongs to another user", EPERM);
  }
  const Request request{key_word_, name_};
  if (::send(connection_.get(), &request, sizeof request, MSG_NOSIGNAL) != sizeof request) {
    give_up("asking the peer", errno);
  }
  return true;
}

control::Fd Errand::take() {
  if (!asked_.load(std::memory_order_relaxed)) {
    if (!ask()) {
      return {};
    }
    asked_.store(true, std::memory_order_relaxed);
  }
  char found = 0;
  iovec part{&found, 1};
  Ancillary ancillary{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = ancillary.bytes;
  message.msg_controllen = sizeof ancillary.bytes;
  const ssize_t got = ::recvmsg(connection_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return {};
  }
  if (got <= 0) {
    give_up("the peer's answer", got == 0 ? ECONNRESET : errno);
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr && (message.msg_flags & MSG_CTRUNC) != 0) {
    give_up("a descriptor of the peer's memory", EMFILE);
  }
  if (found != 1 || header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    give_up("the peer has no such memory", ENOENT);
  }
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return control::Fd::open([descriptor] { return descriptor; });
}

void Errand::wait(Deadline until) const {
  constexpr auto kNextTry = std::chrono::milliseconds(1);
  if (!asked_.load(std::memory_order_relaxed)) {
    return std::this_thread::sleep_until(std::min(until, Clock::now() + kNextTry));
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  pollfd fd{connection_.get(), POLLIN, 0};
  (void)::poll(&fd, 1, static_cast<int>(std::max<long>(0, static_cast<long>(left.count()))));
}

}  // namespace hpcomm::shm
