// One owner per descriptor, and no descriptor of Control in a forked child.
//
// A forked data-loader worker that kept copies of its parent's sockets would hold them open when the parent dies: its
// peers would notice only when the worker ends as well.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace hpcomm::control {

class Fd {
 public:
  Fd() = default;
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(generation_, other.generation_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd();

  // Owns what `make` returns (a descriptor, or -1 with errno set). No fork happens between the making and the owning.
  // `make` must not block.
  template <typename Make>
  [[nodiscard]] static Fd open(const Make& make) {
    const auto lock = no_fork();
    return Fd(make());
  }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }
  void reset() noexcept { Fd gone(std::move(*this)); }

 private:
  // While it is held, fork() waits.
  [[nodiscard]] static std::unique_lock<std::mutex> no_fork();
  explicit Fd(int fd);

  int fd_ = -1;
  std::uint32_t generation_ = 0;  // of the process that opened it; the number means nothing in another one
};

}  // namespace hpcomm::control
