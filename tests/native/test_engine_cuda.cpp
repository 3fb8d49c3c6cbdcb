// engine/ on CUDA streams and NCCL, both fakes on host threads: what is computed by a kernel is not touched before it
// has run, nothing is given back before it has been read, and the host waits for nothing on the way.
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator_allocator.h"
#include "engine/device_step_loss.h"
#include "engine/edge.h"
#include "engine/reducer.h"
#include "native/nccl_job.h"
#include "native/patience.h"
#include "pack/step_math.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// What one rank has: a stream that it computes on, and lanes.
class Gpu {
 public:
  Gpu(const NcclJob& job, int rank) : job_(job), rank_(rank), compute_(make_cuda_stream(pooled_stream(rank), rank)) {}

  [[nodiscard]] Stream& compute() const { return *compute_; }
  [[nodiscard]] std::shared_ptr<Communicator> lane(const std::string& name) const {
    CommunicatorConfig config = job_.config(rank_, name);
    config.compute = compute_;
    return make_nccl_communicator(config);
  }
  // A kernel of the compute stream. As kernels do, it owns nothing: what it touches is held for it.
  void launch(std::function<void()> kernel) const {
    CHECK_EQ(fake_cuda_enqueue(static_cast<cudaStream_t>(compute_->native_handle()), std::move(kernel)), cudaSuccess);
  }
  void hold(Keepalive memory) const { compute_->hold(std::move(memory)); }
  // What the Python seam does with a Work.
  void wait(const Work& work) const {
    work.check();
    compute_->wait(work.event());
  }
  void wait(const WorkPtr& work) const { wait(*work); }
  void synchronize() const { compute_->synchronize(); }

 private:
  const NcclJob& job_;
  int rank_;
  std::shared_ptr<Stream> compute_;
};

using Floats = std::shared_ptr<DeviceVector<float>>;
Floats floats(int rank, std::size_t count, float value = -1) {
  return std::make_shared<DeviceVector<float>>(rank, count, value);
}

// Different for every rank, parameter, place and step; sums of a few are exact.
float value(int rank, std::size_t param, std::size_t j, int step) {
  return static_cast<float>((rank + 1) * 1000 + static_cast<int>(param) * 100 + static_cast<int>(j % 50) + step * 7);
}

// Bucket 0: three small parameters; bucket 1: a single one, reduced where it lies; bucket 2: two.
struct Model {
  std::vector<std::size_t> counts{5, 70, 33, 1000, 8, 17};
  std::vector<TensorSize> params;
  BucketPlan plan;

  Model() {
    const std::vector<std::vector<int>> buckets{{0, 1, 2}, {3}, {4, 5}};
    for (const std::size_t count : counts) {
      params.push_back({count, DType::kFloat32});
    }
    for (const auto& bucket : buckets) {
      std::vector<TensorSize> sizes;
      for (const int param : bucket) {
        sizes.push_back(params[static_cast<std::size_t>(param)]);
      }
      plan.buckets.push_back({bucket, Layout(sizes), DType::kFloat32});
    }
  }
};

}  // namespace

