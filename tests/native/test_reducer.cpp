// engine/reducer and engine/step_loss: buckets in plan order, sums in rank order, and every way to fail.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/solo/solo_communicator.h"
#include "engine/reducer.h"
#include "engine/step_loss.h"
#include "native/check.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

using Gradients = std::vector<std::shared_ptr<std::vector<float>>>;

std::shared_ptr<Allocator> heap() { return std::make_shared<HeapAllocator>(); }

// One bucket per entry of `buckets`, each of parameters with these counts.
struct Model {
  explicit Model(const std::vector<std::vector<std::size_t>>& buckets) {
    int next = 0;
    for (const auto& counts : buckets) {
      std::vector<TensorSize> sizes;
      std::vector<int> indices;
      for (std::size_t count : counts) {
        sizes.push_back({count, DType::kFloat32});
        indices.push_back(next++);
      }
      params.insert(params.end(), sizes.begin(), sizes.end());
      plan.buckets.push_back({indices, Layout(sizes), DType::kFloat32});
    }
  }
  [[nodiscard]] std::unique_ptr<Reducer> reducer(std::shared_ptr<Communicator> communicator) const {
    return std::make_unique<Reducer>(std::move(communicator), plan, params, heap());
  }
  // Gradient p of a rank: values that encode rank, parameter and place.
  [[nodiscard]] Gradients gradients(int rank, float step = 0) const {
    Gradients all;
    for (std::size_t p = 0; p < params.size(); ++p) {
      auto values = std::make_shared<std::vector<float>>();
      for (std::size_t j = 0; j < params[p].count; ++j) {
        values->push_back(value(rank, p, j, step));
      }
      all.push_back(std::move(values));
    }
    return all;
  }
  // Sums of these depend on their order, so that "in rank order" can be seen.
  static float value(int rank, std::size_t p, std::size_t j, float step) {
    return std::ldexp(1.0F + static_cast<float>(p * 100 + j) / 1024.0F, 9 * rank) + step / 3.0F;
  }
  std::vector<TensorSize> params;
  BucketPlan plan;
};

Scale scale_of(double factor) { return {std::make_shared<double>(factor)}; }

void mark(Reducer& reducer, const Gradients& gradients, std::size_t p) {
  reducer.mark_ready(static_cast<int>(p), gradients[p]->data(), gradients[p]);
}

// ((r0 * f) + (r1 * f)) + ... in float32, as one process would add them. Ranks in `silent` contribute nothing.
void check_sums(const Model& model, const Gradients& got, int size, float factor, float step = 0,
                const std::function<bool(int, std::size_t)>& silent = nullptr) {
  for (std::size_t p = 0; p < got.size(); ++p) {
    for (std::size_t j = 0; j < model.params[p].count; ++j) {
      float want = 0;
      for (int r = 0; r < size; ++r) {
        const float term = silent && silent(r, p) ? 0 : Model::value(r, p, j, step) * factor;
        want = r == 0 ? term : want + term;
      }
      if ((*got[p])[j] != want) {
        check::fail(__FILE__, __LINE__, str("gradient ", p, "[", j, "]: ", (*got[p])[j], ", not ", want));
        break;
      }
    }
  }
}

// Pretends to be rank 0 of several, and writes down what is asked of it.
class Recorder final : public HostCommunicator {
 public:
  using Body = std::function<void(std::size_t call)>;
  explicit Recorder(
      Body body = [](std::size_t) {}, int size = 2)
      : HostCommunicator(pretended(size)), body_(std::move(body)) {
    watch_peers();
  }
  ~Recorder() override { shut_down(); }
  [[nodiscard]] const char* transport() const noexcept override { return "recorder"; }
  [[nodiscard]] std::vector<BufferView> seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

 protected:
  [[nodiscard]] std::shared_ptr<Communicator> make_child(CommunicatorConfig) override { return nullptr; }
  void execute(const Operation& operation, Deadline) override {
    std::size_t call = 0;
    {
      const std::lock_guard lock(mutex_);
      call = seen_.size();
      seen_.push_back(operation.output);
    }
    body_(call);
  }
  void interrupt() noexcept override {}

