// The Mailbox of ranks that share memory: a ring per ordered pair, matching as MPI does it.
//
// Whoever waits makes everything progress. Operations that nobody waits for are driven by a thread. A timer wakes it
// when something has been pending for a while, and the less often the less it finds: each time costs the rank on its
// core some microseconds, and what that core's caches hold. A caller who is going to wait (OpOptions::awaited) does not
// set it.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/thread.h"
#include "comm/mailbox.h"
#include "comm/shm/choice.h"
#include "comm/shm/frames.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/ring.h"

namespace hpcomm::shm {

class ShmMailbox;

// One send or receive. Guarded by the mailbox's mutex but for `done_`.
class Mail final : public MailWork, public std::enable_shared_from_this<Mail> {
 public:
  Mail(std::shared_ptr<ShmMailbox> owner, ErrorContext what, const BufferView& view, int peer, std::uint64_t tag,
       Keepalive keepalive, Deadline deadline);

  [[nodiscard]] const ErrorContext& what() const noexcept override { return what_; }
  [[nodiscard]] bool done() const override { return done_.load(std::memory_order_acquire); }
  [[nodiscard]] bool wait_until(Deadline deadline) const override;
  [[nodiscard]] Event event() const override;
  [[nodiscard]] int source() const noexcept override { return peer_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return view_.bytes; }

 private:
  friend class ShmMailbox;

  std::shared_ptr<ShmMailbox> owner_;
  ErrorContext what_;
  BufferView view_;
  int peer_;  // of an open receive kAnySource, until it is matched
  std::uint64_t tag_;
  Keepalive keepalive_;
  Deadline deadline_;
  std::uint64_t number_ = 0;  // of a message, once it is under way
  std::size_t moved_ = 0;     // bytes
  bool matched_ = false;      // of a receive: a message is being read into it
  bool must_precede_ = false;
  bool awaited_ = false;
  bool at_most_ = false;  // of a receive: until it is matched, `view_` says what there is room for
  std::exception_ptr error_;
  std::exception_ptr late_;  // of an earlier send, which had ended: what this one ends with if it ends well
  std::atomic<bool> done_ = false;
};

// For messages: "3 float32 elements".
[[nodiscard]] std::string elements_of(std::uint64_t count, std::uint8_t dtype);

class ShmMailbox final : public Mailbox, public std::enable_shared_from_this<ShmMailbox> {
 public:
  struct Setup {
    std::shared_ptr<Region> region;
    std::shared_ptr<Neighbourhood> neighbourhood;
    std::size_t rank = 0;
    std::vector<int> members;  // ranks of the job
    std::string lane;
    std::chrono::milliseconds timeout{0};
    // Called when a time-out cut a message in two, so that nothing can follow in order: from any thread, until stop().
    std::function<void(const Error&)> broken;
  };
  explicit ShmMailbox(Setup setup);
  ~ShmMailbox() override;

  MailPtr send(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options) override;
  MailPtr recv(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options) override;
  MailPtr recv_at_most(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options) override;

  // Makes everything progress until `mail` has ended; false when the deadline came first. Does not throw its error.
  [[nodiscard]] bool drive(const Mail& mail, Deadline deadline, void (*poll)() = nullptr);
  // Throws what went wrong with a mail that has ended.
  static void check(const Mail& mail);
  // Ends everything that is under way, and refuses more. From any thread.
  void fail(const Error& why) noexcept;
  // `rank` sends and takes nothing more: what only it could end fails with kRankFailed. From any thread.
  void depart(std::size_t rank);
  // What was sent and nobody reads yet goes through the ring, as far as there is room: this rank is about to leave.
  void close_open();
  // Whether memory of this rank is what a peer reads, or writes, for a message that is under way.
  [[nodiscard]] bool shows_memory();
  // fail(), and the thread ends. No call may be in progress.
  void stop() noexcept;

