// MailOut: the messages of this rank to one peer, on their way: frames and a ring (eager), or around the ring once its
// receiver has answered (rendezvous; see mail_in.h for who copies), or open: read by the receiver without an answer,
// unless it is late. The mailbox's mutex is held wherever it is used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "comm/shm/frames.h"
#include "comm/shm/mail_desk.h"
#include "comm/shm/ring.h"

namespace hpcomm::shm {

class MailIn;

// From here on a message that does not lie in the sender's arena is offered; below, both cores copy a piece each at a
// time, within their caches, or the message is open.
inline constexpr std::size_t kOfferBytes = std::size_t{2} << 20;
static_assert(kOfferBytes > kOfferHead);

// Of messages that may be open: each twice as large as the one before, the last without an end.
inline constexpr std::size_t kSizeClasses = 7;
[[nodiscard]] std::optional<std::size_t> size_class(const Frame& frame) noexcept;

// Of offers, in the same way.
inline constexpr std::size_t kLargeClasses = 6;
static_assert(kSizeClasses + kLargeClasses <= FrameEnd::kClasses);
[[nodiscard]] std::size_t large_size(std::size_t bytes) noexcept;

// Bytes that are copied at once through a ring, or shown to its reader: it copies them while the writer goes on.
inline constexpr std::size_t kPiece = std::size_t{32} << 10;

// Copies a large message with the mutex held: a piece at a time, and looks between them whether the mailbox is about to
// fail. False then.
[[nodiscard]] bool copy_once(const MailDesk& desk, char* target, const char* source, std::size_t bytes);
// So much is copied between two looks: in some milliseconds, where the memory is touched for the first time as well.
inline constexpr std::size_t kCopiedBetweenLooks = std::size_t{32} << 20;
// So long the mutex is held for a peer that is asked for its arena. It takes microseconds, unless that peer is stopped.
inline constexpr auto kHandOver = std::chrono::milliseconds(100);

class MailOut {
 public:
  MailOut(MailDesk& desk, int to, const MailIn& in);

  // Takes a send, and sends what there is room for; nothing when its receiver `is_over`.
  void send(const Held& mail, bool is_over);
  // Sends what there is room for. `alone`: a message that has just been taken, with nothing before it.
  void push(const Mail* alone = nullptr);
  // Says of the peer's message `about`: with what was expected, or a place for it.
  void answer(FrameKind kind, const Frame& about, const BufferView* expected = nullptr);
  // The same, of an offer: where its message begins in this rank's arena, and whether this rank copies a part.
  void answer_place(const Frame& about, const Location& place, bool shared);
  // What the peer has answered to a message.
  void take_answer(const Frame& answer);

  // A message of this class came from the peer.
  void note_answered(std::size_t size) noexcept { unanswered_[size] = 0; }
  // Something has come from the receiver of an open message: it was busy with that, and looks at the message next,
  // perhaps. Otherwise two that send to each other would close each other's messages in turn.
  void await_reader();
  // When the message that is open has been so for long enough: whoever makes everything progress looks then.
  [[nodiscard]] Deadline next_close() const;
  // This rank leaves: what is open goes through the ring. False while it is being read.
  [[nodiscard]] bool close_open();

  // Are there large messages of this class that the peer may read?
  [[nodiscard]] bool sends_large(std::size_t size) const noexcept;
  // Does the peer want messages of this class to be read where they lie?
  [[nodiscard]] bool wants_read(std::size_t size) const noexcept { return frames_.wants_read(size); }
  // Has it ever said?
  [[nodiscard]] bool has_said(std::size_t size) const noexcept { return frames_.has_said(size); }

  [[nodiscard]] bool is_empty() const noexcept { return outgoing_.empty(); }
  [[nodiscard]] std::uint64_t numbers() const noexcept { return numbers_; }
  // Is there an answer that has found no room yet? It belongs to no mail.
  [[nodiscard]] bool owes_answers() const noexcept;
  // Does the end of a message depend on an answer?
  [[nodiscard]] bool awaits_answers() const noexcept { return !references_.empty() || !offers_.empty(); }
  // Whether memory of this rank is what the peer reads for a message that is under way.
  [[nodiscard]] bool shows_memory() const noexcept;
  // Ends what is late; where the peer has part of it, the mailbox is broken.
  void expire(Deadline now);
  // Moves what nothing will end to `gone`. Memory that the peer knows is kept for ever: it may still be reading there.
  void forget(std::vector<Held>& gone);

 private:
  struct Outgoing {
    Frame frame;
    Held mail;  // null for answers
    bool begun = false;
    bool open = false;      // the receiver may be reading it
    bool extended = false;  // it was sending when the first patience ended
  };
  // What this rank has to do yet for the rest of an offer.
  enum class Rest : std::uint8_t {
    kUnanswered,  // its receiver has not said where it wants it
    kWord,        // it is written: a frame is to say so
    kRing,        // it goes through the ring
    kNothing,     // all is done, or the receiver does it
  };
  // A large message: it has ended when its head is in the ring and the rest where the receiver wanted it.
  struct Offer {
    Held mail;
    bool attached = false;  // the receiver may read the mail's memory at any time
    bool head_sent = false;
    bool being_read = false;  // by its receiver, which copies a part or all
    Rest rest = Rest::kUnanswered;
  };
  using Offers = std::map<std::uint64_t, Offer>;

  [[nodiscard]] FrameKind kind_of(const BufferView& buffer, Location* location) const;
  [[nodiscard]] bool is_read_by_peer() const { return desk_.neighbourhood().is_read_by(desk_.name_of(to_)); }
  [[nodiscard]] bool may_be_open(const Outgoing& message, std::size_t size);
  [[nodiscard]] std::uint32_t stays_open() const;
  [[nodiscard]] bool closes(Fate fate);
  void show_open(Outgoing& message);
  // Writes what there is room for, and says whether that is all of it.
  [[nodiscard]] bool write(Outgoing& message, bool* wrote);
  void finish(const Outgoing& message);
  void take_refusal(const Frame& frame);
  void deposit(std::uint64_t number, const Frame& place);
  // Copies the part of a message that its receiver leaves to this rank: so many chunks. Nothing when the mailbox is
  // about to fail.
  [[nodiscard]] std::optional<std::size_t> deposit_part(const Mail& mail, char* target);
  void send_rest(std::uint64_t number);
  void settle(std::uint64_t number);

  static constexpr std::size_t kLeastPenalty = 1;

  MailDesk& desk_;
  const int to_;
  const MailIn& in_;
  FrameWriter frames_;
  RingWriter ring_;
  std::deque<Outgoing> outgoing_;
  std::map<std::uint64_t, Held> references_;  // sent, not acknowledged
  Offers offers_;                             // sent, at least in part
  std::uint64_t numbers_ = 0;
  std::array<std::size_t, kSizeClasses> unanswered_{};  // messages to the peer since the last one from it
  std::size_t keeps_closed_ = 0;                        // so many messages: the receiver was late for an open one
  std::size_t penalty_ = kLeastPenalty;
  // By tag, in order, of sends that had ended: the next one of the tag goes out, and ends with the first of them.
  std::multimap<std::uint64_t, Error> refusals_;
};

}  // namespace hpcomm::shm