 private:
  static CommunicatorConfig pretended(int size) {
    CommunicatorConfig config;
    config.name = "pretended";
    for (int rank = 0; rank < size; ++rank) {
      config.ranks.push_back(rank);
    }
    config.stream = make_worker_stream("recorder");
    config.control = make_solo_control();
    return config;
  }
  Body body_;
  mutable std::mutex mutex_;
  std::vector<BufferView> seen_;
};

std::shared_ptr<Communicator> one_rank() {
  CommunicatorConfig config;
  config.name = "one";
  config.ranks = {0};
  config.stream = make_worker_stream("one");
  config.control = make_solo_control();
  return make_solo_communicator(std::move(config));
}

// A lane that stands still until it is opened.
class Gate {
 public:
  explicit Gate(Stream& stream) {
    stream.enqueue([open = open_] {
      while (!*open) {
        std::this_thread::sleep_for(20us);
      }
    });
  }
  ~Gate() { *open_ = true; }
  void open() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

// --- Order -----------------------------------------------------------------------------------------------------------

TEST(reducer_issues_in_plan_order_whatever_the_ready_order) {
  const Model model({{3}, {17, 2}, {40}});  // of three sizes: a wrong order is a mismatch on the wire
  const std::vector<std::vector<std::size_t>> bucket_params{{0}, {1, 2}, {3}};
  std::vector<std::vector<std::size_t>> orders;
  std::vector<std::size_t> order{0, 1, 2};
  do {
    orders.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));

  ThreadJob(2, 31).run([&](const std::shared_ptr<Communicator>& world) {
    const auto reducer = model.reducer(world);
    for (std::size_t i = 0; i < orders.size(); ++i) {
      for (std::size_t other = 0; other < orders.size(); ++other) {
        // The two ranks see their gradients in different orders.
        const auto& mine = orders[world->rank() == 0 ? i : other];
        const Gradients gradients = model.gradients(world->rank());
        reducer->arm({}, {});
        std::array<bool, 3> complete{};
        for (std::size_t bucket : mine) {
          for (std::size_t p : bucket_params[bucket]) {
            CHECK(reducer->awaits(static_cast<int>(p)));
            mark(*reducer, gradients, p);
            CHECK(!reducer->awaits(static_cast<int>(p)));
          }
          complete[bucket] = true;
          // Before finish(): all that is complete from the front, and nothing else.
          const auto front = std::find(complete.begin(), complete.end(), false) - complete.begin();
          CHECK_EQ(reducer->issued(), front);
        }
        reducer->finish();
        check_sums(model, gradients, 2, 1);
      }
    }
  });
}

TEST(reducer_reduces_while_the_backward_runs) {
  const auto recorder = std::make_shared<Recorder>();
  const Model model({{4}, {4}});
  const auto reducer = model.reducer(recorder);
  const Gradients gradients = model.gradients(0);
  reducer->arm({}, {});
  mark(*reducer, gradients, 0);
  CHECK(eventually([&] { return recorder->seen().size() == 1; }));  // nobody called finish() yet
  mark(*reducer, gradients, 1);
  reducer->finish();
  CHECK_EQ(recorder->seen().size(), 2);
}

TEST(reducer_waits_for_the_plans_permission) {
  const Model model({{4}, {4}, {4}});
  const auto recorder = std::make_shared<Recorder>();
  const auto reducer = model.reducer(recorder);
  for (int step = 0; step < 2; ++step) {  // a permission ends with its step
    const Gradients gradients = model.gradients(0);
    reducer->arm({}, {}, 1);
    for (std::size_t p = 0; p < 3; ++p) {
      mark(*reducer, gradients, p);
      CHECK_EQ(reducer->issued(), 1);
    }
    reducer->permit(2);
    CHECK_EQ(reducer->issued(), 2);
    reducer->finish();
    CHECK_EQ(recorder->seen().size(), 3 * (step + 1));
  }
  CHECK_THROWS(ErrorKind::kInternal, reducer->permit(1), "permit() without arm()");
}

