// The NCCL that is loaded at run time: its functions, its version, where it came from.
#pragma once

#include <string>

#include "comm/nccl/nccl_abi.h"
#include "comm/nccl/nccl_communicator.h"

// NAME, result, parameters: what every supported version has.
#define HPCOMM_NCCL_REQUIRED(X)                                                                          \
  X(GetVersion, Result, (int*))                                                                          \
  X(GetUniqueId, Result, (UniqueId*))                                                                    \
  X(GetErrorString, const char*, (Result))                                                               \
  X(GetLastError, const char*, (CommHandle))                                                             \
  X(CommInitRankConfig, Result, (CommHandle*, int, UniqueId, int, Config*))                              \
  X(CommSplit, Result, (CommHandle, int, int, CommHandle*, Config*))                                     \
  X(CommCount, Result, (CommHandle, int*))                                                               \
  X(CommUserRank, Result, (CommHandle, int*))                                                            \
  X(CommGetAsyncError, Result, (CommHandle, Result*))                                                    \
  X(CommFinalize, Result, (CommHandle))                                                                  \
  X(CommDestroy, Result, (CommHandle))                                                                   \
  X(CommAbort, Result, (CommHandle))                                                                     \
  X(GroupStart, Result, ())                                                                              \
  X(GroupEnd, Result, ())                                                                                \
  X(AllReduce, Result, (const void*, void*, std::size_t, DataType, RedOp, CommHandle, StreamHandle))     \
  X(ReduceScatter, Result, (const void*, void*, std::size_t, DataType, RedOp, CommHandle, StreamHandle)) \
  X(AllGather, Result, (const void*, void*, std::size_t, DataType, CommHandle, StreamHandle))            \
  X(Broadcast, Result, (const void*, void*, std::size_t, DataType, int, CommHandle, StreamHandle))       \
  X(Send, Result, (const void*, std::size_t, DataType, int, CommHandle, StreamHandle))                   \
  X(Recv, Result, (void*, std::size_t, DataType, int, CommHandle, StreamHandle))                         \
  X(RedOpCreatePreMulSum, Result, (RedOp*, void*, DataType, ScalarResidence, CommHandle))                \
  X(RedOpDestroy, Result, (RedOp, CommHandle))

// Null where the library has none; nothing depends on them.
#define HPCOMM_NCCL_OPTIONAL(X)                                     \
  X(MemAlloc, Result, (void**, std::size_t))                        \
  X(MemFree, Result, (void*))                                       \
  X(CommRegister, Result, (CommHandle, void*, std::size_t, void**)) \
  X(CommDeregister, Result, (CommHandle, void*))                    \
  X(CommRevoke, Result, (CommHandle, int)) /* 2.28.7 */

namespace hpcomm::nccl {

inline constexpr int kOldestVersion = version_code(2, 27, 0);

struct Library {
#define HPCOMM_NCCL_POINTER(name, result, parameters) result(*name) parameters = nullptr;
  HPCOMM_NCCL_REQUIRED(HPCOMM_NCCL_POINTER)
  HPCOMM_NCCL_OPTIONAL(HPCOMM_NCCL_POINTER)
#undef HPCOMM_NCCL_POINTER

  int version = 0;
  std::string path;  // how it was found

  [[nodiscard]] std::string version_text() const;  // "2.28.9"
  // NCCL's words for `result`, and its last message.
  [[nodiscard]] std::string words(Result result, CommHandle comm = nullptr) const;
};

// The process's NCCL, loaded at the first call and never unloaded:
//   1. the file that HPCOMM_NCCL_LIBRARY names (for tests, and for those who bring their own);
//   2. the libnccl.so.2 that the process has loaded already, which is torch's;
//   3. the libnccl.so.2 that the dynamic loader finds.
// Throws kTransport with everything that was tried; the next call tries again.
[[nodiscard]] const Library& library();

// The functions of the library behind `handle` (dlopen's). Throws kTransport when it is too old or incomplete.
[[nodiscard]] Library read_library(void* handle, const std::string& path);

// Whether a thread that waits inside a blocking communicator can be made to leave (ncclCommRevoke, 2.28.7).
[[nodiscard]] bool can_block(const Library& nccl);

// A config that this library reads as we mean it, with the fields that it has. A communicator that is not `blocking`
// can be aborted while it is made; but each of its launches takes a thread that NCCL starts for it.
[[nodiscard]] Config make_config(const Library& nccl, const NcclLimits& limits, bool launch_order_implicit,
                                 bool blocking = false);

// True when NCCL is asked to keep the order in which one host thread issues on several communicators of a device: by
// the environment, whose variables are set when this module is loaded, unless the user has set them.
[[nodiscard]] bool asks_for_launch_order();
// Whether it will: where it was `asked`, and is told by the config or has found the variable at its first use.
[[nodiscard]] bool keeps_launch_order(const Library& nccl, bool asked);

}  // namespace hpcomm::nccl
