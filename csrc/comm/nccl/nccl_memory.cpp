// Allocation, registration, and their end in the right order.
#include "comm/nccl/nccl_memory.h"

#include <cstdio>
#include <thread>
#include <utility>

#include "base/fork.h"
#include "stream/cuda_call.h"

namespace hpcomm::nccl {

namespace {

constexpr const char* kSwitch = "HPCOMM_NCCL_REGISTER";

// Owned by the buffers that point into it.
class Memory {
 public:
  Memory(SessionPtr session, std::size_t bytes) : session_(std::move(session)) {
    cudaError_t status = obtain(bytes);
    if (status == cudaErrorMemoryAllocation && cuda::free_cached_memory.load(std::memory_order_relaxed)()) {
      status = obtain(bytes);
    }
    if (status == cudaErrorMemoryAllocation) {
      throw Error(ErrorKind::kTransport,
                  str("cuda:", session_->device, " has not the ", bytes, " bytes left that lane ", session_->lane,
                      " needs, also without what PyTorch's cache had unused: a smaller batch, smaller buckets, or ",
                      "fewer processes on this GPU"),
                  {session_->rank, -1, 0, "allocate"});
    }
    cuda::check(status, "cudaMalloc");
  }

  void enroll(std::size_t bytes) {
    const Library& nccl = session_->nccl;
    const ErrorContext what{session_->rank, -1, 0, "ncclCommRegister"};
    if (nccl.CommRegister == nullptr || nccl.CommDeregister == nullptr) {
      throw Error(ErrorKind::kTransport, str("NCCL ", nccl.version_text(), " registers no memory; unset ", kSwitch),
                  what);
    }
    const std::lock_guard inside(session_->api);
    if (session_->comm == nullptr) {
      throw Error(ErrorKind::kClosed, "allocate on a closed communicator", what);
    }
    void* handle = nullptr;
    const Result done = nccl.CommRegister(session_->comm, data_, bytes, &handle);
    if (done != Result::kSuccess || handle == nullptr) {
      throw Error(ErrorKind::kTransport,
                  str("ncclCommRegister of ", bytes, " bytes on lane ", session_->lane, ": ",
                      nccl.words(done, session_->comm), "; unset ", kSwitch, " on all ranks"),
                  what);
    }
    session_->registered[data_] = handle;
    is_enrolled_ = true;
  }

  ~Memory() {
    if (fork_generation() != session_->generation) {
      return;  // the parent's
    }
    int ignored = 0;
    if (cudaGetDevice(&ignored) == cudaErrorCudartUnloading) {
      return;  // the process ends and CUDA went first
    }
    try {
      const cuda::DeviceGuard device(session_->device);
      if (!dismiss()) {
        return;
      }
      if (from_nccl_) {
        const Result freed = session_->nccl.MemFree(data_);
        if (freed != Result::kSuccess) {
          std::fprintf(stderr, "hpcomm: ncclMemFree: %s\n", session_->nccl.words(freed).c_str());
        }
      } else {
        cuda::check(cudaFree(data_), "cudaFree");
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "hpcomm: memory of lane %s is not freed: %s\n", session_->lane.c_str(), error.what());
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  cudaError_t obtain(std::size_t bytes) {
    const Library& nccl = session_->nccl;
    from_nccl_ =
        nccl.MemAlloc != nullptr && nccl.MemFree != nullptr && nccl.MemAlloc(&data_, bytes) == Result::kSuccess;
    if (from_nccl_) {
      return cudaSuccess;
    }
    data_ = nullptr;
    const cudaError_t status = cudaMalloc(&data_, bytes);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();  // the runtime's note of it, and of what NCCL met before
    }
    return status;
  }

  // False when it must not be freed: NCCL may still use it.
  [[nodiscard]] bool dismiss() {
    if (!is_enrolled_) {
      return true;
    }
    const Deadline deadline = Clock::now() + std::chrono::seconds(10);
    for (; Clock::now() < deadline; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      const std::unique_lock inside(session_->api, std::try_to_lock);  // polled: sanitizers do not know timed locks
      if (!inside.owns_lock()) {
        continue;
      }
      const auto entry = session_->registered.find(data_);
      if (entry == session_->registered.end()) {
        return true;  // the communicator is gone
      }
      if (session_->comm == nullptr) {
        continue;  // it is being aborted
      }
      const Result done = session_->nccl.CommDeregister(session_->comm, entry->second);
      session_->registered.erase(entry);
      if (done != Result::kSuccess) {
        std::fprintf(stderr, "hpcomm: ncclCommDeregister: %s; the memory stays\n", session_->nccl.words(done).c_str());
      }
      return done == Result::kSuccess;
    }
    std::fprintf(stderr, "hpcomm: memory of lane %s is not freed: its communicator does not end\n",
                 session_->lane.c_str());
    return false;
  }

  const SessionPtr session_;
  void* data_ = nullptr;
  bool from_nccl_ = false;
  bool is_enrolled_ = false;
};

}  // namespace

Buffer behind(const std::shared_ptr<Stream>& reader, Buffer buffer) {
  if (buffer.owner == nullptr) {
    return buffer;
  }
  // A stream that is gone has passed everything.
  const auto let_go = [memory = std::move(buffer.owner), reader = std::weak_ptr(reader)](const void*) {
    try {
      if (const auto stream = reader.lock()) {
        stream->hold(memory);
      }
    } catch (const std::exception&) {  // CUDA is gone or broken: the stream keeps it for ever
    }
  };
  buffer.owner = Keepalive(buffer.view.data, let_go);
  return buffer;
}

void keep_for_ever(Keepalive memory) {
  // Within reach, so that leak checkers see that it is meant.
  static std::mutex& mutex = *new std::mutex;
  static auto& kept = *new std::vector<Keepalive>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

Buffer allocate(const SessionPtr& session, std::size_t bytes, bool registered) {
  const Device device{DeviceType::kCuda, session->device};
  if (bytes == 0) {
    return {{nullptr, 0, 0, DType::kUInt8, device}, nullptr};
  }
  const cuda::DeviceGuard guard(session->device);
  const cuda::RelaxedCapture relaxed;  // a captured step may need a slot: the graph's owner keeps it
  auto memory = std::make_shared<Memory>(session, bytes);
  if (registered) {
    memory->enroll(bytes);
  }
  void* data = memory->data();
  return {{data, bytes, bytes, DType::kUInt8, device}, std::move(memory)};
}

}  // namespace hpcomm::nccl
