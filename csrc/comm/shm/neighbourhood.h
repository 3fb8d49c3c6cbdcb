// Neighbourhood: the ranks of a job that share memory with this one. Found out by trying.
//
// Host names, environment variables and addresses say little about who shares memory (containers do not, although one
// kernel runs them all), so every rank offers a page with random contents, and every other tries to read it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/shm/bell.h"
#include "comm/shm/courier.h"
#include "comm/shm/segment.h"
#include "control/control.h"

namespace hpcomm::shm {

// Whether this rank reads messages out of the memory of others, and lets them read its own.
enum class Attach : std::uint8_t {
  kNever,
  kMeasured,  // those that come quicker that way
  kAlways,    // where a message may go that way it does, and waits for its receiver for a second: for tests
};

class Neighbourhood {
 public:
  // Collective over the job. `host` tells ranks apart that could share memory and shall not (a test, a NUMA node):
  // only ranks with equal values do. Never throws because memory cannot be shared: the neighbourhood is then smaller.
  // `members` are the job's ranks, in order, where it has not all that `control` could have; empty for all of these.
  // `attach`: whether this rank uses read(), and others may use it on this one.
  // Waits as Control::receive() does. Throws kTimedOut or the job's failure.
  [[nodiscard]] static std::shared_ptr<Neighbourhood> discover(std::shared_ptr<Control> control, Deadline deadline,
                                                               const std::string& host = {},
                                                               const std::vector<int>& members = {},
                                                               Attach attach = Attach::kMeasured,
                                                               void (*poll)() = nullptr);

  // The job's ranks in it, this one among them, in order. All of them find the same.
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }
  [[nodiscard]] bool contains(const std::vector<int>& ranks) const;
  // How they wait for each other, in whichever group: where they outnumber the cores that they may use, one that waits
  // may hold up the one it waits for.
  [[nodiscard]] WaitPolicy wait_policy() const noexcept { return policy_for(ranks_.size(), cores_, one_group_); }
  // Do they outnumber the cores that they may use?
  [[nodiscard]] bool is_crowded() const noexcept { return ranks_.size() > cores_; }
  // Is what may be read where it lies always read?
  [[nodiscard]] bool always_reads() const noexcept { return attach_ == Attach::kAlways; }
  // Why `rank` is not in it: for messages.
  [[nodiscard]] std::string why_not(int rank) const;
  // The first of `ranks` that should be in it, for it runs on this host, in this network and under the same
  // HPCOMM_HOST, and is not; -1 if there is none.
  [[nodiscard]] int missing(const std::vector<int>& ranks) const;

  // A segment of `bytes` that `members` (of the job, in group order; all in the neighbourhood) map. Made by the first
  // of them. Collective over them; `name` is unique. When it returns all of them have it, and nobody else can get it
  // any more; where one of them cannot have it, there is no memory, say, all throw kTransport with its reason. `poll`,
  // if there is one, is called twenty times a second meanwhile, and may throw.
  [[nodiscard]] std::shared_ptr<Segment> share(const std::string& name, const std::vector<int>& members,
                                               std::size_t bytes, Deadline deadline, void (*poll)() = nullptr);

  // This rank's memory that neighbours can map.
  [[nodiscard]] Arena& arena() noexcept { return *arena_; }
  // Keeps `memory` for ever: an operation ended early after it had shown where its buffer lies, and a peer that is late
  // may still read or write there. Nothing else may come to lie in that place.
  void park(Keepalive memory);
  // `bytes` at `location` of `rank`'s arena, mapped on first use, for which that rank has to hand it over: it may be
  // stopped, and go on. Throws kProtocol when they do not lie in it, kTimedOut when it does not come in time, and the
  // job's failure where it could not be asked for it. An interruption throws kClosed.
  [[nodiscard]] char* map(int rank, const Location& location, std::size_t bytes, const Patience& patience);
  // The same for as long as the pointer lives, also without the neighbourhood.
  [[nodiscard]] std::shared_ptr<char> hold(int rank, const Location& location, std::size_t bytes,
                                           const Patience& patience);
  // As map(), but null where it does not come in time; the next call need not ask again.
  [[nodiscard]] char* find(int rank, const Location& location, std::size_t bytes, const Patience& patience);