TEST(reducer_reduces_single_gradients_where_they_lie) {
  const auto recorder = std::make_shared<Recorder>();
  const Model model({{7}, {7, 7}});
  const auto reducer = model.reducer(recorder);
  const Gradients gradients = model.gradients(0);
  reducer->arm({}, {});
  for (std::size_t p = 0; p < 3; ++p) {
    mark(*reducer, gradients, p);
  }
  reducer->finish();
  const auto seen = recorder->seen();
  CHECK(seen[0].data == gradients[0]->data());
  CHECK_EQ(seen[0].count, 7);
  CHECK(seen[1].data != gradients[1]->data());
  CHECK_EQ(seen[1].count, 32);
  CHECK_EQ(seen[1].bytes, 128);
}

// --- Values ----------------------------------------------------------------------------------------------------------

TEST(reducer_sums_scaled_gradients_in_rank_order) {
  const Model model({{1}, {5, 0, 300}, {1000, 3}, {0}, {64}});
  for (int size : {2, 3, 4}) {
    ThreadJob(size, static_cast<unsigned>(size)).run([&](const std::shared_ptr<Communicator>& world) {
      const auto reducer = model.reducer(world);
      for (int step = 0; step < 5; ++step) {
        const Gradients gradients = model.gradients(world->rank(), static_cast<float>(step));
        const float factor = 1.0F / static_cast<float>(step + 3);
        reducer->arm(step % 2 == 0 ? scale_of(factor) : Scale{nullptr, factor}, {});
        for (std::size_t p = gradients.size(); p-- > 0;) {
          mark(*reducer, gradients, p);
        }
        reducer->finish();
        check_sums(model, gradients, world->size(), factor, static_cast<float>(step));
      }
    });
  }
}

TEST(reducer_takes_null_gradients_as_zeros) {
  // In a bucket of several, and alone in one: there the other rank reduces where its gradient lies.
  const Model model({{5, 6}, {7}, {16}, {9}});
  const auto silent = [](int rank, std::size_t p) {
    return (rank == 0 && (p == 0 || p == 2)) || (rank == 1 && (p == 1 || p == 3)) || p == 4;
  };
  for (const bool marks_null : {true, false}) {
    ThreadJob(2, 32).run([&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      const auto reducer = model.reducer(world);
      for (int step = 0; step < 3; ++step) {
        const Gradients gradients = model.gradients(rank);
        reducer->arm(scale_of(0.5), {});
        for (std::size_t p = 0; p < gradients.size(); ++p) {
          if (!silent(rank, p)) {
            mark(*reducer, gradients, p);
          } else if (marks_null) {
            reducer->mark_ready(static_cast<int>(p), nullptr, nullptr);
          }  // else finish() does
        }
        reducer->finish();
        // A rank that contributes zeros keeps no result.
        for (std::size_t p = 0; p < gradients.size(); ++p) {
          for (std::size_t j = 0; j < gradients[p]->size(); ++j) {
            const float own = Model::value(rank, p, j, 0);
            const float theirs = silent(1 - rank, p) ? 0 : 0.5F * Model::value(1 - rank, p, j, 0);
            CHECK_EQ((*gradients[p])[j], silent(rank, p) ? own : 0.5F * own + theirs);
          }
        }
      }
    });
  }
}

TEST(reducer_reads_the_scale_after_its_event) {
  const Model model({{5, 6}, {7}});
  ThreadJob(2, 33).run([&](const std::shared_ptr<Communicator>& world) {
    const auto reducer = model.reducer(world);
    const auto loss_lane = make_worker_stream("loss");
    for (int step = 0; step < 10; ++step) {
      const auto factor = std::make_shared<double>(std::nan(""));
      Gate gate(*loss_lane);
      loss_lane->enqueue([factor] {
        std::this_thread::sleep_for(100us);
        *factor = 0.25;
      });
      const Gradients gradients = model.gradients(world->rank());
      reducer->arm({factor}, loss_lane->record());
      for (std::size_t p = 0; p < gradients.size(); ++p) {
        mark(*reducer, gradients, p);
      }
      CHECK_EQ(reducer->issued(), 2);  // the host does not wait for the factor
      gate.open();
      reducer->finish();
      check_sums(model, gradients, 2, 0.25F);
    }
  });
}

