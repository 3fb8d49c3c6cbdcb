// Call sites, devices, and streams as threads.
#include "native/fake/cuda/machine.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fake_cuda {

namespace {

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

// Leaked on purpose: threads use it until the process is gone.
struct Machine {
  std::mutex mutex;  // of the tables below
  std::map<std::string, std::unique_ptr<Site>> sites;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  CUstream_st* default_streams[kMaxDevices] = {};
  std::function<void(const std::string&)> listener;

  std::atomic<Recording*> recordings{nullptr};
  std::atomic<int> devices{2};
  std::atomic<cudaError_t> errors[kMaxDevices] = {};
  std::atomic<bool> unloading{false};
  std::atomic<unsigned> seed{static_cast<unsigned>(from_environment("FAKE_CUDA_SEED", 0) + 1)};
  std::atomic<int> max_delay_us{200};
  std::atomic<std::uint64_t> live_events{0};
  std::atomic<std::uint64_t> refused_queries{0};
};

Machine& machine() {
  static Machine& the = *new Machine;
  return the;
}

thread_local cudaError_t thread_error = cudaSuccess;
thread_local int thread_device = 0;
thread_local bool thread_inside_kernel = false;

CUstream_st* add_stream(int device, unsigned flags, int priority) {
  auto stream = std::make_unique<CUstream_st>(device, flags, priority);
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.streams.push_back(std::move(stream));
  return m.streams.back().get();
}

CUstream_st* default_stream(int device) {
  Machine& m = machine();
  {
    const std::lock_guard lock(m.mutex);
    if (m.default_streams[device] != nullptr) {
      return m.default_streams[device];
    }
  }
  CUstream_st* made = add_stream(device, cudaStreamDefault, 0);
  const std::lock_guard lock(m.mutex);
  if (m.default_streams[device] == nullptr) {
    m.default_streams[device] = made;
  }
  return m.default_streams[device];
}

}  // namespace

// --- Control --------------------------------------------------------------------------------------------------------

void reset(unsigned seed, int max_delay_us) {
  Machine& m = machine();
  m.devices = 2;
  m.unloading = false;
  m.seed = seed + static_cast<unsigned>(from_environment("FAKE_CUDA_SEED", 0));
  m.max_delay_us = max_delay_us;
  m.refused_queries = 0;
  set_memory(UINT64_MAX);
  for (auto& error : m.errors) {
    error = cudaSuccess;
  }
  const std::lock_guard lock(m.mutex);
  for (auto& [name, site] : m.sites) {
    site->calls = 0;
    site->fail_in = 0;
  }
}

void set_device_count(int count) { machine().devices = std::clamp(count, 1, kMaxDevices); }
std::uint64_t calls(const std::string& function) { return site_of(function).calls.load(); }
std::uint64_t synchronising_calls() {
  std::uint64_t total = 0;
  for (const char* name : {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}) {
    total += calls(name);
  }
  return total;
}
std::uint64_t queries_in_captures() { return machine().refused_queries.load(); }
void fail(const std::string& function, std::uint64_t n, cudaError_t error) {
  Site& site = site_of(function);
  site.failure = error;
  site.fail_in = static_cast<std::int64_t>(n);
}
void break_device(int device, cudaError_t error) { machine().errors[device] = error; }
void unload() { machine().unloading = true; }
std::uint64_t live_events() { return machine().live_events.load(); }
unsigned event_flags(cudaEvent_t event) { return event->flags; }
void on_violation(std::function<void(const std::string&)> listener) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.listener = std::move(listener);
}

// --- Calls ----------------------------------------------------------------------------------------------------------

Site& site_of(const std::string& name) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  std::unique_ptr<Site>& site = m.sites[name];
  if (site == nullptr) {
    site = std::make_unique<Site>();
  }
  return *site;
}

cudaError_t enter(Site& site) {
  site.calls.fetch_add(1, std::memory_order_relaxed);
  Machine& m = machine();
  if (m.unloading.load(std::memory_order_relaxed)) {
    return cudaErrorCudartUnloading;
  }
  if (thread_inside_kernel) {
    violation("a kernel or a host function called the CUDA runtime");
    return cudaErrorNotPermitted;
  }
  if (site.fail_in.load(std::memory_order_relaxed) > 0 && site.fail_in.fetch_sub(1, std::memory_order_relaxed) == 1) {
    return site.failure.load(std::memory_order_relaxed);
  }
  return device_error(thread_device);
}

cudaError_t keep(cudaError_t error) {
  if (error != cudaSuccess) {
    thread_error = error;
  }
  return error;
}

cudaError_t last_error(bool forget) {
  const cudaError_t error = thread_error;
  if (forget) {
    thread_error = cudaSuccess;
  }
  return error;
}

void violation(const std::string& what) {
  std::function<void(const std::string&)> listener;
  {
    const std::lock_guard lock(machine().mutex);
    listener = machine().listener;
  }
  if (listener) {
    listener(what);
    return;
  }
  std::fprintf(stderr, "fake CUDA: %s\n", what.c_str());
  std::fflush(stderr);
  std::abort();
}

