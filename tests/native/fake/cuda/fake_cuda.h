// What tests may ask of the fake CUDA runtime: delays, injected errors, counts, kernels that are host functions.
//
// The fake is a libcudart whose streams are host threads and whose device memory is host memory. It shows order,
// arguments and lifetimes; it says nothing about a GPU's numerics or speed. What it does not do: the legacy stream is
// an ordinary stream of its device that waits for no other, and cudaFree() does not wait for the device (a caching
// allocator in front of the real one does not either).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

// A kernel launch. `kernel` runs on the stream's thread, in stream order, and must not call the runtime. While the
// stream is captured it becomes a node of the graph instead. As with a real launch, the stream has to belong to the
// calling thread's current device.
cudaError_t fake_cuda_enqueue(cudaStream_t stream, std::function<void()> kernel);

namespace fake_cuda {

// Back to a healthy machine with two devices: no injected errors, counts at zero. Before every second item or so a
// stream sleeps a random time, at most `max_delay_us`; the streams made from now on draw it from `seed`, to which
// FAKE_CUDA_SEED of the environment is added, so that the same tests can be run with other delays.
void reset(unsigned seed = 1, int max_delay_us = 200);
void set_device_count(int count);  // 1 to 16

// How often a function was called since reset(), by name: calls("cudaEventQuery"), calls("fake_cuda_enqueue").
[[nodiscard]] std::uint64_t calls(const std::string& function);
// Calls that block the host until a device is done, all together.
[[nodiscard]] std::uint64_t synchronising_calls();
// Event and stream queries that were refused because of a capture.
[[nodiscard]] std::uint64_t queries_in_captures();

// The n-th call of `function` from now on (1: the next) fails with `error`, once.
void fail(const std::string& function, std::uint64_t n, cudaError_t error);
// A sticky error, as after an illegal access: kernels of the device no longer run, nearly every call returns it.
void break_device(int device, cudaError_t error = cudaErrorIllegalAddress);
// The process is on its way out: every call returns cudaErrorCudartUnloading until reset().
void unload();

// Events made by cudaEventCreateWithFlags and not destroyed; bytes from cudaMalloc and not freed.
[[nodiscard]] std::uint64_t live_events();
[[nodiscard]] std::uint64_t live_bytes();
// How much memory there is in all: cudaMalloc has cudaErrorMemoryAllocation beyond that. reset() takes the limit away.
void set_memory(std::uint64_t bytes);
// Whether an address lies in memory from cudaMalloc or cudaHostAlloc: what a kernel may touch.
[[nodiscard]] bool on_device(const void* address);
// What cudaEventCreateWithFlags was given.
[[nodiscard]] unsigned event_flags(cudaEvent_t event);

// Where the use of a destroyed handle, a second free and a runtime call inside a kernel are reported. By default the
// process aborts with the message; a test of the fake itself may listen instead (null: abort again).
void on_violation(std::function<void(const std::string&)> listener);

}  // namespace fake_cuda
