// comm/nccl: hpcomm's own words for NCCL's binary interface, beside the real header. Built where CMake finds one.
#include <nccl.h>

#include "comm/nccl/nccl_abi.h"
#include "native/check.h"

using namespace hpcomm;

TEST(nccl_abi_is_that_of_the_header) {
  CHECK_EQ(sizeof(nccl::UniqueId), sizeof(ncclUniqueId));
  CHECK_EQ(sizeof(nccl::Result), sizeof(ncclResult_t));
  CHECK_EQ(sizeof(nccl::DataType), sizeof(ncclDataType_t));
  CHECK_EQ(sizeof(nccl::RedOp), sizeof(ncclRedOp_t));
  CHECK_EQ(sizeof(nccl::ScalarResidence), sizeof(ncclScalarResidence_t));
  const auto same = [](auto ours, auto theirs) { CHECK_EQ(static_cast<int>(ours), static_cast<int>(theirs)); };
  same(nccl::Result::kSuccess, ncclSuccess);
  same(nccl::Result::kUnhandledCudaError, ncclUnhandledCudaError);
  same(nccl::Result::kSystemError, ncclSystemError);
  same(nccl::Result::kInternalError, ncclInternalError);
  same(nccl::Result::kInvalidArgument, ncclInvalidArgument);
  same(nccl::Result::kInvalidUsage, ncclInvalidUsage);
  same(nccl::Result::kRemoteError, ncclRemoteError);
  same(nccl::Result::kInProgress, ncclInProgress);
  same(nccl::DataType::kInt8, ncclInt8);
  same(nccl::DataType::kUInt8, ncclUint8);
  same(nccl::DataType::kInt32, ncclInt32);
  same(nccl::DataType::kUInt32, ncclUint32);
  same(nccl::DataType::kInt64, ncclInt64);
  same(nccl::DataType::kUInt64, ncclUint64);
  same(nccl::DataType::kFloat16, ncclFloat16);
  same(nccl::DataType::kFloat32, ncclFloat32);
  same(nccl::DataType::kFloat64, ncclFloat64);
  same(nccl::DataType::kBFloat16, ncclBfloat16);
  same(nccl::DataType::kFloat8E4M3, ncclFloat8e4m3);
  same(nccl::DataType::kFloat8E5M2, ncclFloat8e5m2);
  same(nccl::RedOp::kSum, ncclSum);
  same(nccl::RedOp::kProd, ncclProd);
  same(nccl::RedOp::kMax, ncclMax);
  same(nccl::RedOp::kMin, ncclMin);
  same(nccl::RedOp::kAvg, ncclAvg);
  same(nccl::ScalarResidence::kDevice, ncclScalarDevice);
  same(nccl::ScalarResidence::kHostImmediate, ncclScalarHostImmediate);
  same(nccl::kUndefined, NCCL_CONFIG_UNDEF_INT);
  same(nccl::version_code(2, 29, 7), NCCL_VERSION(2, 29, 7));
}

TEST(nccl_config_is_that_of_the_header) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  CHECK_EQ(theirs.magic, nccl::kConfigMagic);
#define SAME_PLACE(ours, their) CHECK_EQ(offsetof(nccl::Config, ours), offsetof(ncclConfig_t, their))
  SAME_PLACE(size, size);
  SAME_PLACE(version, version);
  SAME_PLACE(blocking, blocking);
  SAME_PLACE(cga_cluster_size, cgaClusterSize);
  SAME_PLACE(min_ctas, minCTAs);
  SAME_PLACE(max_ctas, maxCTAs);
  SAME_PLACE(net_name, netName);
  SAME_PLACE(split_share, splitShare);
  SAME_PLACE(traffic_class, trafficClass);
  SAME_PLACE(comm_name, commName);
  SAME_PLACE(collnet_enable, collnetEnable);
  SAME_PLACE(cta_policy, CTAPolicy);
  SAME_PLACE(shrink_share, shrinkShare);
  SAME_PLACE(nvls_ctas, nvlsCTAs);
#if NCCL_VERSION_CODE >= 22800
  SAME_PLACE(n_channels_per_net_peer, nChannelsPerNetPeer);
  SAME_PLACE(nvlink_centric_sched, nvlinkCentricSched);
#endif
#if NCCL_VERSION_CODE >= 23100
  SAME_PLACE(graph_usage_mode, graphUsageMode);
  SAME_PLACE(num_rma_ctx, numRmaCtx);
  SAME_PLACE(max_p2p_peers, maxP2pPeers);
  SAME_PLACE(graph_stream_ordering, graphStreamOrdering);
  SAME_PLACE(launch_order_implicit, launchOrderImplicit);
#endif
#undef SAME_PLACE
}