TEST(engine_cuda_gradients_are_reduced_behind_the_backward) {
  const Model model;
  constexpr int kRanks = 3;
  constexpr int kSteps = 12;
  const NcclJob job(kRanks);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto gradient_lane = gpu.lane("gradient");
    const auto loss_lane = gpu.lane("loss");
    CommunicatorAllocator memory(loss_lane);
    DeviceStepLoss loss(loss_lane, memory, std::make_shared<double>(0));
    Reducer reducer(gradient_lane, model.plan, model.params, std::make_shared<CommunicatorAllocator>(gradient_lane));
    auto* numbers = static_cast<double*>(loss.numbers().data);
    std::atomic<int> wrong = 0;
    for (int step = 0; step < kSteps; ++step) {
      // Weights of 1, 2, 3: the factor is 1/6, and 1/12 where a step was accumulated before.
      const bool accumulate = step % 3 == 0;
      gpu.launch([numbers, rank, accumulate] {
        numbers[0] = 10.0 * (rank + 1);
        numbers[1] = rank + 1;
        numbers[2] = accumulate ? 0 : 1;
        numbers[3] = rank == 0 ? 1 : 0;
      });
      loss.issue(accumulate);
      if (accumulate) {
        gpu.wait(loss.work());
        continue;
      }
      const double weight = step % 3 == 1 ? 12.0 : 6.0;
      reducer.arm(loss.scale(), loss.ready());
      std::vector<Floats> gradients;
      for (std::size_t p = model.counts.size(); p-- > 0;) {
        const Floats gradient = floats(rank, model.counts[p]);
        gradients.insert(gradients.begin(), gradient);
        // Parameter 1 has no gradient on rank 0, parameter 3 none on rank 1.
        if ((p == 1 && rank == 0) || (p == 3 && rank == 1)) {
          reducer.mark_ready(static_cast<int>(p), nullptr, nullptr);
          continue;
        }
        gpu.launch([to = &(*gradient)[0], count = gradient->size(), rank, p, step] {
          for (std::size_t j = 0; j < count; ++j) {
            to[j] = value(rank, p, j, step);
          }
        });
        reducer.mark_ready(static_cast<int>(p), &(*gradient)[0], gradient);
      }
      reducer.finish([&](const Work& work) { gpu.wait(work); });
      gpu.wait(loss.work());
      // The optimizer's kernel reads what was reduced; the host lets go of the gradients at once.
      std::vector<const float*> reduced;
      for (const Floats& gradient : gradients) {
        reduced.push_back(&(*gradient)[0]);
      }
      gpu.launch([&model, &wrong, reduced, numbers, rank, step, weight] {
        wrong += numbers[0] != 60.0 || numbers[1] != 6.0;
        const auto factor = static_cast<float>(1.0 / weight);
        for (std::size_t p = 0; p < reduced.size(); ++p) {
          if ((p == 1 && rank == 0) || (p == 3 && rank == 1)) {
            continue;
          }
          for (std::size_t j = 0; j < model.counts[p]; ++j) {
            float want = 0;
            for (int r = 0; r < kRanks; ++r) {
              const bool silent = (p == 1 && r == 0) || (p == 3 && r == 1);
              want += silent ? 0.0F : value(r, p, j, step) * factor;
            }
            const float got = reduced[p][j];
            wrong += !(got <= want * 1.0001F && got >= want * 0.9999F);
          }
        }
      });
      gpu.hold(std::make_shared<std::vector<Floats>>(std::move(gradients)));
    }
    gpu.synchronize();
    CHECK_EQ(wrong.load(), 0);
    gradient_lane->close();
    loss_lane->close();
  });
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
}

// One rank reduces what another one keeps: neither host waits, and both are told at their next step.
TEST(engine_cuda_ranks_that_take_other_kinds_of_steps_are_told) {
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("loss");
    CommunicatorAllocator memory(lane);
    DeviceStepLoss loss(lane, memory, std::make_shared<double>(0));
    auto* numbers = static_cast<double*>(loss.numbers().data);
    const auto step = [&](double kind) {
      gpu.launch([numbers, kind] {
        numbers[0] = numbers[1] = 1;
        numbers[2] = kind;
        numbers[3] = 0;
      });
      loss.issue(kind == 0);
      gpu.wait(loss.work());
      gpu.synchronize();
    };
    step(1);
    step(0);
    step(LossSums::kEvaluation);
    step(rank == 0 ? 1 : 0);
    CHECK_THROWS(ErrorKind::kSchemaMismatch, loss.issue(true), "1 of 2 ranks reduce their gradients in this step");
    lane->close();
  });
}

TEST(engine_cuda_weights_that_launches_of_a_graph_keep_are_forgotten_in_order) {
  const NcclJob job(1);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("loss");
    CommunicatorAllocator memory(lane);
    DeviceStepLoss loss(lane, memory, std::make_shared<double>(0));
    auto* numbers = static_cast<double*>(loss.numbers().data);
    const auto step = [&] {
      gpu.launch([numbers] {
        numbers[0] = numbers[1] = numbers[3] = 1;
        numbers[2] = 0;
      });
      loss.issue(true);
      gpu.wait(loss.work());
    };
    step();
    gpu.synchronize();
    auto* const stream = static_cast<cudaStream_t>(gpu.compute().native_handle());
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    step();
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphExec_t executable = nullptr;
    CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    const Gate gate;
    // One that is still to run is forgotten, and one that comes behind is not.
    gpu.launch(gate.kernel());
    CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    loss.forget();
    std::atomic<double> kept = -1;
    gpu.launch([&kept, numbers] { kept = numbers[LossSums::kKept]; });
    CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    std::this_thread::sleep_for(5ms);
    *gate.open = true;
    gpu.synchronize();
    CHECK_EQ(kept.load(), 0.0);
    CHECK_EQ(numbers[LossSums::kKept], 1.0);
    CHECK_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    lane->close();
  });
}

