// The Mailbox of ranks that share memory: frames and a ring for every ordered pair, matching as MPI does it.
//
// Whoever waits makes everything progress; what nobody waits for, a thread does (mail_pump.h). What goes to a peer and
// comes from it: mail_out.h, mail_in.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/mailbox.h"
#include "comm/shm/mail.h"
#include "comm/shm/mail_desk.h"
#include "comm/shm/mail_in.h"
#include "comm/shm/mail_out.h"
#include "comm/shm/mail_pump.h"

namespace hpcomm::shm {

class ShmMailbox final : public Mailbox, public std::enable_shared_from_this<ShmMailbox> {
 public:
  explicit ShmMailbox(MailSetup setup);
  ~ShmMailbox() override;

  MailPtr send(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options) override;
  MailPtr recv(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options) override;
  MailPtr recv_at_most(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options) override;

  // Makes everything progress until `mail` has ended; false when the deadline came first. Does not throw its error.
  [[nodiscard]] bool drive(const Mail& mail, Deadline deadline, void (*poll)() = nullptr);
  // Ends everything that is under way, and refuses more. From any thread.
  void fail(const Error& why) noexcept;
  // `rank` sends and takes nothing more: what only it could end fails with kRankFailed. From any thread.
  void depart(std::size_t rank);
  // Answers that have found no room go to those whose messages have been received here, if these take what is before it
  // within a moment: without it they would take a rank that leaves for lost.
  void flush_answers();
  // What was sent and nobody reads yet goes through the ring, as far as there is room: this rank is about to leave.
  void close_open();
  // Whether memory of this rank is what a peer reads, or writes, for a message that is under way.
  [[nodiscard]] bool shows_memory();
  // fail(), and the thread ends. No call may be in progress.
  void stop() noexcept;

 private:
  // Both directions between this rank and a peer.
  struct Pair {
    Pair(MailDesk& desk, int peer) : out(desk, peer, in), in(desk, peer, out) {}
    [[nodiscard]] bool is_over() const noexcept { return departed || gone; }

    MailOut out;
    MailIn in;
    bool departed = false;
    // Since when the peer is known to have gone from this communicator; and that nothing has been heard of the job
    // since.
    std::optional<Deadline> gone_since;
    bool gone = false;
  };
  // The mutex, and then what ended while it was held: a keepalive may be a tensor, whose end may take other locks.
  // Of a caller who waits for a mail, or for a message of peer `waits_for` (MailDesk::waits_for).
  class Turn {
   public:
    explicit Turn(ShmMailbox& mailbox, int waits_for = MailDesk::kNobody) : mailbox_(mailbox), lock_(mailbox.mutex_) {
      mailbox.desk_.waits_for = waits_for;
    }
    Turn(ShmMailbox& mailbox, const Mail& mail) : Turn(mailbox) {
      mailbox.desk_.waits_for = mail.is_receive() ? mail.peer : MailDesk::kNobody;
    }
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    ShmMailbox& mailbox_;
    std::unique_lock<std::mutex> lock_;
  };

  [[nodiscard]] Held post(const BufferView& buffer, int peer, std::uint64_t tag, const MailOptions& options,
                          bool at_most);
  void require_parent(const char* operation) const;
  void require_peer(const char* operation, int peer) const;
  void report_broken();
  void pump();

  // All with the mutex held.
  [[nodiscard]] Pair& pair_with(int rank) { return *pairs_[index(rank)]; }
  // Throws why this mailbox ended, if it has, as the end of `what`.
  void require_whole(const ErrorContext& what) const;
  [[nodiscard]] ErrorContext context(const char* operation, int peer, std::uint64_t sequence) const;
  [[nodiscard]] Error failed(ErrorContext what, const Error& why) const;
  [[nodiscard]] Held make(const char* operation, const BufferView& view, int peer, std::uint64_t tag,
                          const MailOptions& options, std::uint64_t sequence);
  // Before anything is sent or expected: nobody would drive it.
  void start();
  void arm();
  [[nodiscard]] MailPump::Look wanted_look() const;
  // True when a message that came before it was there for `mail`.
  [[nodiscard]] bool take_early(const Held& mail);
  void progress();
  [[nodiscard]] Deadline next_close() const;
  // Is there anything left to do? Also without a mail: the rest of a refused message, answers that found no room.
  [[nodiscard]] bool pending() const;
  [[nodiscard]] std::string unasked() const;
  void expire();
  // Ends what a rank that has left cannot end any more.
  void bury();
  // `beside`: unasked().
  [[nodiscard]] Error gone(const Mail& mail, const std::string& beside) const;
  // Is `rank`, or any for kAnySource, known to have gone by what it wrote on its bell? Then bury().
  void miss(int rank);

  const std::uint32_t generation_;
  const WaitPolicy policy_;
  std::mutex mutex_;
  MailDesk desk_;
  Bell& bell_;
  std::vector<std::unique_ptr<Pair>> pairs_;  // by rank; none with this one
  std::uint64_t receives_ = 0;
  std::optional<Error> failed_;
  std::atomic<int> drivers_ = 0;
  std::atomic<bool> left_to_drivers_ = false;  // by the thread, when its timer ended

  std::mutex owner_mutex_;  // held while the owner is told, taken before mutex_
  std::function<void(const Error&)> owner_failed_;

  MailPump pump_;
};

}  // namespace hpcomm::shm