  // Throws the job's failure where that is why `rank` does not answer, or has given up what it was at: Control may hear
  // of it a moment later, for which this waits.
  void require_alive(int rank, Deadline deadline) const;
  // Throws kRankFailed where it has left in order.
  void require_stays(int rank) const;

  // Does `rank` read() what this one has? Found out by trying: Yama, seccomp or a container may forbid it.
  [[nodiscard]] bool is_read_by(int rank) const;
  // Copies `bytes` at `address` in the process of `rank`, which is_read_by() this one, to `target` (cross memory
  // attach, process_vm_readv(2)). False where the kernel does not do that (any more, or with this memory), and throws
  // the job's failure or kRankFailed when that rank is gone: `target` holds anything then.
  [[nodiscard]] bool read(int rank, std::uint64_t address, char* target, std::size_t bytes, Deadline deadline);
  // How often that was, and how often it did not.
  [[nodiscard]] std::uint64_t reads() const noexcept { return reads_.load(std::memory_order_relaxed); }
  [[nodiscard]] const Control& control() const noexcept { return *control_; }
  [[nodiscard]] std::uint64_t refusals() const noexcept { return refusals_.load(std::memory_order_relaxed); }

 private:
  struct Neighbour {
    // Its process: what this rank knows it by may be the number of another one, in another namespace or later. Zero
    // where it cannot be read.
    pid_t process = 0;
    std::uint64_t mark_address = 0;  // where `mark` lies there
    KeyWord mark{};
    bool reads_us = false;
    std::string address;
    KeyWord key_word{};
    std::string obstacle;  // why it shares no memory with us; empty when it does
    bool is_near = false;  // nothing that is known of its place is an obstacle
    std::map<std::uint32_t, std::shared_ptr<Segment>> segments;
    std::map<std::uint32_t, std::shared_ptr<Errand>> errands;  // of segments that are not here yet
  };

  Neighbourhood(std::shared_ptr<Control> control, Attach attach);
  void meet(const std::string& host, const std::vector<int>& members, Deadline deadline, void (*poll)());
  [[nodiscard]] bool attaches_to(const Neighbour& neighbour) const;
  // What became of a copy out of another process.
  enum class Copied : std::uint8_t {
    kAll,
    kRefused,   // the kernel does not let us, or not for this memory
    kStranger,  // there is no such process, or it is another one by now
  };
  [[nodiscard]] static Copied copy_from(const Neighbour& neighbour, std::uint64_t address, char* target,
                                        std::size_t bytes);
  // What the leader of share() has published.
  [[nodiscard]] std::shared_ptr<Segment> adopt(const std::string& name, int leader, std::size_t bytes,
                                               const Patience& patience) const;
  // Can `rank` be read, and has it `page`? In words, empty ones if so.
  [[nodiscard]] std::string try_to_read(int rank, const KeyWord& page, const Patience& patience) const;
  // Calls take() until it is true, and `wait(until)` in between. False when the time is up. `rank` is who is waited
  // for.
  template <typename Take, typename Wait>
  [[nodiscard]] bool await(int rank, const Patience& patience, const Take& take, const Wait& wait) const;
  [[nodiscard]] control::Fd fetch(int rank, std::uint64_t name, const Patience& patience) const;
  [[nodiscard]] std::shared_ptr<Segment> segment_of(int rank, std::uint32_t index, const Patience& patience);
  [[nodiscard]] std::shared_ptr<char> look_up(int rank, const Location& location, std::size_t bytes,
                                              const Patience& patience);
  [[nodiscard]] Error late(int rank) const;

  std::shared_ptr<Control> control_;
  std::shared_ptr<Courier> courier_;  // null when this rank cannot offer anything; `obstacle_` says why
  std::string obstacle_;
  const KeyWord mark_ = random_key_word();  // by which others see that it is this process that they read
  const Attach attach_;
  std::atomic<std::uint64_t> reads_ = 0;
  std::atomic<std::uint64_t> refusals_ = 0;
  std::unique_ptr<Arena> arena_;
  std::vector<Neighbour> job_;  // by rank
  std::vector<int> ranks_;
  std::size_t cores_ = 0;     // that any of `ranks_` may use
  bool one_group_ = true;     // of the scheduler, with all of `ranks_` in it
  mutable std::mutex mutex_;  // guards the segments of `job_`
  std::mutex parked_mutex_;
  std::vector<Keepalive> parked_;
};

}  // namespace hpcomm::shm