// What a lane holds it lets go of when it records again. The reducer's hold ends when the caller's stream waits: for
// torch's allocator that is enough, long before the device gets there.
TEST(engine_cuda_gradients_are_not_held_when_the_caller_waits_for_them) {
  const Model model;
  for (const int ranks : {1, 2}) {
    const NcclJob job(ranks);
    job.run_threads([&](int rank) {
      const Gpu gpu(job, rank);
      const auto lane = gpu.lane("gradient");
      Reducer reducer(lane, model.plan, model.params, std::make_shared<CommunicatorAllocator>(lane));
      std::vector<Floats> gradients;  // the memory itself
      for (const std::size_t count : model.counts) {
        gradients.push_back(floats(rank, count, 1));
      }
      const Gate gate;
      gpu.launch(gate.kernel());
      reducer.arm({}, {});
      const auto token = std::make_shared<int>(0);
      for (std::size_t p = gradients.size(); p-- > 0;) {
        reducer.mark_ready(static_cast<int>(p), &(*gradients[p])[0], token);
      }
      CHECK(token.use_count() > 1);
      std::vector<Event> events;
      reducer.finish([&](const Work& work) {
        gpu.wait(work);
        events.push_back(work.event());
      });
      CHECK_EQ(token.use_count(), 1);
      CHECK(!events.back().done());
      *gate.open = true;
      gpu.synchronize();
      lane->close();
    });
  }
}

// Memory of another stream is that stream's: it has not waited, and may be given the memory at once.
TEST(engine_cuda_gradients_of_another_stream_are_held_until_the_lane_lets_go) {
  const Model model;
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const std::array<void*, 2> streams{pooled_stream(rank), pooled_stream(rank)};
    CHECK(streams[0] != streams[1]);
    const auto current = std::make_shared<void*>(streams[0]);
    CommunicatorConfig config = job.config(rank, "gradient");
    config.compute = make_cuda_caller_stream([current] { return *current; }, rank);
    const auto lane = make_nccl_communicator(config);
    Reducer reducer(lane, model.plan, model.params, std::make_shared<CommunicatorAllocator>(lane));
    std::vector<Floats> gradients;
    const auto token = std::make_shared<int>(0);
    reducer.arm({}, {});
    for (std::size_t p = 0; p < model.counts.size(); ++p) {
      gradients.push_back(floats(rank, model.counts[p], 1));
      reducer.mark_ready(static_cast<int>(p), &(*gradients[p])[0], token);
    }
    *current = streams[1];
    reducer.finish([&](const Work& work) { config.compute->wait(work.event()); });
    CHECK(token.use_count() > 1);
    lane->stream().synchronize();
    CHECK(eventually([&] {
      (void)lane->stream().record();
      return token.use_count() == 1;
    }));
    lane->close();
  });
}

TEST(engine_cuda_step_does_not_block_the_host) {
  const Model model;
  const NcclJob job(2);
  std::atomic<std::uint64_t> before = 0;
  std::atomic<int> there = 0;
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("gradient");
    Reducer reducer(lane, model.plan, model.params, std::make_shared<CommunicatorAllocator>(lane));
    gpu.synchronize();
    ++there;
    CHECK(eventually([&] { return there >= 2; }));
    if (rank == 0) {
      before = fake_cuda::synchronising_calls();
    }
    ++there;
    CHECK(eventually([&] { return there >= 4; }));
    // The device stands still until the host has issued everything: a host that waited for it would hang here.
    auto released = std::make_shared<std::atomic<bool>>(false);
    gpu.launch([released] {
      while (!*released) {
        std::this_thread::yield();
      }
    });
    std::vector<Floats> gradients;
    reducer.arm({}, {});
    for (std::size_t p = 0; p < model.counts.size(); ++p) {
      gradients.push_back(floats(rank, model.counts[p], 1));
      reducer.mark_ready(static_cast<int>(p), &(*gradients[p])[0], gradients[p]);
    }
    const auto works = reducer.flush();
    CHECK_EQ(works.size(), model.plan.buckets.size());
    for (const WorkPtr& work : works) {
      CHECK(!work->done());
      gpu.wait(work);
    }
    if (rank == 0) {
      CHECK_EQ(fake_cuda::synchronising_calls(), before.load());
    }
    ++there;
    CHECK(eventually([&] { return there >= 6; }));
    *released = true;
    gpu.synchronize();
    for (const WorkPtr& work : works) {
      CHECK(work->done());
    }
    for (const Floats& gradient : gradients) {
      CHECK_EQ((*gradient)[0], 2.0F);
    }
    lane->close();
  });
}