void count_refused_query() { machine().refused_queries.fetch_add(1, std::memory_order_relaxed); }
cudaError_t device_error(int device) { return machine().errors[device].load(std::memory_order_relaxed); }
int device_count() { return machine().devices.load(std::memory_order_relaxed); }
int& current_device() { return thread_device; }
bool& inside_kernel() { return thread_inside_kernel; }

// --- Streams and events ---------------------------------------------------------------------------------------------

Recording* make_recording() {
  auto* made = new Recording;
  std::atomic<Recording*>& all = machine().recordings;  // reachable from here, or a leak checker would report them
  made->next = all.load(std::memory_order_relaxed);
  while (!all.compare_exchange_weak(made->next, made, std::memory_order_relaxed)) {
  }
  return made;
}

void sleep_while(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void wait_for(const Recording& recording) {
  while (recording.done.load(std::memory_order_acquire) == 0) {
    sleep_while(recording.done, 0);
  }
}

cudaError_t resolve(cudaStream_t handle, CUstream_st*& stream) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    stream = default_stream(thread_device);
    return cudaSuccess;
  }
  if (handle == cudaStreamPerThread || handle->magic != kStreamMagic) {
    return cudaErrorInvalidResourceHandle;
  }
  if (handle->destroyed.load(std::memory_order_relaxed)) {
    violation("a stream was used that has been destroyed");
    return cudaErrorInvalidResourceHandle;
  }
  stream = handle;
  return device_error(handle->device);
}

cudaError_t check_event(cudaEvent_t event) {
  if (event == nullptr || event->magic != kEventMagic) {
    return cudaErrorInvalidResourceHandle;
  }
  if (event->destroyed.load(std::memory_order_relaxed)) {
    violation("an event was used that has been destroyed");
    return cudaErrorInvalidResourceHandle;
  }
  return device_error(event->device);
}

CUevent_st* make_event(unsigned flags) {
  auto event = std::make_unique<CUevent_st>();
  event->device = thread_device;
  event->flags = flags;
  Machine& m = machine();
  ++m.live_events;
  const std::lock_guard lock(m.mutex);
  m.events.push_back(std::move(event));
  return m.events.back().get();
}

void forget_event() { --machine().live_events; }

CUstream_st* make_stream(unsigned flags, int priority) { return add_stream(thread_device, flags, priority); }

void wait_device(int device) {
  std::vector<CUstream_st*> streams;
  {
    const std::lock_guard lock(machine().mutex);
    for (const auto& stream : machine().streams) {
      if (stream->device == device) {
        streams.push_back(stream.get());
      }
    }
  }
  for (CUstream_st* stream : streams) {
    stream->wait_idle();
  }
}

}  // namespace fake_cuda

using fake_cuda::QueueNode;

CUstream_st::CUstream_st(int device_index, unsigned stream_flags, int stream_priority)
    : device(device_index), flags(stream_flags), priority(stream_priority), newest_(new QueueNode), oldest_(newest_) {
  static std::atomic<unsigned> made{0};
  const unsigned seed = fake_cuda::machine().seed.load() * 7919U + made.fetch_add(1);
  std::thread([this, seed] { work(seed); }).detach();
}

// Many writers, one reader (D. Vyukov's queue): a writer publishes its node, then links it to the one before.
void CUstream_st::push(std::function<void()> run) {
  auto* node = new QueueNode;
  node->run = std::move(run);
  newest_.exchange(node, std::memory_order_acq_rel)->next.store(node, std::memory_order_release);
  pushed_.fetch_add(1, std::memory_order_release);
  fake_cuda::wake(pushed_);
}

void CUstream_st::finish() {
  destroyed = true;
  push([this] { last_ = true; });
}

void CUstream_st::work(unsigned seed) {
  std::mt19937 random(seed);
  fake_cuda::inside_kernel() = true;
  for (std::uint32_t ran = 0; !last_; ++ran) {
    while (pushed_.load(std::memory_order_acquire) == ran) {
      fake_cuda::sleep_while(pushed_, ran);
    }
    QueueNode* node = nullptr;
    while ((node = oldest_->next.load(std::memory_order_acquire)) == nullptr) {
      std::this_thread::yield();
    }
    delete oldest_;
    oldest_ = node;
    const int most = fake_cuda::machine().max_delay_us.load(std::memory_order_relaxed);
    if (most > 0 && random() % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(most + 1)));
    }
    node->run();
    node->run = nullptr;  // what the item captured ends before anybody hears that it is done
    finished_.store(ran + 1, std::memory_order_release);
    fake_cuda::wake(finished_);
  }
}

bool CUstream_st::idle() const { return finished_.load(std::memory_order_acquire) == pushed_.load(); }

void CUstream_st::wait_idle() const {
  // Differences, because the counts wrap.
  const std::uint32_t target = pushed_.load();
  std::uint32_t seen = finished_.load(std::memory_order_acquire);
  for (; static_cast<std::int32_t>(target - seen) > 0; seen = finished_.load(std::memory_order_acquire)) {
    fake_cuda::sleep_while(finished_, seen);
  }
}
