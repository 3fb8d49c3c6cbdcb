// Bell: how a rank sleeps until a peer has news for it. Lies in shared memory, one per rank of a group.
//
// A wait goes through three phases. Spinning with `pause` sees a peer on another core within a tenth of a microsecond,
// and is only for hosts with a core for every rank. Yielding lets ranks that share a core take turns without the cost
// of sleeping. After a fraction of a millisecond the rank sleeps on a futex and uses no CPU.
//
// A yield gives the core away only within a group of the scheduler. Linux makes a group of every session, and torchrun
// a session of every rank: who waits for a rank on the same core would burn the time that this one needs. So a rank
// that shares its core with ranks of other groups sleeps as soon as a few of its yields came back at once. Whose core
// nobody else wants does not: to wake from a sleep takes longer, on a virtual machine whose core was halted as long as
// a whole collective of a few bytes. Where all are of one group, a yield that came back at once found nobody.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "stream/event.h"

namespace hpcomm::shm {

// Why a rank takes part in nothing more: Bell::gone.
enum class Gone : std::uint32_t {
  kNo,
  kGivenUp,  // an operation of it failed: what it showed of its memory does not count any more
  kClosed,   // in order: what it published and sent counts
};

[[nodiscard]] const char* to_string(Gone why) noexcept;  // "has closed this communicator"
// So long what is known of the job comes first: a rank that ends closes its communicators on the way.
constexpr auto kNewsOfTheJob = std::chrono::milliseconds(200);

struct alignas(64) Bell {
  std::atomic<std::uint32_t> rings{0};     // the futex word
  std::atomic<std::uint32_t> sleepers{0};  // threads that may be asleep on it
  // Written once by its rank, which then rings all others.
  std::atomic<Gone> gone{Gone::kNo};
  // How often its rank has come to a meeting of all; see Steps::meet().
  std::atomic<std::uint32_t> meetings{0};
  // One more than the number of the core where its rank was last, of those of this host; 0 before it was anywhere.
  std::atomic<std::uint32_t> core{0};
};

// Sleeps until the bell rings or `until`. `rings` is what was read before the last look at the condition.
void sleep_on(Bell& bell, std::uint32_t rings, Deadline until) noexcept;
void ring_always(Bell& bell) noexcept;

// Called after what the owner waits for was stored with memory_order_seq_cst: either this sees the sleeper, or the
// sleeper, who counts itself before it looks again, sees the news.
inline void ring(Bell& bell) noexcept {
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) {
    ring_always(bell);
  }
}

// A thread that may be asleep, while it lives.
class Sleeper {
 public:
  explicit Sleeper(Bell& bell) noexcept : bell_(bell) { bell_.sleepers.fetch_add(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }

 private:
  Bell& bell_;
};

// Writes down where this thread is. Called with each operation: a migration is rare, and nothing is written without
// one.
void note_core(Bell& own) noexcept;
// Did the kernel give this thread's core to anybody else, in this thread's stead, within the last millisecond? It
// counts that (ru_nivcsw), yields that reached somebody among them. What it counted before a wait that `began` counts
// only if this thread had asked within a millisecond of that: else it may be from any time.
[[nodiscard]] bool others_ran_here(Deadline began, Deadline now) noexcept;

// How long each phase lasts.
struct WaitPolicy {
  int spins = 0;
  std::chrono::microseconds yields{150};
  // So many vain yields end the second phase where somebody wants the core. Where every rank has one, most are vain.
  int vain_yields = std::numeric_limits<int>::max();
  // A yield that comes back within this was vain: it takes half of it, and two switches to others and back more.
  std::chrono::nanoseconds vain{1000};
  // Somebody is one of these ranks that was last on this core, and whoever else is seen at it. Without any, anybody.
  const Bell* bells = nullptr;
  std::size_t ranks = 0;
  bool (*others)(Deadline began, Deadline now) noexcept = &others_ran_here;