namespace {

// A message whose values tell its number; sent from tensors that a kernel writes.
Schema schema_of(const std::vector<std::size_t>& counts) {
  Schema schema;
  schema.structure = "s";
  for (const std::size_t count : counts) {
    schema.tensors.push_back({DType::kFloat32, false, {static_cast<std::int64_t>(count)}});
  }
  return schema;
}

WorkPtr send_from_kernel(const Gpu& gpu, SendEdge& edge, int rank, const std::vector<std::size_t>& counts,
                         int message) {
  auto held = std::make_shared<std::vector<Floats>>();
  std::vector<const void*> data;
  for (const std::size_t count : counts) {
    held->push_back(floats(rank, count));
    data.push_back(&(*held->back())[0]);
  }
  gpu.launch([data, counts, message, rank] {
    for (std::size_t t = 0; t < data.size(); ++t) {
      for (std::size_t j = 0; j < counts[t]; ++j) {
        const_cast<float*>(static_cast<const float*>(data[t]))[j] = value(rank, t, j, message);
      }
    }
  });
  gpu.hold(held);
  return edge.send(schema_of(counts), std::vector<Source>(data.begin(), data.end()), held, message);
}

// Reads the message by a kernel, and lets go of its slot when that is issued, not when it has run.
void read_by_kernel(const Gpu& gpu, const Receipt& receipt, int from, int message,
                    const std::shared_ptr<std::atomic<int>>& wrong) {
  gpu.wait(receipt.work);
  std::vector<std::pair<const void*, std::size_t>> tensors;
  for (std::size_t t = 0; t < receipt.message->schema().tensors.size(); ++t) {
    tensors.emplace_back(receipt.message->data(t), receipt.message->schema().tensors[t].count());
  }
  gpu.launch([tensors, from, message, wrong] {
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      for (std::size_t j = 0; j < tensors[t].second; ++j) {
        float got = 0;
        std::memcpy(&got, static_cast<const char*>(tensors[t].first) + j * sizeof got, sizeof got);
        *wrong += got != value(from, t, j, message);
      }
    }
  });
}

void messages_both_ways(SchemaMode mode, const std::function<std::vector<std::size_t>(int)>& counts_of) {
  constexpr int kMessages = 40;
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const int peer = 1 - rank;
    // A lane for each direction, made in one order on both ranks.
    const auto up = gpu.lane("up");
    const auto down = gpu.lane("down");
    const auto& out = rank == 0 ? up : down;
    const auto& in = rank == 0 ? down : up;
    auto wrong = std::make_shared<std::atomic<int>>(0);
    {
      SendEdge sender({out, peer, mode}, std::make_shared<CommunicatorAllocator>(out));
      RecvEdge receiver({in, peer, mode}, std::make_shared<CommunicatorAllocator>(in));
      for (int message = 0; message < kMessages; ++message) {
        // Both orders of issue, as a plan would have them: the lower rank sends first.
        if (rank == 0) {
          (void)send_from_kernel(gpu, sender, rank, counts_of(message), message);
        }
        Receipt receipt = receiver.recv(message);
        if (rank == 1) {
          (void)send_from_kernel(gpu, sender, rank, counts_of(message), message);
        }
        read_by_kernel(gpu, receipt, peer, message, wrong);
      }
      gpu.synchronize();
    }
    CHECK_EQ(wrong->load(), 0);
    up->close();
    down->close();
  });
}

}  // namespace

TEST(engine_cuda_messages_of_changing_shapes) {
  messages_both_ways(SchemaMode::kPerMessage, [](int message) -> std::vector<std::size_t> {
    switch (message % 4) {
      case 0:
        return {10, 300, 7};
      case 1:
        return {1000};  // one tensor travels where it lies
      case 2:
        return {10, 300, 7};
      default:
        return {64, static_cast<std::size_t>(message + 1)};
    }
  });
}

TEST(engine_cuda_messages_of_a_frozen_schema) {
  messages_both_ways(SchemaMode::kFrozen, [](int) -> std::vector<std::size_t> { return {33, 120, 8}; });
}