TEST(reducer_of_one_rank_only_scales) {
  const Model model({{5, 6, 0}, {7}});
  const auto reducer = model.reducer(one_rank());
  for (double factor : {0.5, 1.0}) {
    const Gradients gradients = model.gradients(0);
    reducer->arm(scale_of(factor), {});
    mark(*reducer, gradients, 3);
    mark(*reducer, gradients, 0);
    CHECK_EQ(reducer->issued(), 0);
    mark(*reducer, gradients, 1);
    reducer->mark_ready(2, nullptr, nullptr);
    CHECK_EQ(reducer->issued(), 2);
    reducer->finish();
    check_sums(model, gradients, 1, static_cast<float>(factor));
  }
  const Gradients gradients = model.gradients(0);
  reducer->arm({}, {});
  reducer->finish();  // nothing was marked at all
  check_sums(model, gradients, 1, 1);
}

TEST(reducer_works_on_the_callers_stream) {
  CommunicatorConfig config;
  config.name = "one";
  config.ranks = {0};
  config.stream = make_caller_stream();
  config.control = make_solo_control();
  const Model model({{5}, {7, 3}});
  const auto reducer = model.reducer(make_solo_communicator(std::move(config)));
  const Gradients gradients = model.gradients(0);
  reducer->arm(scale_of(3), {});
  for (std::size_t p = 0; p < 3; ++p) {
    mark(*reducer, gradients, p);
  }
  reducer->finish();
  check_sums(model, gradients, 1, 3);
}

TEST(reducer_of_a_model_without_parameters) {
  Reducer reducer(std::make_shared<Recorder>(), {}, {}, heap());
  reducer.arm({}, {});
  CHECK(reducer.flush().empty());
}

// --- States ----------------------------------------------------------------------------------------------------------

TEST(reducer_state_table) {
  const Model model({{4}, {4, 4}});
  const auto recorder = std::make_shared<Recorder>();
  const auto reducer = model.reducer(recorder);
  const Gradients gradients = model.gradients(0);

  // Idle: marks are ignored, finish is an error.
  mark(*reducer, gradients, 0);
  CHECK_EQ(reducer->issued(), 0);
  CHECK(!reducer->awaits(0));
  CHECK_THROWS(ErrorKind::kInternal, reducer->finish(), "finish() without arm()");
  CHECK_THROWS(ErrorKind::kInternal, reducer->flush(), "finish() without arm()");

  // Armed: marks count, arm is an error.
  reducer->arm({}, {});
  CHECK(reducer->awaits(0));  // the mark before arm() did not count
  CHECK_THROWS(ErrorKind::kInternal, reducer->arm({}, {}), "armed twice");
  mark(*reducer, gradients, 0);
  CHECK_EQ(reducer->issued(), 1);
  CHECK_THROWS(ErrorKind::kInvalidArgument, mark(*reducer, gradients, 0), "parameter 0 was marked ready twice");
  CHECK_THROWS(ErrorKind::kInvalidArgument, reducer->mark_ready(0, nullptr, nullptr), "marked ready twice");
  CHECK_THROWS(ErrorKind::kInvalidArgument, reducer->mark_ready(3, nullptr, nullptr), "parameter 3 of 3");
  CHECK_THROWS(ErrorKind::kInvalidArgument, reducer->mark_ready(-1, nullptr, nullptr), "parameter -1");
  mark(*reducer, gradients, 1);
  CHECK_EQ(reducer->issued(), 1);
  CHECK(reducer->awaits(2));
  const auto works = reducer->flush();
  CHECK_EQ(works.size(), 2);
  for (std::size_t i = 0; i < works.size(); ++i) {
    works[i]->wait();
    CHECK_EQ(works[i]->what().operation, "reduce");
    CHECK_EQ(works[i]->what().sequence, i);
  }

  // Idle again.
  CHECK(!reducer->awaits(2));
  mark(*reducer, gradients, 2);
  CHECK_THROWS(ErrorKind::kInternal, reducer->finish(), "finish() without arm()");
  CHECK_EQ(recorder->seen().size(), 2);
  reducer->arm({}, {});
  CHECK_EQ(reducer->issued(), 0);
  reducer->finish();
  CHECK_EQ(recorder->seen().size(), 4);
}

