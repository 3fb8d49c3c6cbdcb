// MailDesk: what a mailbox's messages with all peers share. It counts mails, matches receives, and ends both.
//
// Guarded by the mailbox's mutex, but for cut().
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/shm/mail.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/posted.h"
#include "comm/shm/region.h"

namespace hpcomm::shm {

struct MailSetup {
  std::shared_ptr<Region> region;
  std::shared_ptr<Neighbourhood> neighbourhood;
  std::size_t rank = 0;
  std::vector<int> members;  // ranks of the job
  std::string lane;
  std::chrono::milliseconds timeout{0};
  // Called when a time-out cut a message in two, so that nothing can follow in order: from any thread, until stop().
  std::function<void(const Error&)> broken;
};

[[nodiscard]] constexpr std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

class MailDesk {
 public:
  explicit MailDesk(MailSetup setup)
      : posted(setup.members.size()), setup_(std::move(setup)), asked_(setup_.members.size(), false) {}

  [[nodiscard]] const MailSetup& setup() const noexcept { return setup_; }
  [[nodiscard]] Neighbourhood& neighbourhood() const noexcept { return *setup_.neighbourhood; }
  [[nodiscard]] const Region& region() const noexcept { return *setup_.region; }
  [[nodiscard]] std::size_t rank() const noexcept { return setup_.rank; }
  [[nodiscard]] Bell& own_bell() const noexcept { return setup_.region->bell(setup_.rank); }
  [[nodiscard]] Bell& bell(int rank) const noexcept { return setup_.region->bell(index(rank)); }
  // Of the job.
  [[nodiscard]] int name_of(int rank) const noexcept { return setup_.members[index(rank)]; }
  [[nodiscard]] Gone gone(int rank) const noexcept { return bell(rank).gone.load(std::memory_order_seq_cst); }

  // One more mail that has not ended.
  void open(const Mail& mail) noexcept;
  // Ends it, once: with `error`, or with what is known of an earlier send.
  void end(const Held& mail, std::exception_ptr error = nullptr);
  [[nodiscard]] bool has_mails() const noexcept { return open_ > 0; }
  // Are there any that nobody waits for?
  [[nodiscard]] bool has_left_mails() const noexcept { return open_ > awaited_; }
  // Has any ended since the last call?
  [[nodiscard]] bool take_ended() noexcept { return std::exchange(ended_some_, false); }
  // What kept the memory of those that have ended: to be let go of without the mutex.
  [[nodiscard]] std::vector<Keepalive> take_garbage() noexcept { return std::exchange(garbage_, {}); }

  // Throws the job's failure where that is why `rank` has given up: it may have heard of it first; and kRankFailed
  // where it has left the job. Waits for the news once, not for each of its messages.
  void require_alive(int rank, Deadline deadline);
  // What ended `mail`: the job's failure, of which Control tells, in words of the mail.
  [[nodiscard]] Error ended_by(const Mail& mail, const Error& why) const;
  // Its time is up; `beside` says what else there is.
  [[nodiscard]] Error late(const Mail& mail, const std::string& beside = {}) const;
  // The same in the midst of it, so that nothing can follow: the mailbox is to fail with `broken`.
  void break_by(const Mail& mail);
  std::optional<Error> broken;

  Posted posted;
  // Numbers messages that come before their receive.
  [[nodiscard]] std::uint64_t next_arrival() noexcept { return arrivals_++; }

  // This rank is about to leave: nothing stays open for a late receiver.
  bool leaving = false;
  // Large messages that it sends and that have not ended.
  std::size_t offers = 0;
  // Whose message whoever has the mutex waits for, or is about to, with nothing else to do (Mailbox::kAnySource: of
  // all): it may copy what that peer would have to.
  static constexpr int kNobody = -2;
  int waits_for = kNobody;

  // Patience::progress of whoever drives.
  [[nodiscard]] const std::atomic<std::uint64_t>& progress() const noexcept { return progress_; }
  void note_progress() noexcept {
    progress_.store(progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // The mailbox is about to fail: who copies much with the mutex held makes an end. From any thread.
  void cut() noexcept { cut_.store(true, std::memory_order_seq_cst); }
  [[nodiscard]] bool is_cut() const noexcept { return cut_.load(std::memory_order_relaxed); }

 private:
  const MailSetup setup_;
  std::vector<bool> asked_;  // by rank: require_alive() has waited
  std::size_t open_ = 0;
  std::size_t awaited_ = 0;  // of these, those whose callers wait for them
  bool ended_some_ = false;
  std::uint64_t arrivals_ = 0;
  std::vector<Keepalive> garbage_;
  std::atomic<std::uint64_t> progress_ = 0;
  std::atomic<bool> cut_ = false;
};

}  // namespace hpcomm::shm
