// engine/slots on CUDA, over the fakes: when a slot may be written again, and what belongs to a graph.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator_allocator.h"
#include "engine/slots.h"
#include "native/nccl_job.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// One rank, the stream that it computes on, and a pool whose slots that stream reads.
class Gpu {
 public:
  explicit Gpu(const NcclJob& job, std::size_t max_free = 2) : compute(make_cuda_stream(pooled_stream(0), 0)) {
    CommunicatorConfig config = job.config(0, "lane");
    config.compute = compute;
    lane = make_nccl_communicator(config);
    slots = std::make_unique<SlotPool>(std::make_shared<CommunicatorAllocator>(lane), max_free,
                                       SlotPool::Streams{compute, lane->shared_stream(), compute});
  }
  ~Gpu() {
    compute->synchronize();
    slots.reset();
    lane->close();
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  [[nodiscard]] cudaStream_t stream() const { return static_cast<cudaStream_t>(compute->native_handle()); }
  void launch(std::function<void()> kernel) const {
    CHECK_EQ(fake_cuda_enqueue(stream(), std::move(kernel)), cudaSuccess);
  }
  void begin_capture() const {
    compute->synchronize();
    CHECK_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  }
  [[nodiscard]] cudaGraphExec_t end_capture() const {
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
    cudaGraphExec_t executable = nullptr;
    CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return executable;
  }
  // A message: something is written, which the computation reads before the host lets go.
  unsigned char* write(const SlotPool::Slot& slot, unsigned char what) const {
    auto* const data = static_cast<unsigned char*>(slot.buffer.view.data);
    launch([data, what] { *data = what; });
    return data;
  }

  std::shared_ptr<Stream> compute;
  std::shared_ptr<Communicator> lane;
  std::unique_ptr<SlotPool> slots;
};

const void* place_of(const SlotPool::Slot& slot) { return slot.buffer.view.data; }

}  // namespace

TEST(cuda_slots_are_used_again_in_stream_order) {
  const NcclJob job(1);
  job.run_threads([&](int) {
    const Gpu gpu(job);
    const Gate gate;
    SlotPool::Slot slot = gpu.slots->acquire(256);
    const void* const place = place_of(slot);
    gpu.launch(gate.kernel());
    slot = {};
    slot = gpu.slots->acquire(256);
    CHECK_EQ(place_of(slot), place);
    CHECK(!slot.free.done());
    *gate.open = true;
    CHECK(slot.free.wait_until(Clock::now() + 10s));
  });
}

// All activations of a step are there at once: GPipe, or a long pipeline. The driver takes up to a millisecond for each
// that it has to allocate.
TEST(cuda_slots_of_a_step_are_allocated_once) {
  const NcclJob job(1);
  job.run_threads([&](int) {
    const Gpu gpu(job);
    std::size_t live = 0;
    for (int step = 0; step < 4; ++step) {
      std::vector<SlotPool::Slot> arrived;
      for (int i = 0; i < 8; ++i) {
        arrived.push_back(gpu.slots->acquire(256));
        (void)gpu.write(arrived.back(), 1);
      }
      CHECK(live == 0 || fake_nccl::live_allocations() == live);
      live = fake_nccl::live_allocations();
      arrived.clear();
    }
  });
}

