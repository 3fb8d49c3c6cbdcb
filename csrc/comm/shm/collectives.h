// Collectives of ranks that share memory. Each compares what all ranks issued before any of them touches its output.
//
// Three ways, by size and by where the buffers lie (docs/explanation/shared-memory.md draws them):
//   small      the contribution travels with the descriptor: one step
//   staged     through the slots, a piece per step, while the piece is in cache
//   zero-copy  all buffers lie in arenas: peers read and write them in place
// Sums are formed in rank order, so all ranks get the same bits, in every way and with every buffer.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/reduce_op.h"
#include "base/view.h"
#include "comm/shm/handover.h"
#include "comm/shm/neighbourhood.h"
#include "comm/shm/steps.h"

namespace hpcomm::shm {

// The ranks did not issue the same operation; nothing was written. By rank of the group.
struct Disagreement {
  std::vector<Descriptor> descriptors;
};

class Collectives {
 public:
  // `members` are the group's ranks in the job.
  Collectives(std::shared_ptr<Region> region, std::size_t rank, std::shared_ptr<Neighbourhood> neighbourhood,
              std::vector<int> members);

  // `descriptor` says what is issued; views have been checked against the group's size. All throw WaitEnded,
  // Disagreement, or kInvalidArgument for a reduction that no kernel has (on all ranks, nothing is written).
  void all_reduce(Descriptor descriptor, const BufferView& buffer, ReduceOp op, const Patience& patience);
  void reduce_scatter(Descriptor descriptor, const BufferView& output, const BufferView& input, ReduceOp op,
                      const Patience& patience);
  void all_gather(Descriptor descriptor, const BufferView& output, const BufferView& input, const Patience& patience);
  void broadcast(Descriptor descriptor, const BufferView& buffer, std::size_t root, const Patience& patience);
  void all_to_all(Descriptor descriptor, const BufferView& output, const BufferView& input, const Patience& patience);
  void barrier(Descriptor descriptor, const Patience& patience);

  [[nodiscard]] Steps& steps() noexcept { return steps_; }

 private:
  // What a rank shows in the first step of an operation.
  enum class Shown { kNothing, kPayload, kLocation };
  // What it may show. Of memory that it writes to before everybody has read it, copies alone.
  enum class Shows { kNothing, kCopies, kPlaces };
  // The first step: shows the descriptor with `bytes` at `data` (or where they lie), and waits for everybody's.
  Shown open(Descriptor descriptor, const void* data, std::size_t bytes, Shows shows, const Patience& patience);
  void require_agreement(const Descriptor& own) const;
  [[nodiscard]] bool all_located() const;
  // What a rank has shown the place of in this step.
  [[nodiscard]] char* map(std::size_t rank, std::size_t bytes, const Patience& patience);
  // After all_located(): everybody's `bytes`, mapped here.
  [[nodiscard]] std::vector<char*> map_all(const void* own, std::size_t bytes, const Patience& patience);
  // The end of a zero-copy operation: nobody touches this rank's buffer any more.
  void finish(const Patience& patience);
  // Throws kPeerError when `rank` has given up: its memory may serve another purpose by now.
  void require_present(std::size_t rank) const;
  [[nodiscard]] const char* shown(std::size_t rank, std::size_t bytes) const noexcept;

  void all_reduce_direct(const BufferView& buffer, ReduceOp op, const Patience& patience);
  void all_reduce_sliced(const BufferView& buffer, ReduceOp op, const Patience& patience);
  void all_reduce_in_place(const BufferView& buffer, ReduceOp op, const Patience& patience);
  // The parts of `input` that belong to others go out through the slots, `take` is given what came for this rank.
  template <typename Take>
  void exchange_parts(const BufferView& input, const Patience& patience, const Take& take);

  Steps steps_;
  Handover to_slot_;
  std::shared_ptr<Neighbourhood> neighbourhood_;
  std::vector<int> members_;
  std::vector<const void*> sources_;  // scratch, by rank
};

}  // namespace hpcomm::shm
