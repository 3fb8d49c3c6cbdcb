// Memory that several processes map. It has no name in any file system: when the last of them ends, also by a signal,
// nothing is left.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "control/descriptor.h"

namespace hpcomm::shm {

inline constexpr std::size_t kPageBytes = 4096;

// What this process can still be given: of the machine, and of its control groups. fallocate() itself would go on until
// the kernel kills somebody. `root` is where the file systems of the kernel are mounted.
[[nodiscard]] std::size_t available_memory(const std::string& root = "/");

class Segment {
 public:
  // New zeroed memory, all of it committed. `what` names it in the error when there is not enough: kTransport.
  [[nodiscard]] static std::shared_ptr<Segment> create(const std::string& what, std::size_t bytes);
  // What another process created; its whole length. Throws kTransport when it cannot be mapped.
  [[nodiscard]] static std::shared_ptr<Segment> adopt(control::Fd fd);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  [[nodiscard]] char* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  // To be passed to other processes; -1 after close_descriptor(). The mapping stays without it.
  [[nodiscard]] int descriptor() const noexcept { return fd_.get(); }
  void close_descriptor() noexcept { fd_.reset(); }

 private:
  Segment(control::Fd fd, std::size_t size);

  control::Fd fd_;
  char* data_ = nullptr;
  std::size_t size_;
};

}  // namespace hpcomm::shm