// Sender and receiver have to put their lanes into the graph: what ran at once would meet nobody.
namespace {

void capture_messages_of(const std::vector<std::size_t>& counts) {
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("up");
    std::vector<Floats> tensors;
    std::vector<Source> sources;
    for (const std::size_t count : counts) {
      tensors.push_back(floats(rank, count));
      sources.emplace_back(&(*tensors.back())[0]);
    }
    const auto wrong = std::make_shared<std::atomic<int>>(0);
    const auto looks = std::make_shared<std::atomic<int>>(0);
    const auto step = std::make_shared<std::atomic<int>>(0);  // kernels of a replay see that of the replay
    {
      std::unique_ptr<SendEdge> sender;
      std::unique_ptr<RecvEdge> receiver;
      if (rank == 0) {
        sender = std::make_unique<SendEdge>(EdgeConfig{lane, 1, SchemaMode::kFrozen},
                                            std::make_shared<CommunicatorAllocator>(lane));
      } else {
        receiver = std::make_unique<RecvEdge>(EdgeConfig{lane, 0, SchemaMode::kFrozen},
                                              std::make_shared<CommunicatorAllocator>(lane));
      }
      const auto move = [&](int message) {
        if (rank == 0) {
          gpu.launch([tensors, counts, step] {
            for (std::size_t t = 0; t < tensors.size(); ++t) {
              for (std::size_t j = 0; j < counts[t]; ++j) {
                (*tensors[t])[j] = value(0, t, j, step->load());
              }
            }
          });
          gpu.wait(sender->send(schema_of(counts), sources, nullptr, message));
          return;
        }
        const Receipt receipt = receiver->recv(message);
        gpu.wait(receipt.work);
        std::vector<const float*> arrived;
        for (std::size_t t = 0; t < counts.size(); ++t) {
          arrived.push_back(static_cast<const float*>(receipt.message->data(t)));
        }
        gpu.launch([arrived, counts, step, wrong, looks] {
          ++*looks;
          for (std::size_t t = 0; t < counts.size(); ++t) {
            for (std::size_t j = 0; j < counts[t]; ++j) {
              *wrong += arrived[t][j] != value(0, t, j, step->load());
            }
          }
        });
      };
      for (int message = 0; message < 3; ++message, ++*step) {
        move(message);
        gpu.synchronize();
      }
      auto* const stream = static_cast<cudaStream_t>(gpu.compute().native_handle());
      CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      move(3);
      cudaGraph_t graph = nullptr;
      CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      cudaGraphExec_t executable = nullptr;
      CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
      for (int replay = 0; replay < 3; ++replay, ++*step) {
        CHECK_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
        gpu.synchronize();
      }
      CHECK_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
      CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    }
    CHECK_EQ(looks->load(), rank == 0 ? 0 : 6);
    CHECK_EQ(wrong->load(), 0);
    lane->close();
  });
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
}

}  // namespace

TEST(engine_cuda_frozen_messages_in_a_graph) { capture_messages_of({33, 120, 8}); }

// Sent from where it lies, into memory of ncclMemAlloc: NCCL must not use that in place.
TEST(engine_cuda_frozen_message_of_one_tensor_in_a_graph) { capture_messages_of({5000}); }

TEST(engine_cuda_host_that_runs_ahead_takes_no_more_memory) {
  constexpr int kMessages = 20;
  const std::vector<std::size_t> counts{33, 120, 8};
  const NcclJob job(2);
  std::atomic<bool> all_sent = false;
  std::atomic<bool> all_read = false;
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("up");
    DeviceVector<float> one(rank, 1, 0);  // the first message keeps its host until the peer has asked for it
    (rank == 0 ? lane->send(one.view(), 1) : lane->recv(one.view(), 0))->wait();
    auto wrong = std::make_shared<std::atomic<int>>(0);
    if (rank == 0) {
      SendEdge sender({lane, 1, SchemaMode::kFrozen}, std::make_shared<CommunicatorAllocator>(lane));
      (void)send_from_kernel(gpu, sender, rank, counts, 0);
      const std::size_t of_one = sender.slot_bytes();
      CHECK(of_one > 0);
      for (int message = 1; message < kMessages; ++message) {
        (void)send_from_kernel(gpu, sender, rank, counts, message);
      }
      CHECK_EQ(sender.slot_bytes(), of_one);  // none of them has left yet
      all_sent = true;
      CHECK(eventually([&] { return all_read.load(); }));
    } else {
      CHECK(eventually([&] { return all_sent.load(); }));
      RecvEdge receiver({lane, 0, SchemaMode::kFrozen}, std::make_shared<CommunicatorAllocator>(lane));
      const std::size_t before = fake_nccl::live_allocations();
      for (int message = 0; message < kMessages; ++message) {
        read_by_kernel(gpu, receiver.recv(message), 0, message, wrong);
      }
      CHECK_EQ(fake_nccl::live_allocations(), before + 1);
      gpu.synchronize();
      all_read = true;
    }
    CHECK_EQ(wrong->load(), 0);
    lane->close();
  });
}

