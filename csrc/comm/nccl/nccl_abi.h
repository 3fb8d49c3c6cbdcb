// What hpcomm uses of NCCL's binary interface, in its own words: no header of NCCL is needed to build.
//
// Values and layouts are those of nccl.h 2.27 to 2.32, in which they only grew. A native test compares them with the
// real header where one is found.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace hpcomm::nccl {

struct CommOpaque;
using CommHandle = CommOpaque*;
using StreamHandle = void*;  // cudaStream_t

struct UniqueId {
  char bytes[128];
};

enum class Result : std::int32_t {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class DataType : std::int32_t {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 11,
};

// Values from 5 on are made at run time (ncclRedOpCreatePreMulSum).
enum class RedOp : std::int32_t { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

enum class ScalarResidence : std::int32_t { kDevice = 0, kHostImmediate = 1 };

inline constexpr int kUndefined = INT_MIN;
inline constexpr unsigned kConfigMagic = 0xcafebeef;

// ncclConfig_t. NCCL copies the first `size` bytes and takes its own defaults for the fields that `version` did not
// have yet: so an older library is told of an older, shorter struct (make_config in nccl_library.h).
struct Config {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char* net_name;
  int split_share;
  int traffic_class;
  const char* comm_name;
  int collnet_enable;
  int cta_policy;
  int shrink_share;
  int nvls_ctas;
  // 2.28
  int n_channels_per_net_peer;
  int nvlink_centric_sched;
  // 2.29 to 2.31
  int graph_usage_mode;
  int num_rma_ctx;
  int max_p2p_peers;
  int graph_stream_ordering;
  int launch_order_implicit;
};

// 2.27.3 is 22703.
[[nodiscard]] constexpr int version_code(int major, int minor, int patch) noexcept {
  return major * 10000 + minor * 100 + patch;
}

}  // namespace hpcomm::nccl
