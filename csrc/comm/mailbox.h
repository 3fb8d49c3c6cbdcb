// Mailbox: messages with tags between the ranks of one group, matched like MPI's: what torch.distributed wants of
// send and recv beyond a Communicator's first-in-first-out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/view.h"
#include "comm/communicator.h"
#include "comm/work.h"

namespace hpcomm {

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
  // agree: kSchemaMismatch otherwise. The time-out in `options` counts from here; its keepalive is held until the end.
  virtual MailPtr send(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options = {}) = 0;
  virtual MailPtr recv(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options = {}) = 0;
  // Takes a shorter message as well, one that travels whole at once: MailWork::bytes() says what came.
  virtual MailPtr recv_at_most(const BufferView& buffer, int peer, std::uint64_t tag,
                               const OpOptions& options = {}) = 0;
};

}  // namespace hpcomm
