// Courier: hands file descriptors to other processes of this host, over a Unix socket without a name in the file
// system.
//
// Only processes of the same user that know the key word (it travels through Control, which knows its peers) get any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "base/thread.h"
#include "control/descriptor.h"
#include "stream/event.h"

namespace hpcomm::shm {

using KeyWord = std::array<unsigned char, 16>;
[[nodiscard]] KeyWord random_key_word();

class Courier {
 public:
  Courier();
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // What others need to fetch from here.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  [[nodiscard]] const KeyWord& key_word() const noexcept { return key_word_; }

  // Offers a duplicate of `descriptor` under `name` until withdraw().
  void publish(std::uint64_t name, int descriptor);
  void withdraw(std::uint64_t name);

 private:
  void serve();
  void answer(const control::Fd& connection);

  const std::uint32_t generation_;
  const KeyWord key_word_;
  std::string address_;
  control::Fd listener_;
  control::Fd stop_;
  control::Fd spare_;  // given up for a moment where the process may open no more
  std::mutex mutex_;
  std::map<std::uint64_t, control::Fd> offered_;
  Thread thread_;  // last: it starts when everything above exists
};

// A descriptor on its way from the courier at an address, whose process may be stopped, and go on. Throws kTransport
// with the reason where it does not come.
class Errand {
 public:
  Errand(const std::string& address, const KeyWord& key_word, std::uint64_t name);

  // The descriptor, once, or an invalid one as long as it is not here. One thread at a time.
  [[nodiscard]] control::Fd take();
  // Until it may be here, or `until`. From any thread.
  void wait(Deadline until) const;

 private:
  [[nodiscard]] bool ask();

  const std::string address_;
  const KeyWord key_word_;
  const std::uint64_t name_;
  const control::Fd connection_;
  std::atomic<bool> asked_ = false;
};

}  // namespace hpcomm::shm
