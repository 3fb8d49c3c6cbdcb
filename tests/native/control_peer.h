// Stranger: a connection to a Control that is played by hand: by a port scanner, another job, or a rank that
// misbehaves.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "control/handshake.h"
#include "control/wire.h"
#include "native/check.h"

namespace hpcomm::testing {

class Stranger {
 public:
  // `expected`: somebody listens there, whatever happened before.
  explicit Stranger(const std::string& address, bool expected = true)
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    ::inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    const int refused = ::connect(fd_, reinterpret_cast<const sockaddr*>(&where), sizeof where);
    CHECK(refused == 0 || !expected);
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  ~Stranger() { ::close(fd_); }

  void say(const std::string& bytes) const { (void)!::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // Plays rank `rank` in the greeting of rank `to`, which has to be in its connect(); false when it is refused.
  [[nodiscard]] bool greet(int rank, int to, unsigned char token = 7) const {
    auto greeting = control::Handshake::open(control::JobToken{token}, rank, to);
    std::array<char, 1> byte;  // one by one: what is behind the greeting stays in the socket
    for (say(greeting.output()); !greeting.done(); say(greeting.output())) {
      if (::recv(fd_, byte.data(), 1, 0) != 1) {
        return false;
      }
      greeting.take({byte.data(), 1});
    }
    return true;
  }
  // Everything that arrives until `part` is among it, or the connection ends.
  [[nodiscard]] std::string read_until(std::string_view part) const {
    std::string text;
    std::array<char, 256> chunk;
    while (text.find(part) == std::string::npos) {
      const ssize_t got = ::recv(fd_, chunk.data(), chunk.size(), 0);
      if (got <= 0) {
        break;
      }
      text.append(chunk.data(), static_cast<std::size_t>(got));
    }
    return text;
  }
  [[nodiscard]] bool hung_up_on() const {
    for (;;) {
      pollfd poll{fd_, POLLIN, 0};
      std::array<char, 256> chunk;
      if (::poll(&poll, 1, 0) != 1) {
        return false;
      }
      if (::recv(fd_, chunk.data(), chunk.size(), MSG_DONTWAIT) <= 0) {
        return true;
      }
    }
  }
  // As a killed process does: pending input turns the goodbye into a reset.
  void reset() {
    const linger hard{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
  }

 private:
  int fd_;
};

// The first frame of a greeting, without the rest.
inline std::string hello(int from, int to = 0) {
  return control::encode(control::FrameKind::kHello, 0, control::encode_hello({from, to, {}}));
}

template <typename Call>
std::optional<Error> error_from(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

inline void check_kind(const std::optional<Error>& error, ErrorKind kind, std::string_view part) {
  CHECK(error.has_value());
  if (error) {
    CHECK_EQ(error->kind(), kind);
    if (std::string_view(error->what()).find(part) == std::string_view::npos) {
      check::fail(__FILE__, __LINE__, str("no \"", part, "\" in: ", error->what()));
    }
  }
}

}  // namespace hpcomm::testing
