// MailIn: the messages of one peer to this rank: read into the receives that they match, or set aside until those come.
//
// Through a ring a message is copied twice, and each cache line travels from core to core; past a few megabytes that,
// and not the memory, is what limits. So a large one is copied once, around the ring:
//
//   in the sender's arena     its frame says where; the receiver copies it out                    (kReference, kAck)
//   anywhere else             its frame asks where to; the sender writes into the receiver's arena, and a receiver that
//                             waits reads the other part out of the sender's process (kOffer, kPlace, kDeposited,
//                             kTaken; share.h); when the receiver's buffer is not there, it comes through the ring
//                             (kNoPlace, kRest), or, where that is allowed and quicker, the receiver has the kernel
//                             read it out of the sender's process (kTaken)
//
// which are the rendezvous protocols of MPI implementations (read, write, and cross memory attach) on shared memory.
// Where the rest may have to come through the ring, the first bytes of an offer travel with it, so that nobody is idle
// while the answer is on its way.
//
// The mailbox's mutex is held wherever it is used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "comm/shm/choice.h"
#include "comm/shm/frames.h"
#include "comm/shm/mail_desk.h"
#include "comm/shm/mail_out.h"
#include "comm/shm/ring.h"
#include "comm/shm/tag_queue.h"

namespace hpcomm::shm {

class MailIn {
 public:
  MailIn(MailDesk& desk, int from, MailOut& out);

  // Reads what has come, as far as somebody wants it.
  void pull();

  // When the oldest message that came before its receive, has `tag` and is not taken came: MailDesk::next_arrival().
  [[nodiscard]] std::optional<std::uint64_t> oldest(std::uint64_t tag) const;
  // Gives it to `mail`, at once or when it is whole.
  void take_oldest(const Held& mail);
  // Of a program's own tags, the messages that came and that no receive has asked for: as an error tells of them.
  void name_unasked(std::vector<std::string>& names) const;

  // Is a message half read?
  [[nodiscard]] bool is_receiving() const noexcept { return incoming_.has_value(); }
  // Does it belong to no receive?
  [[nodiscard]] bool owes_reading() const noexcept { return incoming_ && !incoming_->mail; }
  // Are messages of this class better read from where they lie than through the ring?
  [[nodiscard]] bool prefers_open(std::size_t size) const noexcept { return choices_[size].second(); }
  // When to look again for what this rank copies of a message that both copy.
  [[nodiscard]] Deadline next_part() const noexcept;
  // Whether memory of this rank is what the peer writes for a message that is under way.
  [[nodiscard]] bool shows_memory() const noexcept;
  // What is late here is so in the midst of it, unless it waits for the peer's memory.
  void expire(Deadline now);
  // The peer sends nothing more: moves what nothing will end to `gone`. What came whole stays.
  void end_half(std::vector<Held>& gone);
  // The same, and nothing stays. Memory that the peer knows is kept for ever: it may still be writing there.
  void forget(std::vector<Held>& gone);

 private:
  // A message that came before its receive: an unexpected one, in MPI's words.
  struct Early {
    Frame frame;
    std::vector<char> bytes;
    std::uint64_t arrival = 0;
    bool complete = false;  // at most one is not: what is incoming
    Held taker;             // a receive that waits for the rest of it

    [[nodiscard]] static bool is_free(const std::shared_ptr<Early>& early) noexcept { return early->taker == nullptr; }
  };
  // Large messages of a size, which may be read, or come through the ring.
  struct LargeClass {
    std::size_t size;  // large_size()
    bool busy;         // while this rank sends such a message itself
  };
  // What the bytes behind a frame are being read into.
  struct Incoming {
    Frame frame;
    Held mail;
    std::shared_ptr<Early> early;
    std::optional<LargeClass> learns = std::nullopt;  // of a rest: about these, how long it took
    std::size_t moved = 0;                            // of these bytes
    bool unreadable = false;                          // an open message that comes through the ring after all
  };
  // A large message whose rest is on its way.
  struct Promise {
    Held mail;
    bool exposed = false;      // the sender may write to the mail's memory at any time
    bool comes_whole = false;  // this rank could not read its part: what the sender has written of it does not count
    std::uint32_t shown = 0;   // of its offer
    std::optional<LargeClass> learns;
  };
  // A message in the peer's arena whose memory the peer has not handed over yet: it is stopped, perhaps.
  struct Unmapped {
    Frame frame;
    Held mail;
  };
  using LargeChoices = std::array<Choice, kLargeClasses>;

  [[nodiscard]] bool is_wanted() const;
  [[nodiscard]] bool pull_frame();
  void take_matched(const Held& mail, const Frame& frame);
  void set_aside(const Frame& frame);
  [[nodiscard]] bool pull_bytes();
  void take_rest(const Frame& frame);
  [[nodiscard]] bool fits(const Held& mail, const Frame& frame);
  void deliver(const std::shared_ptr<Early>& early, const Held& mail);
  void drop(const std::shared_ptr<Early>& early);
  void learn(const Incoming& message);
  void learn(const LargeClass& about, std::uint32_t shown, bool read);
  [[nodiscard]] bool read_open(char* target);
  void take_reference(const Held& mail, const Frame& frame);
  // False where its memory is not here by `until`.
  [[nodiscard]] bool copy_reference(const Held& mail, const Frame& frame, Deadline until);
  void copy_unmapped();
  void take_offer(const Held& mail, const Frame& frame);
  [[nodiscard]] static LargeChoices make_large_choices() noexcept;
  [[nodiscard]] Choice& choice_of(const LargeClass& of) noexcept;
  [[nodiscard]] bool decides(const LargeClass& about) const noexcept;
  // Once for each offer that the kernel might read.
  [[nodiscard]] bool may_read() noexcept;
  [[nodiscard]] bool read_offer(const Held& mail, const Frame& frame);
  // A message that its sender writes, and this rank reads from its end until they meet: one message at a time, of which
  // a part, and only while its caller waits. The sender does the rest; but one that cannot leaves it to this rank,
  // which reads it a little later.
  [[nodiscard]] bool is_waited_for() const noexcept;
  [[nodiscard]] bool reads_part() const noexcept { return shared_ && Clock::now() >= next_part(); }
  [[nodiscard]] bool may_share(const Frame& frame);
  void answer_places();
  void read_part();
  void end_share();
  void require_not_given_up(const Mail& mail);
  // What has become of a copy of a large message.
  enum class Copied : std::uint8_t { kAll, kCannot, kCut };
  template <typename Copy>
  [[nodiscard]] bool take_whole(const Held& mail, const Frame& frame, FrameKind thanks, const Copy& copy);

  MailDesk& desk_;
  const int from_;
  MailOut& out_;
  FrameReader frames_;
  RingReader ring_;
  std::optional<Incoming> incoming_;
  TagQueue<std::shared_ptr<Early>> early_;
  std::map<std::uint64_t, Promise> promises_;
  std::list<Unmapped> unmapped_;
  struct Placed {
    Frame frame;
    Location place;
  };
  std::deque<Placed> placed_;    // offers for which there is a place that is not told yet
  std::optional<Frame> shared_;  // of these promises the one that both copy
  Deadline shared_since_;
  std::vector<Held> cut_;  // matched, and copied in part: the mailbox is about to fail
  // By size: through the ring, or read where they are.
  std::array<Choice, kSizeClasses> choices_;
  LargeChoices large_choices_ = make_large_choices();
  LargeChoices busy_choices_ = make_large_choices();
  std::size_t refused_ = 0;  // so many offers are not read: the kernel refused one
};

}  // namespace hpcomm::shm
