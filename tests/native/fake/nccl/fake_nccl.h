// What tests may ask of the fake NCCL: versions, rules, injected errors, counts, and what was done wrong.
//
// The fake is a libnccl whose ranks are threads of one process and whose kernels run on the streams of the fake CUDA
// runtime. A kernel waits for its peers as a real one does: nothing is buffered, and it occupies its stream, and by
// default its whole device, until its peers have come or its communicator is aborted. It shows order, matching,
// lifetimes and failures; it says nothing about speed, topologies or numerics beyond a sum in rank order.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fake_nccl {

// How kernels of several communicators of one device share it.
enum class Device {
  // One kernel at a time: in the order of issue where NCCL_LAUNCH_ORDER_IMPLICIT was set when the first communicator
  // was
  // made, or its field of the config for this one; else whichever stream comes first.
  kOneKernel,
  kManyKernels,  // one per stream
};

struct Rules {
  int version = 22907;
  Device device = Device::kOneKernel;
  // Operations that do not fit together: an error that names both sides, instead of the hang that NCCL would show.
  bool strict = true;
  // How often ncclCommGetAsyncError says ncclInProgress before an initialisation, and before a launch, is done.
  int init_polls = 3;
  int launch_polls = 2;
  // The first message of a pair in a direction, and the first collective, are in progress until all whom they connect
  // have issued theirs.
  bool connects = true;
  bool allow_shared_device = false;  // several ranks of a communicator on one device
  bool mem_alloc_works = true;
  bool register_works = true;
  bool abort_hangs = false;                   // ncclCommAbort does not return
  bool finalize_hangs = false;                // a finalisation never ends
  std::chrono::milliseconds revoke_takes{0};  // more than what it waits for
};

// Back to a healthy library with `rules`, no injected errors, counts at zero. What is left of before is forgotten.
void reset(const Rules& rules = {});
[[nodiscard]] const Rules& rules();
// Somebody else in the process, as torch, makes a communicator: NCCL reads its environment now.
void use_elsewhere();
// The end of Rules::abort_hangs.
void let_aborts_return();

// How often a function was called since reset(), by name: calls("ncclSend"); of all, with an empty name.
[[nodiscard]] std::uint64_t calls(const std::string& function = "");
// The functions called since reset(), without ncclCommGetAsyncError and what asks for versions and words.
[[nodiscard]] std::vector<std::string> history();
// The n-th call from now on (1: the next) fails with `result`, once: of one function, or of any with an empty name.
// What only asks for versions and words never fails.
void fail(const std::string& function, std::uint64_t n, int result);
// True while an error waits for its call.
[[nodiscard]] bool failure_waits();
// The communicators of a device have failed, as after a network error.
void break_communicators(int device, int result);
// Only the one made last of them.
void break_last_communicator(int device, int result);

// What broke a rule: arguments that NCCL refuses, a destroyed communicator that is used, operations that do not fit,
// a communicator destroyed with registered memory or running operations. Empty is good.
[[nodiscard]] std::vector<std::string> violations();

[[nodiscard]] int live_communicators();
[[nodiscard]] std::size_t live_allocations();    // of ncclMemAlloc
[[nodiscard]] std::size_t live_registrations();  // of ncclCommRegister
[[nodiscard]] std::size_t live_operators();      // of ncclRedOpCreatePreMulSum
[[nodiscard]] std::uint64_t averages();          // reductions issued with ncclAvg since reset()
[[nodiscard]] std::size_t largest_group();       // operations in one ncclGroupStart and ncclGroupEnd

// What the last communicator was told by its config.
struct SeenConfig {
  std::size_t size = 0;
  unsigned version = 0;
  int blocking = 0;
  int cga_cluster_size = 0;
  int min_ctas = 0;
  int max_ctas = 0;
  bool launch_order = false;
};
[[nodiscard]] SeenConfig last_config();

}  // namespace fake_nccl
