// What a DistributedDataParallel asks of its reducer.
#pragma once

#include <string>

namespace hpcomm {

struct DdpOptions {
  bool find_unused = false;   // search the graph for parameters that the backward will not reach
  bool bucket_views = false;  // .grad is always a view of its bucket, also one that was the user's own tensor
  bool shard = false;         // reduce-scatter: rank r gets part r of each bucket, and .grad stays None
  bool check_finite = false;  // an infinity or a NaN in a rank's gradient is an error on all ranks
  int number = -1;            // of the wrapper, where several share a lane; equal on all ranks
  std::string events;         // the profiler's events are called events:all_reduce and the like
};

}  // namespace hpcomm
