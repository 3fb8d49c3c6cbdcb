// Agreement: what HPCOMM_CHECK=1 adds to transports that do not compare what ranks issue. They tell each other through
// Control, in words, and look at the others' before any data moves: equal words, equal operations.
//
// A collective is compared between all ranks, each of which sees the words of all: they come to the same result, and
// where it is bad none of them goes on. Of a message both ends see both words, so it fits on both or on neither.
// Control's sends never block, and its messages of one pair and channel keep their order: the nth words of a kind are
// those of the nth operation of it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/issued.h"
#include "stream/event.h"

namespace hpcomm {

class Communicator;

class Agreement {
 public:
  // `communicator` owns it.
  explicit Agreement(Communicator& communicator);

  using Results = std::vector<std::optional<Error>>;
  // Tells the other ranks of all `issued`, then waits for what they tell. Nothing for what fits, kSchemaMismatch for
  // what does not; the communicator can be used afterwards. `fits` is called with the place in `issued` as soon as that
  // is known to fit: of messages that go together none waits for another, as what one brings may be what the other end
  // of another waits for. `poll` is called about fifty times a second meanwhile. What it throws ends the wait, as does
  // the communicator's abort(). Throws that, kTimedOut with the ranks that did not come, or the job's failure, and has
  // aborted the communicator then: what the others have done is unknown. One thread at a time.
  [[nodiscard]] Results meet(const std::vector<Issued>& issued, Deadline deadline, void (*poll)() = nullptr,
                             const std::function<void(std::size_t)>& fits = {}) const;

 private:
  // Words that one of `issued` waits for.
  struct Awaited {
    std::size_t place;
    int member;
    std::uint64_t channel;
  };
  [[nodiscard]] Results exchange(const std::vector<Issued>& issued, Deadline deadline,
                                 const std::function<void()>& look, const std::function<void(std::size_t)>& fits) const;
  void tell(const Issued& issued) const;
  [[nodiscard]] std::vector<Awaited> awaited_by(const Issued& issued, std::size_t place) const;
  [[nodiscard]] std::optional<std::string> hear(const Awaited& awaited, const Issued& mine, Deadline until,
                                                const std::function<void()>& look) const;
  // `told` are the words of the others by their place in the group.
  [[nodiscard]] std::optional<Error> compare(const Issued& mine, const std::vector<std::string>& told) const;
  [[nodiscard]] std::optional<Error> compare_all(const Issued& mine, const std::vector<std::string>& told) const;
  [[nodiscard]] std::optional<Error> compare_ends(const Issued& mine, const std::string& theirs) const;
  [[noreturn]] void miss(const Issued& mine, const std::vector<int>& members) const;
  // What a rank that did not come has issued in place of that, as far as this rank was told.
  [[nodiscard]] std::string instead(int member, const Issued& mine) const;
  [[nodiscard]] int job_rank(int member) const;

  Communicator& communicator_;
  const std::uint64_t collectives_;
  const std::uint64_t differences_;  // that one was found
  const std::uint64_t senders_;      // what senders tell their receivers
  const std::uint64_t receivers_;    // what receivers tell their senders
};

}  // namespace hpcomm