// Its host has asked for message #1 and is gone before the sender's host issues it: the GPU takes it all the same.
TEST(engine_cuda_frozen_messages_reach_a_receiver_that_has_gone_ahead) {
  const std::vector<std::size_t> counts{33, 120, 8};
  const NcclJob job(2);
  std::atomic<bool> is_gone = false;
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("up");
    const auto memory = std::make_shared<CommunicatorAllocator>(lane);
    auto wrong = std::make_shared<std::atomic<int>>(0);
    if (rank == 0) {
      SendEdge sender({lane, 1, SchemaMode::kFrozen}, memory);
      (void)send_from_kernel(gpu, sender, rank, counts, 0);
      CHECK(eventually([&] { return is_gone.load(); }));
      constexpr auto kLooks = 10ms;  // Refusal does every 5 ms
      std::this_thread::sleep_for(kLooks);
      (void)send_from_kernel(gpu, sender, rank, counts, 1);
      std::this_thread::sleep_for(kLooks);
      CHECK_THROWS(ErrorKind::kPeerError, send_from_kernel(gpu, sender, rank, counts, 2), "rank 1 has closed its end");
    } else {
      {
        RecvEdge receiver({lane, 0, SchemaMode::kFrozen}, memory);
        read_by_kernel(gpu, receiver.recv(0), 0, 0, wrong);
        read_by_kernel(gpu, receiver.recv(1), 0, 1, wrong);
      }
      is_gone = true;
    }
    gpu.synchronize();
    CHECK_EQ(wrong->load(), 0);
    lane->close();
  });
}

TEST(engine_cuda_what_is_not_received_yet_is_under_way) {
  const NcclJob job(2);
  std::atomic<bool> looked = false;
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("up");
    if (rank == 0) {
      SendEdge sender({lane, 1}, std::make_shared<CommunicatorAllocator>(lane));
      CHECK(!sender.is_under_way());
      (void)send_from_kernel(gpu, sender, rank, {10, 300}, 0);  // connects
      CHECK(eventually([&] { return !sender.is_under_way(); }, 20s));
      for (int message = 1; message < 4; ++message) {
        (void)send_from_kernel(gpu, sender, rank, {10, 300}, message);  // nobody keeps the Work
      }
      CHECK(sender.is_under_way());
      looked = true;
      CHECK(eventually([&] { return !sender.is_under_way(); }, 20s));
    } else {
      auto wrong = std::make_shared<std::atomic<int>>(0);
      RecvEdge receiver({lane, 0}, std::make_shared<CommunicatorAllocator>(lane));
      for (int message = 0; message < 4; ++message) {
        CHECK(message == 0 || eventually([&] { return looked.load(); }, 20s));
        read_by_kernel(gpu, receiver.recv(message), 0, message, wrong);
      }
      gpu.synchronize();
      CHECK_EQ(wrong->load(), 0);
    }
    gpu.synchronize();
    lane->close();
  });
}

TEST(engine_cuda_message_that_does_not_come) {
  // With patience: the lane is made within the limit as well.
  CHECK_EQ(with_patience(300ms,
                         [](milliseconds limit) {
                           NcclJob job(2, {}, limit);
                           std::vector<std::string> wrong(2);
                           job.run_threads([&](int rank) {
                             const Gpu gpu(job, rank);
                             std::shared_ptr<Communicator> lane;
                             try {
                               lane = gpu.lane("up");
                             } catch (const Error& error) {
                               wrong[static_cast<std::size_t>(rank)] = error.what();
                               job.control(rank)->abort(error.what());
                               return;
                             }
                             if (rank == 1) {
                               RecvEdge receiver({lane, 0}, std::make_shared<CommunicatorAllocator>(lane));
                               const Receipt receipt = receiver.recv(-1);
                               CHECK_THROWS(ErrorKind::kTimedOut, receipt.work->wait(), "no message came in time");
                               CHECK_THROWS(ErrorKind::kTimedOut, receipt.work->check(), "no message came in time");
                               const Receipt next = receiver.recv(-1);
                               CHECK_THROWS(ErrorKind::kTimedOut, next.work->wait(), "no message came in time");
                             }
                             lane->close();
                           });
                           return wrong[0] + wrong[1];
                         }),
           "");
}

