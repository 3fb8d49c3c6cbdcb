// The few socket calls that Control needs, with one owner per descriptor.
#pragma once

#include <string>
#include <utility>

namespace hpcomm::control {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd();

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }
  void reset() noexcept { Fd gone(std::move(*this)); }

 private:
  int fd_ = -1;
};

// A listening socket on `host` and a free port; its address as "host:port" (IPv6 hosts in brackets).
[[nodiscard]] std::pair<Fd, std::string> listen_on(const std::string& host, int backlog);
// Starts a connection; it may still be in progress. Throws kTransport when the address is unusable.
[[nodiscard]] Fd start_connect(const std::string& address);
// The error of a connection that poll reported writable; 0 when it stands.
[[nodiscard]] int connect_error(int fd);
// Non-blocking accept; invalid when nobody waits.
[[nodiscard]] Fd accept_one(int listener);
// "host:port" of the other side, for log lines.
[[nodiscard]] std::string peer_name(int fd);
// Bytes that the other side's kernel has not acknowledged yet.
[[nodiscard]] int unsent_bytes(int fd);

}  // namespace hpcomm::control
