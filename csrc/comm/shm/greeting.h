// Greeting: what ranks of a job tell each other to find out which of them share memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "comm/shm/courier.h"

namespace hpcomm::shm {

struct Greeting {
  // Where it runs.
  std::string boot_id;
  std::string network;  // abstract sockets, by which neighbours hand memory to each other, do not leave it
  std::string host;     // HPCOMM_HOST
  std::string cores;    // that it may use: one '1' or '0' for each of the host's
  std::string scheduler_group;
  // Where others fetch its memory, and what they then read in the page that it offers.
  std::string courier;
  KeyWord key_word{};
  KeyWord page{};
  std::string obstacle;  // why it offers nothing; empty when it does
  // How others find that they read this process, and no other: zero where they may not.
  pid_t process = 0;
  std::uint64_t mark_address = 0;
  KeyWord mark{};

  // Of this process: where it runs.
  [[nodiscard]] static Greeting from_here(std::string host);
  [[nodiscard]] std::string encode() const;
  // Throws kProtocol where another version has written it.
  [[nodiscard]] static Greeting decode(const std::string& body);
};

}  // namespace hpcomm::shm
