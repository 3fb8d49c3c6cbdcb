// stream/cuda_lanes: the priority of each use, and streams that nobody else has.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "native/nccl_job.h"
#include "stream/cuda_lanes.h"

using namespace hpcomm;
using namespace hpcomm::testing;

namespace {

// As PyTorch's: so many streams of each priority, handed out in turn, never destroyed.
class Pool {
 public:
  explicit Pool(int size) {
    int least = 0;
    int greatest = 0;
    CHECK_EQ(cudaDeviceGetStreamPriorityRange(&least, &greatest), cudaSuccess);
    for (int i = 0; i < size; ++i) {
      low_.push_back(stream(least));
      high_.push_back(stream(greatest));
    }
  }
  [[nodiscard]] CudaLanes::Pool take() {
    return [this](bool high) -> void* {
      ++taken;
      auto& next = high ? next_high_ : next_low_;
      const auto& streams = high ? high_ : low_;
      return streams[next++ % streams.size()];
    };
  }
  int taken = 0;

 private:
  static cudaStream_t stream(int priority) {
    cudaStream_t made = nullptr;
    CHECK_EQ(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority), cudaSuccess);
    return made;
  }
  std::vector<cudaStream_t> low_;
  std::vector<cudaStream_t> high_;
  std::size_t next_low_ = 0;
  std::size_t next_high_ = 0;
};

int priority_of(const Stream& stream) {
  int priority = 1;
  CHECK_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(stream.native_handle()), &priority), cudaSuccess);
  return priority;
}

}  // namespace

TEST(cuda_lanes_of_messages_go_before_those_of_gradients) {
  const NcclJob job(1);
  (void)cudaSetDevice(0);
  Pool pool(4);
  CudaLanes lanes(0, pool.take());
  CommunicatorConfig config = job.config(0, "world");
  config.make_stream = [&lanes](const std::string& lane) { return lanes.make(lane); };
  config.stream = config.make_stream(config.lane);
  CHECK(priority_of(*config.stream) < 0);
  {
    const auto world = make_nccl_communicator(config);
    // Channel's lanes; the plan's for activations, their gradients and the loss; DDP's; what is scaled by one rank.
    for (const std::string lane : {"up", "down", "forward", "backward", "scalar"}) {
      const auto made = world->subgroup({0}, lane);
      CHECK(priority_of(made->stream()) < 0);
      made->close();
    }
    for (const std::string lane : {"gradient", "alone"}) {
      const auto made = world->subgroup({0}, lane);
      CHECK_EQ(priority_of(made->stream()), 0);
      const auto part = made->split(0, 0);  // on the same kind of lane
      CHECK_EQ(priority_of(part->stream()), 0);
      part->close();
      made->close();
    }
    world->close();
  }
}

TEST(cuda_lanes_share_no_stream_while_the_pool_has_another) {
  fake_cuda::reset();
  (void)cudaSetDevice(0);
  Pool pool(4);
  CudaLanes lanes(0, pool.take());
  std::vector<std::shared_ptr<Stream>> living;
  std::set<void*> handles;
  for (int i = 0; i < 3; ++i) {
    living.push_back(lanes.make("up"));
    handles.insert(living.back()->native_handle());
    (void)lanes.make("down");  // gone at once
  }
  CHECK_EQ(handles.size(), std::size_t{3});
  living.push_back(lanes.make("down"));
  handles.insert(living.back()->native_handle());
  CHECK_EQ(handles.size(), std::size_t{4});
  const int before = pool.taken;
  living.push_back(lanes.make("up"));  // one too many: shared, and not asked for for ever
  CHECK(handles.count(living.back()->native_handle()) == 1);
  CHECK(pool.taken - before <= 32);
  living[1].reset();
  const auto again = lanes.make("up");
  int users = 0;
  for (const auto& stream : living) {
    users += stream != nullptr && stream->native_handle() == again->native_handle() ? 1 : 0;
  }
  CHECK_EQ(users, 0);
}

TEST(cuda_lanes_beyond_the_queues_of_the_device_are_told_of_once) {
  fake_cuda::reset();
  (void)cudaSetDevice(0);
  for (const int queues : {0, 3}) {  // 0: not set, and CUDA has eight
    if (queues == 0) {
      ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    } else {
      ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3", 1);
    }
    Pool pool(16);
    CudaLanes lanes(0, pool.take());
    std::vector<std::shared_ptr<Stream>> living;
    const int enough = queues == 0 ? 8 : queues;
    {
      CapturedStderr silence;
      for (int i = 0; i < 20; ++i) {
        (void)lanes.make("gone");
      }
      for (int i = 1; i < enough; ++i) {
        living.push_back(lanes.make("up"));
      }
      CHECK_EQ(silence.text(), "");
    }
    CapturedStderr captured;
    living.push_back(lanes.make("down"));
    living.push_back(lanes.make("down"));
    CHECK_EQ(captured.text(), str("hpcomm: ", enough, " lanes on CUDA device 0, which has ", enough,
                                  " queues (CUDA_DEVICE_MAX_CONNECTIONS): lanes that share one wait for each other. "
                                  "Start the process with CUDA_DEVICE_MAX_CONNECTIONS=32\n"));
  }
  ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}