// However patient its receiver: a stream waits for it, and would for ever.
TEST(engine_cuda_frozen_message_that_does_not_come_to_a_patient_receiver) {
  CHECK_EQ(with_patience(500ms,
                         [](milliseconds limit) {
                           NcclJob job(2, {}, limit);
                           std::vector<std::string> wrong(2);
                           std::atomic<bool> over = false;
                           job.run_threads([&](int rank) {
                             const Gpu gpu(job, rank);
                             try {
                               const auto lane = gpu.lane("up");
                               const auto allocator = std::make_shared<CommunicatorAllocator>(lane);
                               const EdgeConfig config{lane, 1 - rank, SchemaMode::kFrozen};
                               const Floats tensor = floats(rank, 33);
                               if (rank == 0) {
                                 SendEdge sender(config, allocator);
                                 gpu.wait(sender.send(schema_of({33}), {Source(&(*tensor)[0])}, tensor, -1));
                                 gpu.synchronize();
                                 CHECK(eventually([&] { return over.load(); }, 20s));
                               } else {
                                 RecvEdge receiver(config, allocator);
                                 gpu.wait(receiver.recv(-1).work);
                                 gpu.synchronize();
                                 OpOptions patient;
                                 patient.timeout = std::chrono::hours(1);
                                 const auto error = error_of(*receiver.recv(-1, patient).work);
                                 over = true;
                                 CHECK(error && error->kind() == ErrorKind::kTimedOut);
                               }
                             } catch (const Error& error) {
                               over = true;
                               wrong[static_cast<std::size_t>(rank)] = error.what();
                               job.control(rank)->abort(error.what());
                             }
                           });
                           return wrong[0] + wrong[1];
                         }),
           "");
}

// The host is what waits for a header: Ctrl-C must end that, and the message is the next call's.
TEST(engine_cuda_wait_for_a_header_looks_at_signals) {
  struct Signal {};
  const NcclJob job(2);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("up");
    const auto wrong = std::make_shared<std::atomic<int>>(0);
    if (rank == 0) {
      SendEdge sender({lane, 1}, std::make_shared<CommunicatorAllocator>(lane));
      (void)job.control(0)->receive(1, 77, deadline_after(10s));
      (void)send_from_kernel(gpu, sender, rank, {10, 300}, 0);
      gpu.synchronize();
    } else {
      RecvEdge receiver({lane, 0}, std::make_shared<CommunicatorAllocator>(lane));
      OpOptions options;
      options.poll = +[] { throw Signal(); };
      bool interrupted = false;
      try {
        (void)receiver.recv(-1, options);
      } catch (const Signal&) {
        interrupted = true;
      }
      CHECK(interrupted);
      job.control(1)->send(0, 77, "interrupted");
      Receipt receipt = receiver.recv(0);
      CHECK_EQ(receipt.sequence, 0U);
      read_by_kernel(gpu, receipt, 0, 0, wrong);
      gpu.synchronize();
    }
    CHECK_EQ(wrong->load(), 0);
    lane->close();
  });
}

TEST(engine_cuda_peer_that_fails_ends_a_step) {
  NcclJob job(2);
  job.expect_violations();
  const Model model;
  std::atomic<int> there = 0;
  std::atomic<int> left = 2;
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("gradient");
    lane->barrier()->wait();  // connects
    Reducer reducer(lane, model.plan, model.params, std::make_shared<CommunicatorAllocator>(lane));
    gpu.synchronize();
    // What a program does that never blocks on a Work: it asks whether an error is known, and goes on.
    const WorkPtr barrier = rank == 0 ? lane->barrier() : nullptr;
    ++there;
    CHECK(eventually([&] { return there == 2; }));
    if (rank == 1) {
      job.control(rank)->abort("rank 1 ran out of ideas");
    } else {
      reducer.arm({}, {});
      std::vector<Floats> gradients;
      try {
        for (std::size_t p = 0; p < model.counts.size(); ++p) {
          gradients.push_back(floats(rank, model.counts[p], 1));
          reducer.mark_ready(static_cast<int>(p), &(*gradients[p])[0], gradients[p]);
        }
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kPeerError);
      }
      CHECK_THROWS(ErrorKind::kPeerError, reducer.finish(), "ran out of ideas");
      CHECK(eventually([&] {
        try {
          barrier->check();
          return false;
        } catch (const Error& error) {
          return error.kind() == ErrorKind::kPeerError;
        }
      }));
      CHECK_THROWS(ErrorKind::kPeerError, lane->follow(barrier, barrier->what(), nullptr)->check(), "ran out of ideas");
    }
    --left;
    CHECK(eventually([&] { return left == 0; }, 20000ms));
  });
}