TEST(reducer_checks_its_plan) {
  const auto make = [](BucketPlan plan, std::vector<TensorSize> params) {
    return Reducer(std::make_shared<Recorder>(), std::move(plan), std::move(params), heap());
  };
  const Model model({{4}, {5, 6}});
  std::vector<TensorSize> params = model.params;
  params.push_back({1, DType::kFloat32});
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(model.plan, params), "leaves out parameter 3");
  params = model.params;
  params.pop_back();
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(model.plan, params), "places parameter 2");
  BucketPlan twice = model.plan;
  twice.buckets[1].params = {1, 1};
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(twice, model.params), "places parameter 1 twice");
  // A plan of another model must not write over the ends of this one's gradients.
  params = model.params;
  params[2].count = 3;
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(model.plan, params), "parameter 2");
  params = model.params;
  params[0].dtype = DType::kBFloat16;
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(model.plan, params), "parameter 0");
  const std::vector<TensorSize> complex{{4, DType::kComplex64}};
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(plan_buckets(complex, {0}), complex), "complex64 cannot be scaled");
  const std::vector<TensorSize> tiny{{4, DType::kFloat8E5M2}};
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(plan_buckets(tiny, {0}), tiny), "cannot be scaled and summed");
  BucketPlan shorter = model.plan;
  shorter.buckets[1].layout = Layout({{5, DType::kFloat32}});
  CHECK_THROWS(ErrorKind::kInvalidArgument, make(shorter, model.params), "bucket 1");
}

// --- Failures --------------------------------------------------------------------------------------------------------

TEST(reducer_is_idle_again_after_an_abort) {
  const Model model({{4}, {4, 4}});
  const ThreadJob job(2);
  const auto world = job.communicator(0);
  const auto reducer = model.reducer(world);
  const Gradients gradients = model.gradients(0);
  reducer->arm({}, {});
  mark(*reducer, gradients, 0);  // waits for a peer that never comes
  std::thread aborting([&] {
    std::this_thread::sleep_for(2ms);
    world->abort(Error(ErrorKind::kClosed, "enough"));
  });
  mark(*reducer, gradients, 1);
  CHECK_THROWS(ErrorKind::kClosed, reducer->finish(), "enough");
  aborting.join();
  CHECK(!reducer->awaits(2));
  CHECK_THROWS(ErrorKind::kInternal, reducer->finish(), "finish() without arm()");
  // Armed again on a communicator that is aborted: the mark throws, finish() throws, and it is idle again.
  reducer->arm({}, {});
  CHECK_THROWS(ErrorKind::kClosed, mark(*reducer, gradients, 0), "enough");
  CHECK_THROWS(ErrorKind::kClosed, reducer->finish(), "enough");
  CHECK(!reducer->awaits(2));
  CHECK_EQ(gradients[0].use_count(), 1);  // and holds nothing of the step
}

