// The few socket calls that Control needs.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "control/descriptor.h"

namespace hpcomm::control {

// A listening socket on `host` and a free port; its address as "host:port" (IPv6 hosts in brackets).
[[nodiscard]] std::pair<Fd, std::string> listen_on(const std::string& host, int backlog);
// Starts a connection; it may still be in progress. Throws kTransport when the address is unusable.
[[nodiscard]] Fd start_connect(const std::string& address);
// The error of a connection that poll reported writable; 0 when it stands.
[[nodiscard]] int connect_error(int fd);
// Non-blocking accept; invalid when nobody waits, or with another errno.
[[nodiscard]] Fd accept_one(int listener);
// Has the kernel give up a connection whose other host is silent; our own heartbeats, which say more, come first.
// `limit` is theirs. Without it, a host that vanished would be tried again for a quarter of an hour.
void watch_connection(int fd, std::chrono::milliseconds limit);
// Where both ends are of one host, little lies in the kernel: what is sent is taken out while a cache still has it.
// Between hosts the kernel knows best.
void keep_in_cache(int fd);
// "host:port" of the other side, for log lines.
[[nodiscard]] std::string peer_name(int fd);
// Bytes that the other side's kernel has not acknowledged yet.
[[nodiscard]] int unsent_bytes(int fd);

}  // namespace hpcomm::control
