// NCCL's binary interface as the fake implements it. Not hpcomm's copy of it: two descriptions have to agree.
#pragma once

#include <climits>
#include <cstddef>

#include <cuda_runtime_api.h>

extern "C" {

typedef struct ncclComm* ncclComm_t;

typedef struct {
  char internal[128];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7
} ncclResult_t;

typedef enum {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
  ncclNumTypes
} ncclDataType_t;

typedef enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps, ncclMaxRedOp = INT_MAX } ncclRedOp_t;

typedef enum { ncclScalarDevice, ncclScalarHostImmediate } ncclScalarResidence_t;

// Of 2.31, the longest that the fake plays; an older one ends earlier (config_size).
typedef struct {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
  int graphUsageMode;
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;
  int launchOrderImplicit;
  int numRmaSig;
  int rmaEagerInit;
  int hostCftMode;
} ncclConfig_t;

}  // extern "C"
