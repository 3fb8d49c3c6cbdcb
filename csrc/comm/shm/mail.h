// Mail: one message that this rank sends or receives through its Mailbox.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "comm/mailbox.h"

namespace hpcomm::shm {

class ShmMailbox;

class Mail final : public MailWork, public std::enable_shared_from_this<Mail> {
 public:
  // A receive from anybody has the peer Mailbox::kAnySource until it is matched.
  Mail(std::shared_ptr<ShmMailbox> owner, ErrorContext what, const BufferView& buffer, int from_or_to,
       std::uint64_t with_tag, const MailOptions& options, Deadline limit);

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override { return done_.load(std::memory_order_acquire); }
  [[nodiscard]] bool wait_until(Deadline limit) const override;
  [[nodiscard]] Event event() const override;
  [[nodiscard]] int source() const noexcept override { return peer; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return view.bytes; }

  [[nodiscard]] bool is_receive() const noexcept { return number == 0; }
  // Has a program chosen its tag?
  [[nodiscard]] bool is_of_program() const noexcept { return tag < Mailbox::kTagsOfPrograms; }
  // It has ended; the memory is its caller's again, who may let go of `keepalive`.
  void end(std::exception_ptr why);
  // Throws what went wrong with it. It has ended.
  void require_ended_well() const;

  const std::uint64_t tag;
  const Deadline deadline;
  const bool awaited;       // MailOptions::awaited
  const bool must_precede;  // MailOptions::must_precede
  // Guarded by the mailbox's mutex until it has ended.
  BufferView view;
  int peer;
  Keepalive keepalive;
  bool at_most = false;      // of a receive: until it is matched, `view` says what there is room for
  std::uint64_t number = 0;  // of a send: of those to its peer, from 1
  std::size_t moved = 0;     // of a send: bytes
  // Of a send, what is known before it has ended: of this one, and of an earlier one that had ended.
  std::exception_ptr error;
  std::exception_ptr late;

 private:
  std::shared_ptr<ShmMailbox> owner_;
  ErrorContext what_;
  std::exception_ptr ended_by_;
  std::atomic<bool> done_ = false;
};

using Held = std::shared_ptr<Mail>;

// For messages: "3 float32 elements".
[[nodiscard]] std::string elements_of(std::uint64_t count, std::uint8_t dtype);

}  // namespace hpcomm::shm