  [[nodiscard]] bool may_sleep_early() const noexcept { return vain_yields != std::numeric_limits<int>::max(); }
};
// Where `ranks` of all communicators share `cores`, those of this host that one of them may use. `yields_reach`: they
// are all of one scheduler_group().
[[nodiscard]] WaitPolicy policy_for(std::size_t ranks, std::size_t cores, bool yields_reach) noexcept;

// Does anybody want the core of this thread, whose bell is `own`, in a wait that `began`?
[[nodiscard]] bool is_wanted(const WaitPolicy& policy, Bell& own, Deadline began, Deadline now) noexcept;

// What the scheduler shares cores by before it looks at the processes in it: equal texts, one group. Different ones may
// be one as well (a cgroup without a CPU controller).
[[nodiscard]] std::string scheduler_group();

// The limits of one wait.
struct Patience {
  Deadline deadline;
  // Set by another thread (an abort), which then rings the bell.
  const std::atomic<bool>* interrupted = nullptr;
  // Likewise: the rank that is waited for has left, and what it published before is all that will come.
  const std::atomic<bool>* departed = nullptr;
  // Called at most twenty times a second; may throw.
  void (*poll)() = nullptr;
  // As `departed`, of this communicator only: Bell::gone of that rank.
  const std::atomic<Gone>* gone = nullptr;
  // Looks again then at the latest; ready() may have set it.
  const Deadline* next_look = nullptr;
  // Counts what ready() gets done while it is false: more is on its way, so yields begin anew. Without that, whoever
  // sleeps once in a message sleeps before each piece of it, and its sender wakes it for each.
  const std::atomic<std::uint64_t>* progress = nullptr;
};

enum class Waited : std::uint8_t { kReady, kInterrupted, kTimedOut };

// Until `ready()` is true. What it reads of other ranks it must read with memory_order_seq_cst.
template <typename Ready>
[[nodiscard]] Waited wait_on(Bell& bell, const WaitPolicy& policy, const Patience& patience, const Ready& ready) {
  for (int i = 0; i < policy.spins; ++i) {
    if (ready()) {
      return Waited::kReady;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto is_set = [](const std::atomic<bool>* flag) {
    return flag != nullptr && flag->load(std::memory_order_seq_cst);
  };
  const auto interrupted = [&] {
    return is_set(patience.interrupted) || is_set(patience.departed) ||
           (patience.gone != nullptr && patience.gone->load(std::memory_order_seq_cst) != Gone::kNo);
  };
  if (policy.may_sleep_early() && policy.ranks > 0) {
    note_core(bell);
  }
  std::uint64_t done = 0;
  const auto has_progressed = [&] {
    return patience.progress != nullptr &&
           std::exchange(done, patience.progress->load(std::memory_order_relaxed)) != done;
  };
  (void)has_progressed();
  const Deadline began = Clock::now();
  Deadline now = began;
  Deadline yields_end = now + policy.yields;
  constexpr auto kSlice = std::chrono::milliseconds(50);
  Deadline next_poll = yields_end + kSlice;
  int vain = 0;
  for (;;) {
    while (now < std::min(yields_end, patience.deadline) && vain < policy.vain_yields && now < next_poll) {
      if (ready()) {
        return Waited::kReady;
      }
      if (interrupted()) {
        return ready() ? Waited::kReady : Waited::kInterrupted;
      }
      const Deadline before = Clock::now();
      ::sched_yield();
      now = Clock::now();
      vain += now - before < policy.vain ? 1 : 0;
      if (vain == policy.vain_yields && !is_wanted(policy, bell, began, now)) {
        vain = 0;
      }
      yields_end = has_progressed() ? now + policy.yields : yields_end;
    }
    bool now_ready = false;
    bool stop = false;
    {
      const Sleeper sleeper(bell);
      const std::uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
      now_ready = ready();
      stop = interrupted();
      if (!now_ready && !stop) {
        const Deadline next_look = patience.next_look != nullptr ? *patience.next_look : patience.deadline;
        sleep_on(bell, rings, std::min({patience.deadline, next_look, next_poll}));
      }
    }
    if (now_ready || ready()) {
      return Waited::kReady;
    }
    if (stop || interrupted()) {
      return Waited::kInterrupted;
    }
    now = Clock::now();
    if (has_progressed()) {
      yields_end = now + policy.yields;
      // Whoever was wanted for a moment would otherwise sleep before each piece that is still to come.
      if (policy.may_sleep_early() && !is_wanted(policy, bell, began, now)) {
        vain = 0;
      }
    }
    if (now >= patience.deadline) {
      return Waited::kTimedOut;
    }
    if (now >= next_poll) {
      next_poll = now + kSlice;
      if (patience.poll != nullptr) {
        patience.poll();
      }
    }
  }
}

}  // namespace hpcomm::shm
