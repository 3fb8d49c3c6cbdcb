// One bucket on its lane: what is packed, how it is summed, and where the results go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "pack/pack.h"
#include "plan/bucket_plan.h"

namespace hpcomm {

// Where one gradient is when its bucket is complete, and where its average shall be.
struct Contribution {
  const void* source = nullptr;  // to be packed; null and not in place: zeros
  void* target = nullptr;        // gets a copy of the result; null: the result stays in the bucket
  bool in_place = false;         // lies at its place in the bucket already
};

// Where the kernels of one bucket report infinities and NaNs: one number for each run of neighbours that is read
// together. See FiniteCheck.
struct RunCheck {
  std::size_t first_entry = 0;
  std::shared_ptr<std::int32_t> first_bad;  // counts from first_entry; INT32_MAX when all are finite
};

struct BucketReduction {
  const Bucket* bucket = nullptr;
  // As long as the bucket's layout, or longer, to a multiple of the ranks. Of a bucket of one gradient, whose elements
  // are reduced without padding, it may be that gradient: no rank knows where the others have theirs.
  BufferView memory;
  std::vector<Contribution> entries;  // one for each of the layout's
  Keepalive held;                     // the memory, and the gradients that get a copy of the result
  Keepalive sources;                  // the other gradients, until they are packed
  // What gradients are multiplied by before they are summed; without one they are averaged.
  std::optional<Scale> factor = std::nullopt;
  // Makes numbers for the checks, on the communicator's device, which the caller's stream sets to INT32_MAX; null: no
  // checks.
  std::function<std::shared_ptr<std::int32_t>()> make_check;
  // Rank r gets part r of the memory, and nothing is copied back; not with casts.
  bool scatter = false;
  // The caller has nothing else to do: what needs no pack and finds its lane idle is reduced in the calling thread,
  // which saves two switches of threads.
  bool in_caller = false;
  int reducer_id = -1;       // as of OpOptions, where several reducers share a lane
  void (*poll)() = nullptr;  // for that thread to call while it waits, as of OpOptions
  // If set: told on the lane, or by the caller, when it begins with this bucket, when all is packed, reduced, and where
  // it shall be.
  std::function<void()> begun = {};
  std::function<void()> packed = {};
  std::function<void()> reduced = {};
  std::function<void()> ended = {};
};

// Sums or averages a bucket over the communicator. It starts when what was computed so far has run, and runs on the
// lane, or in the caller; what is packed, reduced and copied back are three steps of it at most:
//
//   gradient is          | pack               | result
//   ---------------------+--------------------+--------------------------------
//   new (.grad was None) | copy, scale, cast  | in the bucket
//   in place             | none               | in the bucket
//   somebody else's      | copy, scale, cast  | copied back to where it came from
//
// Gradients that are cast are summed as the transport sums 16-bit floats: in float32 on the host, rounded at each hop
// by NCCL. `checks` is filled before this returns. Throws what issuing throws.
[[nodiscard]] WorkPtr issue(Communicator& communicator, const BucketReduction& reduction, std::uint64_t number,
                            std::vector<RunCheck>* checks);

}  // namespace hpcomm
