// Mailbox: messages with tags between the ranks of one group, matched like MPI's: what torch.distributed wants of
// send and recv beyond a Communicator's first-in-first-out.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/view.h"
#include "comm/work.h"

namespace hpcomm {

struct MailOptions {
  // Zero means the communicator's default. Counted from the call.
  std::chrono::milliseconds timeout{0};
  // Held until the message has ended, also when nobody waits for it.
  Keepalive keepalive;
  // What follows under this tag would be taken for it. Its time-out ends the mailbox, as one in the midst of a message
  // does; that of a receive only where another one waits behind it.
  bool must_precede = false;
  // Its caller waits for it from here to its end, so that nobody else need look after it.
  bool awaited = false;
  // By which errors name it, that of the message it is a part of; below 0, the mailbox's own count.
  std::int64_t number = -1;

  [[nodiscard]] std::uint64_t number_or(std::uint64_t own) const noexcept {
    return number < 0 ? own : static_cast<std::uint64_t>(number);
  }
};

class MailWork : public Work {
 public:
  // Where a received message came from (a rank of the group); of a send, its receiver. Valid once done.
  [[nodiscard]] virtual int source() const noexcept = 0;
  // How long the message was; of a receive, valid once done.
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
};
using MailPtr = std::shared_ptr<MailWork>;

class Mailbox {
 public:
  static constexpr int kAnySource = -1;
  // Tags below it are a program's own, which errors name.
  static constexpr std::uint64_t kTagsOfPrograms = std::uint64_t{1} << 32;

  virtual ~Mailbox() = default;

  // All sends and receives of a rank make progress together, whatever the order in which they were issued and whoever
  // waits. A receive takes the oldest message of its peer (of anybody, for kAnySource) that carries its tag; messages
  // of one sender with one tag arrive in the order they were sent. From any thread.
  //
  // A send has ended when its buffer may be reused. Empty messages are messages. Sizes and dtypes of the two ends must
  // agree: kSchemaMismatch otherwise.
  virtual MailPtr send(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options = {}) = 0;
  virtual MailPtr recv(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options = {}) = 0;
  // Takes a shorter message as well, one that travels whole at once: MailWork::bytes() says what came.
  virtual MailPtr recv_at_most(const BufferView& buffer, int peer, std::uint64_t tag,
                               const MailOptions& options = {}) = 0;
};

}  // namespace hpcomm