 private:
  using Held = std::shared_ptr<Mail>;
  // The mutex, and then what ended while it was held: a keepalive may be a tensor, whose end may take other locks.
  class Turn {
   public:
    explicit Turn(ShmMailbox& mailbox) : mailbox_(mailbox), lock_(mailbox.mutex_) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    ShmMailbox& mailbox_;
    std::unique_lock<std::mutex> lock_;
  };
  struct Outgoing {
    Frame frame;
    Held mail;             // null for answers
    bool at_once = false;  // it is being sent, and nothing was before it
    bool begun = false;
    bool open = false;      // the receiver may be reading it
    bool extended = false;  // it was sending when the first patience ended
  };
  // A message that came before its receive.
  struct Early {
    Frame frame;
    std::vector<char> bytes;
    std::uint64_t arrival = 0;
    bool complete = false;
    Held taker;  // a receive that waits for the rest of it
  };
  // What the bytes behind a frame are being read into.
  struct Incoming {
    Frame frame;
    Held mail;
    std::shared_ptr<Early> early;
    std::size_t moved = 0;    // of these bytes
    bool unreadable = false;  // an open message that comes through the ring after all
  };
  // A large message of this rank: it has ended when its head is in the ring and the rest where the receiver wanted it.
  struct Offer {
    Held mail;
    bool attached = false;  // the receiver may read the mail's memory at any time
    bool head_sent = false;
    bool rest_sent = false;
  };
  // A large message to this rank, whose rest is on its way.
  struct Promise {
    Held mail;
    bool exposed = false;     // the sender may write to the mail's memory at any time
    std::uint32_t shown = 0;  // of its offer
  };
  // Each twice as large as the one before, the last without an end.
  static constexpr std::size_t kSizeClasses = 7;   // from kLeastOpen on
  static constexpr std::size_t kLargeClasses = 6;  // from kOfferBytes on
  static constexpr std::size_t kLeastPenalty = 1;
  struct Peer {
    std::optional<FrameWriter> shown;
    std::optional<RingWriter> writer;
    std::optional<FrameReader> frames;
    std::optional<RingReader> reader;
    std::deque<Outgoing> outgoing;
    std::map<std::uint64_t, Held> references;   // sent, not acknowledged
    std::map<std::uint64_t, Offer> offers;      // sent, at least in part
    std::map<std::uint64_t, Promise> promises;  // received, but for the rest
    std::optional<Incoming> incoming;
    std::list<std::shared_ptr<Early>> early;
    std::uint64_t numbers = 0;
    // By size: through the ring, or read where they are.
    std::array<Choice, kSizeClasses> choices;
    std::array<Choice, kLargeClasses> large_choices;
    std::array<std::size_t, kSizeClasses> unanswered{};  // messages to it since the last one from it
    std::size_t keeps_closed = 0;                        // so many messages, for the receiver was late for an open one
    std::size_t penalty = kLeastPenalty;
    bool departed = false;
    // Since when it is known to have gone from this communicator; and that nothing has been heard of the job since.
    std::optional<Deadline> gone_since;
    bool gone = false;
    [[nodiscard]] bool is_over() const noexcept { return departed || gone; }
    // By tag, in order, of sends that had ended: the next one of the tag goes out, and ends with the first of them.
    std::multimap<std::uint64_t, Error> refusals;
  };

