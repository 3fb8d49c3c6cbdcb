// Marks of functions that kernels and the host both run; to a compiler without CUDA they are ordinary inline functions.
#pragma once

// Always inlined on the host too: the CPU kernels are compiled for several instruction sets, and a function that one of
// them shared with the others would be compiled for the lowest.
#if defined(__CUDACC__)
#define HPCOMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HPCOMM_HOST_DEVICE [[gnu::always_inline]] inline
#endif

// Before a loop whose arrays have to end up in registers.
#if defined(__CUDA_ARCH__)
#define HPCOMM_UNROLL _Pragma("unroll")
#else
#define HPCOMM_UNROLL
#endif
