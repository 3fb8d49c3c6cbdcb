// A job whose ranks are threads with a device each: the transport nccl over the fakes of NCCL and CUDA.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_communicator.h"
#include "native/check.h"
#include "native/fake/cuda/fake_cuda.h"
#include "native/fake/nccl/fake_nccl.h"
#include "native/thread_communicator.h"
#include "stream/cuda_stream.h"

namespace hpcomm::testing {

// A stream of `device` from a pool that lives as long as the process, as PyTorch's does.
inline void* pooled_stream(int device) {
  int before = 0;
  (void)cudaGetDevice(&before);
  (void)cudaSetDevice(device);
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  (void)cudaSetDevice(before);
  return stream;
}

// A variable of the environment, until this ends. Not while other threads run: they may read what is gone then.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const before = std::getenv(name); before != nullptr) {
      before_ = before;
    }
    ::setenv(name, value, 1);
  }
  ~Variable() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

// A kernel that ends when it is let go.
struct Gate {
  std::shared_ptr<std::atomic<bool>> open = std::make_shared<std::atomic<bool>>(false);
  [[nodiscard]] std::function<void()> kernel() const {
    return [open = open] {
      while (!*open) {
        std::this_thread::yield();
      }
    };
  }
};

// Memory of a device; the fake's is the host's, so that a test can look into it once it is ordered after its writers.
template <typename T>
class DeviceVector {
 public:
  DeviceVector(int device, std::size_t count, T value = T{}) : device_(device), count_(count) {
    (void)cudaSetDevice(device);
    CHECK_EQ(cudaMalloc(&data_, count * sizeof(T) + 1), cudaSuccess);
    for (std::size_t i = 0; i < count; ++i) {
      (*this)[i] = value;
    }
  }
  ~DeviceVector() { (void)cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  T& operator[](std::size_t i) { return static_cast<T*>(data_)[i]; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] BufferView view(DType dtype, std::size_t elements_per_value = 1) {
    return {data_, count_ * sizeof(T), count_ / elements_per_value, dtype, {DeviceType::kCuda, device_}};
  }
  [[nodiscard]] BufferView view()
    requires std::is_same_v<T, float>
  {
    return view(DType::kFloat32);
  }

 private:
  int device_;
  std::size_t count_;
  void* data_ = nullptr;
};

class NcclJob {
 public:
  explicit NcclJob(int size, const fake_nccl::Rules& rules = {}, milliseconds timeout = milliseconds(20000),
                   unsigned seed = 1)
      : size_(size), timeout_(timeout) {
    ::setenv("HPCOMM_NCCL_LIBRARY", HPCOMM_TEST_NCCL_LIBRARY, 1);
    set_launch_order_in_time(true);
    fake_cuda::reset(seed, 100);
    fake_cuda::set_device_count(size);
    fake_nccl::reset(rules);
    bytes_before_ = fake_cuda::live_bytes();
    controls_ = size > 1 ? connect_controls(size) : std::vector{make_solo_control()};
  }
  // What every test demands, whatever went wrong in it: no rule of NCCL broken, nothing left behind.
  ~NcclJob() {
    if (clean_) {
      for (const std::string& what : fake_nccl::violations()) {
        if (!half_issued_ || what.find(" issued ") == std::string::npos) {
          check::fail(__FILE__, __LINE__, "the fake NCCL complains: " + what);
        }
      }
    }
    if (may_leak_) {
      return;
    }
    // A rank waits for its teardown, but not for ever: on a machine that stops the thread of one, that may be late.
    (void)eventually([&] {
      return fake_nccl::live_communicators() == 0 && fake_nccl::live_allocations() == 0 &&
             fake_cuda::live_bytes() == bytes_before_;
    });
    CHECK_EQ(fake_nccl::live_communicators(), 0);
    CHECK_EQ(fake_nccl::live_allocations(), 0);
    CHECK_EQ(fake_nccl::live_registrations(), 0);
    CHECK_EQ(fake_nccl::live_operators(), 0);
    CHECK_EQ(fake_cuda::live_bytes(), bytes_before_);
  }
  NcclJob(const NcclJob&) = delete;
  NcclJob& operator=(const NcclJob&) = delete;

  // A rank gave up in the middle of an operation: until its abort arrives, its peers' next ones may meet the half of it
  // that was launched. Any other complaint counts.
  void expect_half_an_operation() { half_issued_ = true; }
  // Rules will be broken, and the test looks at that itself.
  void expect_violations() { clean_ = false; }
  // A call that frees something was made to fail.
  void expect_leaks() { may_leak_ = true; }

  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const std::shared_ptr<Control>& control(int rank) const {
    return controls_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] CommunicatorConfig config(int rank, const std::string& name = "world") const {
    CommunicatorConfig config;
    config.name = name;
    for (int r = 0; r < size_; ++r) {
      config.ranks.push_back(r);
    }
    config.rank = rank;
    config.lane = name;
    config.stream = make_cuda_stream(pooled_stream(rank), rank);
    config.make_stream = [rank](const std::string&) { return make_cuda_stream(pooled_stream(rank), rank); };
    config.control = control(rank);
    config.timeout = timeout_;
    return config;
  }
  [[nodiscard]] std::shared_ptr<Communicator> communicator(int rank, const std::string& name = "world",
                                                           const NcclOptions& options = {}) const {
    return make_nccl_communicator(config(rank, name), options);
  }

  // Collective: the ranks are connected, so that a collective of one alone does not keep its host.
  [[nodiscard]] std::shared_ptr<Communicator> connected(int rank, const std::string& name = "world") const {
    auto made = communicator(rank, name);
    made->barrier()->wait();
    return made;
  }

  // Returns when all ranks have come to the meeting of this number: a fault comes after what it is to find.
  void meet(int rank, std::uint64_t number) const {
    std::vector<int> all;
    for (int r = 0; r < size_; ++r) {
      all.push_back(r);
    }
    (void)control(rank)->exchange(all, 1000 + number, "", Clock::now() + std::chrono::seconds(20));
  }

  // Runs body(rank) on every rank, in a thread of its own whose device is the rank's.
  template <typename Body>
  void run_threads(const Body& body) const {
    run_ranks(size_, [&](int rank) {
      (void)cudaSetDevice(rank);
      body(rank);
    });
  }
  // Runs body(world communicator) on every rank. A rank that throws fails the test and ends the others.
  template <typename Body>
  void run(const Body& body) const {
    run_threads([&](int rank) {
      try {
        const auto world = communicator(rank);
        body(*world);
        world->close();
      } catch (const std::exception& error) {
        control(rank)->abort(error.what());
        throw;
      }
    });
  }

 private:
  int size_;
  milliseconds timeout_;
  bool clean_ = true;
  bool half_issued_ = false;
  bool may_leak_ = false;
  std::uint64_t bytes_before_ = 0;
  std::vector<std::shared_ptr<Control>> controls_;
};

}  // namespace hpcomm::testing