TEST(cuda_slots_that_a_graph_uses_are_nobody_elses_while_it_lives) {
  const NcclJob job(1);
  job.run_threads([&](int) {
    const Gpu gpu(job, 4);
    const std::size_t before = fake_nccl::live_allocations();
    gpu.begin_capture();
    std::vector<SlotPool::Slot> arrived;
    std::vector<const void*> places;
    std::vector<unsigned char*> bytes;
    for (int i = 0; i < 8; ++i) {  // more than the pool keeps by itself
      arrived.push_back(gpu.slots->acquire(256));
      places.push_back(place_of(arrived.back()));
      bytes.push_back(gpu.write(arrived.back(), 7));
    }
    std::atomic<int> wrong = 0;
    for (unsigned char* const byte : bytes) {
      gpu.launch([byte, &wrong] { wrong += *byte != 7; });
    }
    arrived.clear();
    // Within the capture they serve again.
    const SlotPool::Slot again = gpu.slots->acquire(256);
    CHECK(std::find(places.begin(), places.end(), place_of(again)) != places.end());
    const_cast<SlotPool::Slot&>(again) = {};
    const cudaGraphExec_t graph = gpu.end_capture();
    CHECK_EQ(fake_nccl::live_allocations(), before + 8);

    // What runs beside it has memory of its own, which a launch of the graph does not touch.
    std::vector<SlotPool::Slot> eager;
    for (int i = 0; i < 6; ++i) {
      eager.push_back(gpu.slots->acquire(256));
      CHECK(std::find(places.begin(), places.end(), place_of(eager.back())) == places.end());
      gpu.compute->wait(eager.back().free);
      bytes.push_back(gpu.write(eager.back(), 9));
    }
    CHECK_EQ(cudaGraphLaunch(graph, gpu.stream()), cudaSuccess);
    for (std::size_t i = 8; i < bytes.size(); ++i) {
      gpu.launch([byte = bytes[i], &wrong] { wrong += *byte != 9; });
    }
    eager.clear();
    // Many messages that come and go, of other sizes too, give none of the graph's memory up.
    for (int i = 0; i < 20; ++i) {
      (void)gpu.slots->acquire(i % 2 == 0 ? 256 : 4096);
      gpu.compute->synchronize();
    }
    CHECK_EQ(cudaGraphLaunch(graph, gpu.stream()), cudaSuccess);
    gpu.compute->synchronize();
    CHECK_EQ(wrong.load(), 0);

    // Once the graph is gone they are the pool's again, and those that are too many are given up.
    CHECK_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    (void)gpu.slots->acquire(256);
    gpu.compute->synchronize();
    (void)gpu.slots->acquire(256);
    (void)gpu.compute->record();
    (void)gpu.lane->stream().record();
    gpu.lane->stream().synchronize();
    CHECK(eventually([&] {
      (void)gpu.compute->record();
      (void)gpu.lane->stream().record();
      return fake_nccl::live_allocations() <= before + 4;
    }));
  });
}

// A slot that arrived before the capture, or that the program keeps beyond it.
TEST(cuda_slots_that_a_graph_saw_for_part_of_their_time_are_its_own_as_well) {
  const NcclJob job(1);
  job.run_threads([&](int) {
    const Gpu gpu(job, 4);
    SlotPool::Slot early = gpu.slots->acquire(256);
    const void* const early_place = place_of(early);
    gpu.begin_capture();
    gpu.launch([] {});
    early = {};  // a tensor over it dies while the step is captured
    SlotPool::Slot kept = gpu.slots->acquire(512);
    const void* const kept_place = place_of(kept);
    (void)gpu.write(kept, 1);
    const cudaGraphExec_t graph = gpu.end_capture();
    kept = {};
    for (const std::size_t bytes : {256, 512}) {
      std::vector<SlotPool::Slot> lent;
      for (int i = 0; i < 4; ++i) {
        lent.push_back(gpu.slots->acquire(bytes));
        CHECK(place_of(lent.back()) != early_place && place_of(lent.back()) != kept_place);
      }
    }
    // Nor another graph's.
    gpu.begin_capture();
    SlotPool::Slot other = gpu.slots->acquire(512);
    CHECK(place_of(other) != kept_place && place_of(other) != early_place);
    (void)gpu.write(other, 2);
    other = {};
    const cudaGraphExec_t second = gpu.end_capture();
    CHECK_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    SlotPool::Slot free = gpu.slots->acquire(512);
    SlotPool::Slot next = gpu.slots->acquire(512);
    SlotPool::Slot last = gpu.slots->acquire(512);
    SlotPool::Slot one_more = gpu.slots->acquire(512);
    SlotPool::Slot fifth = gpu.slots->acquire(512);
    CHECK(place_of(free) == kept_place || place_of(next) == kept_place || place_of(last) == kept_place ||
          place_of(one_more) == kept_place || place_of(fifth) == kept_place);
    CHECK_EQ(cudaGraphExecDestroy(second), cudaSuccess);
  });
}

// What arrived in a launch may be read beside the graph, and be let go of there.
TEST(cuda_slots_of_a_graph_that_is_gone_are_free_when_their_last_readers_have_run) {
  const NcclJob job(1);
  job.run_threads([&](int) {
    const Gpu gpu(job);
    gpu.begin_capture();
    SlotPool::Slot slot = gpu.slots->acquire(256);
    const void* const place = place_of(slot);
    (void)gpu.write(slot, 1);
    const cudaGraphExec_t graph = gpu.end_capture();
    CHECK_EQ(cudaGraphLaunch(graph, gpu.stream()), cudaSuccess);
    gpu.compute->synchronize();
    const Gate reader;
    gpu.launch(reader.kernel());
    slot = {};
    CHECK_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    slot = gpu.slots->acquire(256);
    CHECK_EQ(place_of(slot), place);
    CHECK(!slot.free.done());
    *reader.open = true;
    CHECK(slot.free.wait_until(Clock::now() + 10s));
  });
}