TEST(reducer_finish_waits_for_all_and_throws_the_first_error) {
  std::atomic<bool> last_ended = false;
  const auto recorder = std::make_shared<Recorder>([&](std::size_t call) {
    if (call == 0) {
      throw Error(ErrorKind::kTimedOut, "the first");
    }
    if (call == 1) {
      throw Error(ErrorKind::kTransport, "the second");
    }
    if (call == 2) {
      std::this_thread::sleep_for(10ms);
      last_ended = true;
    }
  });
  const Model model({{4}, {4}, {4}});
  const auto reducer = model.reducer(recorder);
  const Gradients gradients = model.gradients(0);
  reducer->arm({}, {});
  for (std::size_t p = 0; p < 3; ++p) {
    mark(*reducer, gradients, p);
  }
  CHECK_THROWS(ErrorKind::kTimedOut, reducer->finish(), "the first");
  // Gradients belong to the caller again: nothing may still be writing them.
  CHECK(last_ended.load());
  reducer->arm({}, {});
  reducer->finish();
}

// What was handed over must live until the lane has passed it, whatever happens to its owners meanwhile.
TEST(reducer_may_be_destroyed_with_reductions_in_flight) {
  for (const bool keep_communicator : {true, false}) {
    auto recorder = std::make_shared<Recorder>();
    const auto stream_gate = std::make_unique<Gate>(recorder->stream());
    std::vector<WorkPtr> works;
    std::thread opener;
    {
      const Model model({{400, 500}, {600}});
      auto reducer = model.reducer(recorder);
      Gradients gradients = model.gradients(0);
      reducer->arm(scale_of(0.5), {});
      for (std::size_t p = 0; p < 3; ++p) {
        mark(*reducer, gradients, p);
      }
      works = reducer->flush();
      opener = std::thread([&] {
        std::this_thread::sleep_for(2ms);
        stream_gate->open();
      });
      if (!keep_communicator) {
        recorder.reset();
      }
    }
    for (const WorkPtr& work : works) {
      (void)error_of(*work);
      CHECK(work->done());
    }
    opener.join();
  }
}

TEST(reducer_issue_that_fails_half_way_leaves_no_dangling_copy) {
  const auto recorder = std::make_shared<Recorder>();
  Gate gate(recorder->stream());
  const Model model({{400, 500}, {600}});
  {
    const auto reducer = model.reducer(recorder);
    recorder->abort(Error(ErrorKind::kClosed, "enough"));
    reducer->arm(scale_of(0.5), {});
    const Gradients gradients = model.gradients(0);
    mark(*reducer, gradients, 0);
    CHECK_THROWS(ErrorKind::kClosed, mark(*reducer, gradients, 1), "enough");
    CHECK_THROWS(ErrorKind::kClosed, reducer->finish(), "enough");
  }
  gate.open();  // copies that were enqueued before the failure run now
  recorder->stream().synchronize();
}

// --- StepLoss --------------------------------------------------------------------------------------------------------

TEST(step_loss_weighs_all_ranks) {
  ThreadJob(3, 41).run([](const std::shared_ptr<Communicator>& world) {
    StepLoss loss(world);
    CHECK(loss.ready().done());  // nothing was issued
    CHECK(loss.work() == nullptr);
    for (int step = 1; step < 4; ++step) {
      // Rank r: (r + 1) samples whose losses are all `step`; rank 0 computed none.
      const double weight = world->rank() == 0 ? 0 : world->rank() + 1;
      loss.issue(weight * step, weight, false);
      loss.ready().wait();
      loss.work()->wait();
      CHECK_EQ(loss.value(), static_cast<double>(step));
      CHECK_EQ(*loss.scale().factor, 1.0 / 5);
    }
  });
}

TEST(step_loss_accumulates_weights_until_a_reducing_step) {
  ThreadJob(2, 42).run([](const std::shared_ptr<Communicator>& world) {
    StepLoss loss(world);
    const auto step = [&loss](double weight, bool accumulate, bool keeps = true) {
      loss.issue(weight * 3, weight, accumulate, keeps);
      loss.work()->wait();
      CHECK_EQ(loss.value(), 3.0);  // the loss is of its own step alone
      return *loss.scale().factor;
    };
    CHECK_EQ(step(1, true), 1.0 / 2);
    CHECK_EQ(step(2, true), 1.0 / 6);
    CHECK_EQ(step(5, false), 1.0 / 16);  // gradients of all three
    CHECK_EQ(step(4, false), 1.0 / 8);   // and of one again
    CHECK_EQ(step(1, true), 1.0 / 2);
    loss.forget();
    CHECK_EQ(step(4, false), 1.0 / 8);
    // One rank's part of the model had no gradient: those of the other count. Where none has any, they were dropped.
    CHECK_EQ(step(1, true, false), 1.0 / 2);
    CHECK_EQ(step(4, false, world->rank() == 0), 1.0 / 10);
    CHECK_EQ(step(1, true, false), 1.0 / 2);
    CHECK_EQ(step(4, false, false), 1.0 / 8);
  });
}