namespace {

// Calls of the runtime that take the host a microsecond and more. Queries are left out: the watchdog asks as well.
std::map<std::string, std::uint64_t> count_calls() {
  std::map<std::string, std::uint64_t> calls;
  for (const char* name : {"cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamIsCapturing", "fake_cuda_enqueue"}) {
    calls[name] = fake_cuda::calls(name);
  }
  return calls;
}

// Of all ranks between two moments, while they stand still.
class CountedCalls {
 public:
  explicit CountedCalls(const NcclJob& job) : job_(job) {}
  void begin(int rank) { take(rank, 1, before_); }
  void end(int rank) { take(rank, 3, after_); }
  [[nodiscard]] double each(const char* name, double times) const {
    return static_cast<double>(after_.at(name) - before_.at(name)) / times;
  }

 private:
  void take(int rank, std::uint64_t meeting, std::map<std::string, std::uint64_t>& calls) {
    job_.meet(rank, meeting);
    if (rank == 0) {
      calls = count_calls();
    }
    job_.meet(rank, meeting + 1);
  }

  const NcclJob& job_;
  std::map<std::string, std::uint64_t> before_;
  std::map<std::string, std::uint64_t> after_;
};

}  // namespace

TEST(engine_cuda_a_message_takes_few_calls_of_the_runtime) {
  constexpr int kMessages = 20;
  const NcclJob job(2);
  CountedCalls calls(job);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("up");
    const std::vector<std::size_t> counts{33, 120, 8};
    std::vector<Floats> tensors;
    std::vector<Source> sources;
    for (const std::size_t count : counts) {
      tensors.push_back(floats(rank, count, 3));
      sources.emplace_back(&(*tensors.back())[0]);
    }
    const auto schema = schema_of(counts);
    {
      const EdgeConfig config{lane, 1 - rank, SchemaMode::kFrozen};
      std::optional<SendEdge> sender;
      std::optional<RecvEdge> receiver;
      rank == 0 ? (void)sender.emplace(config, std::make_shared<CommunicatorAllocator>(lane))
                : (void)receiver.emplace(config, std::make_shared<CommunicatorAllocator>(lane));
      for (int message = 0; message < 2 + kMessages; ++message) {
        if (message == 2) {
          gpu.synchronize();
          calls.begin(rank);
        }
        if (sender) {
          (void)sender->send(schema, sources, nullptr, message);
        } else {
          gpu.wait(receiver->recv(message).work);
        }
      }
      calls.end(rank);
      gpu.synchronize();
    }
    lane->close();
  });
  const auto a_message = [&](const char* name) { return calls.each(name, kMessages); };
  // The sender's pack and both ends' NCCL.
  CHECK(a_message("fake_cuda_enqueue") < 3.2);
  // The sender: what its tensors come behind, and the end of the send. The receiver: the end of the receipt, and what
  // its slot is free behind.
  CHECK(a_message("cudaEventRecord") < 4.2);
  CHECK(a_message("cudaStreamWaitEvent") <= 3.0);
  CHECK(a_message("cudaStreamIsCapturing") < 14.0);
}

TEST(engine_cuda_a_bucket_takes_few_calls_of_the_runtime) {
  const Model model;
  constexpr int kRanks = 2;
  constexpr int kSteps = 8;
  const NcclJob job(kRanks);
  CountedCalls calls(job);
  job.run_threads([&](int rank) {
    const Gpu gpu(job, rank);
    const auto lane = gpu.lane("gradient");
    Reducer reducer(lane, model.plan, model.params, std::make_shared<CommunicatorAllocator>(lane));
    std::vector<Floats> gradients;
    for (const std::size_t count : model.counts) {
      gradients.push_back(floats(rank, count));
    }
    for (int step = 0; step < 2 + kSteps; ++step) {
      if (step == 2) {
        calls.begin(rank);
      }
      reducer.arm({}, {});
      for (std::size_t p = gradients.size(); p-- > 0;) {
        reducer.mark_ready(static_cast<int>(p), &(*gradients[p])[0], gradients[p]);
      }
      reducer.finish([&](const Work& work) { gpu.wait(work); });
    }
    calls.end(rank);
    gpu.synchronize();
    lane->close();
  });
  // Two of the three buckets are packed and unpacked, one is reduced where it lies; nothing has to be scaled.
  const double buckets = static_cast<double>(model.plan.buckets.size()) * kSteps * kRanks;
  const auto a_bucket = [&](const char* name) { return calls.each(name, buckets); };
  CHECK(a_bucket("fake_cuda_enqueue") < 2.4);
  CHECK(a_bucket("cudaEventRecord") < 2.1);  // the gradients, and the end of it all
  CHECK(a_bucket("cudaStreamWaitEvent") < 2.1);
  CHECK(a_bucket("cudaStreamIsCapturing") < 8.0);
}