  [[nodiscard]] Held make(const char* operation, const BufferView& view, int peer, std::uint64_t tag,
                          const OpOptions& options, std::uint64_t sequence);
  [[nodiscard]] Held post(const BufferView& buffer, int peer, std::uint64_t tag, const OpOptions& options,
                          bool at_most);
  void require_parent(const char* operation) const;
  void require_peer(const char* operation, int peer) const;
  // Throws why this mailbox ended, if it has, as the end of `what`.
  void require_whole(const ErrorContext& what) const;
  [[nodiscard]] ErrorContext context(const char* operation, int peer, std::uint64_t sequence) const;
  [[nodiscard]] Error failed(ErrorContext what, const Error& why) const;
  [[nodiscard]] Peer& peer_at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  // All with the mutex held.
  void note_progress() { progress_.store(progress_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  void progress();
  void push(int to);
  void pull(int from);
  [[nodiscard]] bool pull_frame(int from);
  [[nodiscard]] bool pull_bytes(int from);
  // The message of `frame` has come, read where it was or another way: what its time says of that (open.cpp).
  void learn(int from, const Frame& frame, bool read);
  // Of open messages (open.cpp).
  [[nodiscard]] static std::optional<std::size_t> size_class(const Frame& frame);
  [[nodiscard]] bool may_be_open(int to, const Outgoing& message, std::size_t size_class);
  [[nodiscard]] std::uint32_t stays_open(const Peer& peer) const;
  [[nodiscard]] Deadline next_close() const;
  // Whether the bytes of the first outgoing message, an open one that has not been read, go through the ring.
  [[nodiscard]] bool closes(Peer& peer, Fate fate) const;
  static void await_reader(Peer& peer);
  [[nodiscard]] bool read_open(int from, char* target);
  void answer(int to, FrameKind kind, const Frame& about, const BufferView* expected);
  void accept_refusal(int from, const Frame& frame);
  [[nodiscard]] Held match(int from, const Frame& frame);
  [[nodiscard]] bool fits(Mail& mail, const Frame& frame, int from);
  // Of large messages (rendezvous.cpp).
  [[nodiscard]] FrameKind kind_of(const BufferView& buffer, Location* location) const;
  void take_reference(Mail& mail, const Frame& frame, int from);
  void take_offer(const Held& mail, const Frame& frame, int from);
  [[nodiscard]] bool has_idle_core() const;
  // Of one that may be read, or its rest.
  [[nodiscard]] static std::optional<std::size_t> large_class(const Frame& frame);
  [[nodiscard]] bool read_offer(Mail& mail, const Frame& frame, int from);
  // Ends `mail`, here with what `copy(sender)` brings and there with `thanks`; or with the error, on both sides. False
  // where copy() says that it cannot.
  template <typename Copy>
  [[nodiscard]] bool take_whole(Mail& mail, const Frame& frame, int from, FrameKind thanks, const Copy& copy);
  [[nodiscard]] bool accept_rendezvous(int from, const Frame& frame);
  void deposit(int to, std::uint64_t number, const Frame& place);
  void send_rest(int to, std::uint64_t number);
  void settle(int to, std::uint64_t number);
  void forget(Peer& peer, std::vector<Held>& gone);
  [[nodiscard]] bool take_early(const Held& mail);
  void deliver(Early& early, const Held& mail, int from);
  void end(Mail& mail, std::exception_ptr error = nullptr);
  void expire();
  // Ends what a rank that has left cannot end any more.
  void bury();
  // Is `rank`, or any for kAnySource, known to have gone by what it wrote on its bell? Then bury().
  void miss(int rank);
  [[nodiscard]] bool is_wanted(int from) const;
  [[nodiscard]] bool pending() const;

  // When the thread looks whether operations have been left to it: not at all, late, for the sake of callers who meant
  // to wait and did not, or soon.
  enum class Look : std::uint8_t { kNever, kLate, kSoon };
  [[nodiscard]] Look wanted_look() const;
  static constexpr std::chrono::nanoseconds kSoonest = std::chrono::microseconds(500);
  static constexpr std::chrono::nanoseconds kSlowest = std::chrono::milliseconds(2);
  static constexpr std::chrono::nanoseconds kLate = std::chrono::milliseconds(50);
  void start();
  void arm();
  void pump();
  void report_broken();

  const Setup setup_;
  const std::uint32_t generation_;
  const WaitPolicy policy_;
  Bell& bell_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::list<Held> posted_;  // receives that no message has matched, oldest first
  std::uint64_t arrivals_ = 0;
  std::uint64_t receives_ = 0;
  std::size_t pending_ = 0;                  // mails that have not ended
  std::size_t awaited_ = 0;                  // of these, those whose callers wait for them
  std::atomic<std::uint64_t> progress_ = 0;  // Patience::progress of who drives
  bool ended_some_ = false;
  bool leaving_ = false;
  std::vector<Keepalive> garbage_;
  std::optional<Error> failed_;
  std::optional<Error> broken_;
  std::atomic<int> drivers_ = 0;
  std::atomic<bool> left_to_drivers_ = false;  // by the thread, when its timer ended

  std::mutex owner_mutex_;  // held while the owner is told, taken before mutex_
  std::function<void(const Error&)> owner_failed_;

  std::atomic<Look> armed_ = Look::kNever;
  std::chrono::nanoseconds soon_ = kSoonest;  // up to kSlowest, while the thread finds nothing to do
  std::atomic<bool> stopping_ = false;
  control::Fd timer_;
  Thread thread_;  // started when it is first needed
};

}  // namespace hpcomm::shm