TEST(step_loss_without_weight_is_not_a_number) {
  StepLoss loss(one_rank());
  loss.issue(0, 0, false);
  loss.work()->wait();
  CHECK(std::isnan(loss.value()));
  CHECK_EQ(*loss.scale().factor, 0.0);  // zero gradients stay zero
}

TEST(step_loss_tells_when_ranks_disagree_on_reducing) {
  ThreadJob(2, 44).run([](const std::shared_ptr<Communicator>& world) {
    StepLoss loss(world);
    loss.issue(3, 1, world->rank() == 0);
    CHECK_THROWS(ErrorKind::kSchemaMismatch, loss.work()->wait(), "1 of 2 ranks reduce");
  });
}

TEST(step_loss_is_issued_without_waiting_and_once_at_a_time) {
  const auto world = one_rank();
  StepLoss loss(world);
  Gate gate(world->stream());
  loss.issue(6, 2, true);
  const Event ready = loss.ready();
  CHECK(!ready.done());
  CHECK_THROWS(ErrorKind::kInvalidArgument, loss.issue(1, 1, false), "still being reduced");
  CHECK_THROWS(ErrorKind::kInvalidArgument, loss.forget(), "still being reduced");
  gate.open();
  ready.wait();
  CHECK_EQ(loss.value(), 3.0);
  CHECK_EQ(*loss.scale().factor, 0.5);
  loss.forget();
  loss.issue(6, 4, false);
  loss.work()->wait();
  CHECK_EQ(*loss.scale().factor, 0.25);
}

TEST(step_loss_reports_a_failed_reduction) {
  int calls = 0;
  const auto recorder = std::make_shared<Recorder>(
      [&calls](std::size_t) {
        if (++calls == 2) {
          throw Error(ErrorKind::kTimedOut, "too late");
        }
      },
      1);
  StepLoss loss(recorder);
  loss.issue(6, 2, true);
  loss.work()->wait();
  loss.issue(6, 4, true);
  CHECK_THROWS(ErrorKind::kTimedOut, loss.work()->wait(), "too late");
  loss.ready().wait();  // lanes that wait for it go on
  loss.issue(6, 6, false);
  loss.work()->wait();
  CHECK_EQ(*loss.scale().factor, 1.0 / 8);  // the failed step did not count
}

TEST(step_loss_may_be_destroyed_while_it_is_reduced) {
  const auto world = one_rank();
  auto gate = std::make_unique<Gate>(world->stream());
  Event ready;
  {
    StepLoss loss(world);
    loss.issue(6, 2, false);
    ready = loss.ready();
  }
  gate.reset();
  ready.wait();
}

TEST(step_loss_factor_reaches_the_reducer_of_another_lane) {
  const Model model({{5, 6}, {7}});
  const ThreadJob job(2, 43);
  run_ranks(2, [&](int rank) {
    const auto reducer = model.reducer(job.communicator(rank, "gradient"));
    StepLoss loss(job.communicator(rank, "loss"));
    for (int step = 0; step < 20; ++step) {
      const Gradients gradients = model.gradients(rank);
      loss.issue(1, 4, false);
      reducer->arm(loss.scale(), loss.ready());
      for (std::size_t p = 0; p < gradients.size(); ++p) {
        mark(*reducer, gradients, p);
      }
      reducer->finish();
      check_sums(model, gradients, 2, 0.125F);
    }
  });
}
