// CUDA streams and events over the fake runtime: order, lifetimes, captures, failures. Under ASan freed memory that a
// kernel still uses is found, under TSan an order that no event makes.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "native/check.h"
#include "native/fake/cuda/fake_cuda.h"
#include "native/fake/cuda/raw.h"
#include "native/thread_communicator.h"
#include "pack/pack.h"
#include "stream/cuda_stream.h"

using namespace hpcomm;
using namespace std::chrono_literals;
using fake_cuda::device_memory;
using fake_cuda::Gate;
using fake_cuda::RawStream;
using hpcomm::testing::CapturedStderr;
using hpcomm::testing::eventually;
using hpcomm::testing::run_ranks;

namespace {

// A foreign stream of `device` and ours over it. The calling thread's current device is the same afterwards.
struct ForeignLane {
  explicit ForeignLane(int on = 0) : device(on) {
    const OnDevice here(on);
    raw.emplace();
    stream = make_cuda_stream(raw->get(), on);
  }

  void launch(std::function<void()> kernel) const {
    stream->enqueue([&] { CHECK_EQ(fake_cuda_enqueue(raw->get(), std::move(kernel)), cudaSuccess); });
  }
  [[nodiscard]] std::unique_ptr<Gate> gate() const {
    const OnDevice here(device);
    return std::make_unique<Gate>(raw->get());
  }

  struct OnDevice {
    explicit OnDevice(int device) {
      cudaGetDevice(&before);
      cudaSetDevice(device);
    }
    ~OnDevice() { cudaSetDevice(before); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    int before = 0;
  };

  int device;
  std::optional<RawStream> raw;
  std::shared_ptr<Stream> stream;
};

// Whoever checks a kernel launch next must not find an error of ours.
void check_no_error_is_left() { CHECK_EQ(cudaPeekAtLastError(), cudaSuccess); }

// A graph captured on `lane` while `body` ran; `end` is what EndCapture says.
template <typename Body>
cudaGraph_t capture(const ForeignLane& lane, const Body& body, cudaError_t end = cudaSuccess) {
  CHECK_EQ(cudaStreamBeginCapture(lane.raw->get(), cudaStreamCaptureModeGlobal), cudaSuccess);
  body();
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(lane.raw->get(), &graph), end);
  if (end != cudaSuccess) {
    (void)cudaGetLastError();
  }
  return graph;
}

// Runs a graph on `lane` and waits for it; the graph is gone afterwards.
void replay(const ForeignLane& lane, cudaGraph_t graph, int times, const std::function<void()>& after) {
  cudaGraphExec_t executable = nullptr;
  CHECK_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int i = 0; i < times; ++i) {
    CHECK_EQ(cudaGraphLaunch(executable, lane.raw->get()), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(lane.raw->get()), cudaSuccess);
    after();
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

}  // namespace

// --- Order
// ------------------------------------------------------------------------------------------------------------

TEST(cuda_stream_events_order_the_streams_of_many_threads) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 60;
  fake_cuda::reset(11, 100);
  std::deque<ForeignLane> lanes;  // they do not move
  for (int i = 0; i < kThreads; ++i) {
    lanes.emplace_back(i % 2);
  }
  // A token goes around: plain memory, so an order that is missing is a race. Each thread issues on its own lane; the
  // events travel between the threads before the work they stand for has run.
  std::vector<int> seen;
  std::mutex mutex;
  std::vector<Event> sent{Event()};
  run_ranks(kThreads, [&](int rank) {
    const ForeignLane& lane = lanes[static_cast<std::size_t>(rank)];
    for (int round = 0; round < kRounds; ++round) {
      const auto turn = static_cast<std::size_t>(round * kThreads + rank);
      std::optional<Event> before;
      for (; !before.has_value(); std::this_thread::yield()) {
        const std::lock_guard lock(mutex);
        if (sent.size() > turn) {
          before = sent[turn];
        }
      }
      lane.stream->wait(*before);
      lane.launch([&seen, turn] { seen.push_back(static_cast<int>(turn)); });
      Event after = lane.stream->record();
      const std::lock_guard lock(mutex);
      sent.push_back(std::move(after));
    }
  });
  CHECK_EQ(fake_cuda::synchronising_calls(), 0);
  sent.back().wait();
  CHECK_EQ(seen.size(), kThreads * kRounds);
  for (std::size_t i = 0; i < seen.size(); ++i) {
    CHECK_EQ(seen[i], i);
  }
  CHECK_EQ(fake_cuda::synchronising_calls(), 0);
}

TEST(cuda_stream_waiting_for_a_cuda_event_does_not_block_the_host) {
  fake_cuda::reset();
  const ForeignLane first;
  const ForeignLane second(1);
  int value = 0;
  const auto gate = first.gate();
  first.launch([&value] { value = 1; });
  second.stream->wait(first.stream->record());
  second.launch([&value] { value += 10; });
  const Event end = second.stream->record();
  CHECK(!end.done());  // and the host is here
  gate->open();
  end.wait();
  CHECK_EQ(value, 11);
}

TEST(cuda_stream_waiting_for_a_host_event_blocks_the_host) {
  fake_cuda::reset();
  const ForeignLane lane;
  const auto worker = make_worker_stream("host");
  int value = 0;
  worker->enqueue([&value] {
    std::this_thread::sleep_for(5ms);
    value = 1;
  });
  lane.stream->wait(worker->record());
  CHECK_EQ(value, 1);  // no race: the wait orders the two
  lane.stream->wait(Event());
}

TEST(cuda_stream_host_lanes_wait_for_cuda_events) {
  fake_cuda::reset();
  const ForeignLane lane;
  const auto worker = make_worker_stream("host");
  int value = 0;
  const auto gate = lane.gate();
  lane.launch([&value] { value = 1; });
  worker->wait(lane.stream->record());
  worker->enqueue([&value] { value += 10; });
  const Event end = worker->record();
  CHECK(!end.done());
  gate->open();
  end.wait();
  CHECK_EQ(value, 11);
}

TEST(cuda_stream_runs_tasks_at_once_on_its_device) {
  fake_cuda::reset();
  const ForeignLane lane(1);
  bool ran = false;
  lane.stream->enqueue([&ran] {
    int device = -1;
    cudaGetDevice(&device);
    CHECK_EQ(device, 1);
    ran = true;
  });
  CHECK(ran);
  CHECK(lane.stream->is_current());
  CHECK(lane.stream->device() == Device({DeviceType::kCuda, 1}));
  CHECK(lane.stream->native_handle() == lane.raw->get());
}

TEST(cuda_stream_leaves_the_callers_device_alone) {
  fake_cuda::reset();
  const ForeignLane lane(1);
  const auto each_call = [&lane] {
    const Event event = lane.stream->record();
    lane.stream->wait(event);
    lane.stream->hold(std::make_shared<int>(1));
    (void)lane.stream->idle();
    event.wait();
    lane.stream->enqueue([] {});
  };
  each_call();
  int device = -1;
  cudaGetDevice(&device);
  CHECK_EQ(device, 0);
  cudaSetDevice(1);
  const auto before = fake_cuda::calls("cudaSetDevice");
  each_call();
  CHECK_EQ(fake_cuda::calls("cudaSetDevice"), before);  // nothing to change
  cudaSetDevice(0);
}

TEST(cuda_stream_is_idle_when_its_work_has_run) {
  fake_cuda::reset();
  const ForeignLane lane;
  CHECK(lane.stream->idle());
  const auto gate = lane.gate();
  CHECK(!lane.stream->idle());
  check_no_error_is_left();
  gate->open();
  CHECK(eventually([&lane] { return lane.stream->idle(); }));
}

TEST(cuda_caller_stream_follows_the_callers_current_stream) {
  fake_cuda::reset();
  const ForeignLane first;
  const ForeignLane second;
  const ForeignLane* now = &first;
  const auto caller = make_cuda_caller_stream([&now]() -> void* { return now->raw->get(); }, 0);
  const auto gate = first.gate();
  const Event behind = caller->record();
  now = &second;
  CHECK(caller->native_handle() == second.raw->get());
  const Event free = caller->record();
  free.wait();
  CHECK(eventually([&caller] { return caller->idle(); }));  // an event may be done before its stream has passed it
  CHECK(!behind.done());
  gate->open();
  behind.wait();
  // The default stream of the device, which is null.
  const auto legacy = make_cuda_caller_stream([]() -> void* { return nullptr; }, 1);
  legacy->synchronize();
  CHECK(legacy->native_handle() == nullptr);
}

// --- Events
// -----------------------------------------------------------------------------------------------------------

TEST(cuda_event_says_when_its_point_has_been_passed) {
  fake_cuda::reset();
  const ForeignLane lane;
  auto gate = lane.gate();
  const Event event = lane.stream->record();
  CHECK(event.native_handle() != nullptr);
  CHECK(!event.done());
  CHECK(!event.wait_until(Clock::now() - 1s));
  CHECK(!event.wait_until(Clock::now() + 3ms));
  check_no_error_is_left();
  gate->open();
  event.wait();
  CHECK(event.done());
  CHECK(event.wait_until(Clock::now() - 1s));
  // It is known for good: the device need not be asked again.
  const auto queries = fake_cuda::calls("cudaEventQuery");
  gate = lane.gate();
  CHECK(event.done());
  CHECK_EQ(fake_cuda::calls("cudaEventQuery"), queries);
}

TEST(cuda_event_waits_without_burning_a_core) {
  fake_cuda::reset();
  const ForeignLane lane;
  const auto gate = lane.gate();
  const Event event = lane.stream->record();
  const auto before = fake_cuda::calls("cudaEventQuery");
  CHECK(!event.wait_until(Clock::now() + 200ms));
  // Spinning would ask a hundred thousand times.
  CHECK(fake_cuda::calls("cudaEventQuery") - before < 2000);
}

TEST(cuda_events_come_from_a_pool) {
  constexpr int kDevice = 9;  // nobody else's: its pool is empty
  fake_cuda::reset(1, 0);
  fake_cuda::set_device_count(16);
  const ForeignLane lane(kDevice);
  for (int i = 0; i < 500; ++i) {
    const Event one = lane.stream->record();
    const Event two = lane.stream->record();
    CHECK(one.native_handle() != two.native_handle());
  }
  CHECK_EQ(fake_cuda::calls("cudaEventCreateWithFlags"), 2);
  CHECK_EQ(fake_cuda::event_flags(static_cast<cudaEvent_t>(lane.stream->record().native_handle())),
           cudaEventDisableTiming);
  // Also when it could not be recorded.
  fake_cuda::fail("cudaEventRecord", 1, cudaErrorLaunchFailure);
  CHECK_THROWS(ErrorKind::kTransport, lane.stream->record(), "cudaEventRecord");
  (void)std::pair(lane.stream->record(), lane.stream->record());
  CHECK_EQ(fake_cuda::calls("cudaEventCreateWithFlags"), 2);
  // No more than 1024 stay when many are let go at once.
  const auto events = fake_cuda::live_events();
  std::vector<Event> many;
  for (int i = 0; i < 1500; ++i) {
    many.push_back(lane.stream->record());
  }
  CHECK_EQ(fake_cuda::live_events(), events - 2 + 1500);
  many.clear();
  CHECK_EQ(fake_cuda::live_events(), events - 2 + 1024);
}

TEST(cuda_event_that_is_used_again_does_not_free_who_waits_for_its_first_use) {
  constexpr int kDevice = 10;
  fake_cuda::reset();
  fake_cuda::set_device_count(16);
  const ForeignLane slow(kDevice);
  const ForeignLane waiter(kDevice);
  const ForeignLane quick(kDevice);
  int value = 0;
  const auto gate = slow.gate();
  slow.launch([&value] { value = 1; });
  void* handle = nullptr;
  {
    const Event event = slow.stream->record();
    handle = event.native_handle();
    waiter.stream->wait(event);
  }
  const Event again = quick.stream->record();
  CHECK(again.native_handle() == handle);
  again.wait();
  waiter.launch([&value] { value += 10; });
  const Event end = waiter.stream->record();
  CHECK(!end.done());
  gate->open();
  end.wait();
  CHECK_EQ(value, 11);
}

// --- hold()
// -----------------------------------------------------------------------------------------------------------

TEST(cuda_stream_holds_memory_until_it_has_passed) {
  fake_cuda::reset();
  const ForeignLane lane;
  const ForeignLane::OnDevice here(0);
  auto gate = lane.gate();
  auto memory = device_memory<int>(1000);
  const std::weak_ptr<int> watch = memory;
  lane.launch([data = memory.get()] {
    for (int i = 0; i < 1000; ++i) {
      data[i] = i;  // freed too early: AddressSanitizer stops here
    }
  });
  lane.stream->hold(std::move(memory));
  for (int i = 0; i < 20; ++i) {
    (void)lane.stream->record();
    lane.stream->hold(std::make_shared<int>(i));
    (void)lane.stream->idle();
    lane.stream->wait(Event());
  }
  CHECK(!watch.expired());
  gate->open();
  lane.stream->synchronize();
  std::this_thread::sleep_for(1ms);
  CHECK(!watch.expired());      // nothing lets go by itself
  (void)lane.stream->record();  // the next call does
  CHECK(watch.expired());
}

TEST(cuda_stream_lets_go_at_records) {
  fake_cuda::reset();
  const ForeignLane lane;
  const auto lets_go = [&lane](Stream& stream, const std::function<void()>& passed, const std::function<void()>& call) {
    auto memory = std::make_shared<int>(1);
    const std::weak_ptr<int> watch = memory;
    const auto gate = lane.gate();
    stream.hold(std::move(memory));
    passed();
    gate->open();
    cudaStreamSynchronize(lane.raw->get());
    std::this_thread::sleep_for(1ms);  // longer than it pauses once it was told "not yet"
    CHECK(!watch.expired());
    call();
    CHECK(watch.expired());
  };
  // On a lane, the next record says what it waits for, and a later one that this has happened.
  const auto record = [&lane] { (void)lane.stream->record(); };
  lets_go(*lane.stream, record, record);
  lets_go(*lane.stream, record, [&lane] { (void)lane.stream->idle(); });
  // A caller's stream may be another one by then.
  const auto caller = make_cuda_caller_stream([&lane]() -> void* { return lane.raw->get(); }, 0);
  lets_go(*caller, [] {}, [&caller] { (void)caller->record(); });
  lets_go(*caller, [] {}, [&caller] { (void)caller->idle(); });
  lets_go(*caller, [] {}, [&caller] { caller->hold(std::make_shared<int>(1)); });
}

TEST(cuda_stream_holds_by_one_event_what_came_before_it) {
  fake_cuda::reset();
  const ForeignLane lane;
  const auto records = [] { return fake_cuda::calls("cudaEventRecord"); };
  auto before = records();
  std::vector<std::weak_ptr<int>> watches;
  const auto hold = [&] {
    auto memory = std::make_shared<int>(1);
    watches.push_back(memory);
    lane.stream->hold(std::move(memory));
  };
  for (int i = 0; i < 3; ++i) {
    hold();
  }
  CHECK_EQ(records() - before, 0);
  lane.stream->synchronize();
  CHECK_EQ(records() - before, 1);
  // One that nobody records gets an event all the same.
  before = records();
  for (int i = 0; i < 100; ++i) {
    hold();
    std::this_thread::sleep_for(100us);
  }
  CHECK(records() - before >= 4 && records() - before <= 10);
  CHECK(std::count_if(watches.begin(), watches.end(), [](const auto& watch) { return !watch.expired(); }) <= 40);
}

TEST(cuda_stream_gets_through_a_backlog) {
  // As operations of a lane: kernels hold, an event is recorded, and more is held until that.
  fake_cuda::reset(1, 0);
  const ForeignLane lane;
  std::atomic<int> alive = 0;
  const auto memory = [&alive] {
    ++alive;
    return std::shared_ptr<int>(new int(0), [&alive](int* old) {
      delete old;
      --alive;
    });
  };
  const auto operate = [&] {
    lane.stream->hold(memory());
    const Event event = lane.stream->record();
    lane.stream->hold_until(memory(), event);
  };
  auto gate = lane.gate();
  for (int i = 0; i < 30; ++i) {
    operate();  // the host runs ahead
  }
  CHECK_EQ(alive.load(), 60);
  gate->open();
  cudaStreamSynchronize(lane.raw->get());
  std::this_thread::sleep_for(1ms);
  for (int i = 0; i < 40; ++i) {
    operate();
    cudaStreamSynchronize(lane.raw->get());
  }
  CHECK(alive <= 4);
  // A quiet lane lets go when it is asked whether it is idle.
  lane.stream->hold(memory());
  cudaStreamSynchronize(lane.raw->get());
  std::this_thread::sleep_for(1ms);
  for (int i = 0; i < 4; ++i) {
    CHECK(lane.stream->idle());
  }
  CHECK_EQ(alive.load(), 0);
}

TEST(cuda_stream_whose_end_fails_keeps_what_waits) {
  for (const char* const function : {"cudaGetDevice", "cudaEventRecord"}) {
    fake_cuda::reset(1, 0);
    std::weak_ptr<int> watch;
    CapturedStderr log;
    {
      const ForeignLane lane;
      auto memory = std::make_shared<int>(1);
      watch = memory;
      lane.stream->hold(std::move(memory));
      // The first question is whether the process ends.
      fake_cuda::fail(function, std::string(function) == "cudaGetDevice" ? 2 : 1, cudaErrorLaunchFailure);
    }
    CHECK(!watch.expired());
    CHECK(log.text().find("kept for ever (1)") != std::string::npos);
  }
}

TEST(cuda_stream_lets_go_oldest_first_with_few_questions_a_call) {
  fake_cuda::reset(1, 0);
  const ForeignLane lane;
  std::vector<int> freed;
  const auto gate = lane.gate();
  for (int i = 0; i < 40; ++i) {
    lane.stream->hold(std::shared_ptr<int>(new int(i), [&freed](int* old) {
      freed.push_back(*old);
      delete old;
    }));
    (void)lane.stream->record();
  }
  CHECK(freed.empty());
  gate->open();
  cudaStreamSynchronize(lane.raw->get());
  std::this_thread::sleep_for(1ms);  // longer than it pauses once it was told "not yet"
  int calls = 0;
  for (; freed.size() < 40 && calls < 40; ++calls) {
    const auto before = fake_cuda::calls("cudaEventQuery");
    (void)lane.stream->record();
    CHECK(fake_cuda::calls("cudaEventQuery") - before <= 2);
  }
  CHECK_EQ(calls, 20);
  for (int i = 0; i < 40; ++i) {
    CHECK_EQ(freed.at(static_cast<std::size_t>(i)), i);
  }
  // Behind a kernel that runs for long, one question a call finds that out.
  const auto busy = lane.gate();
  for (int i = 0; i < 40; ++i) {
    lane.stream->hold(std::make_shared<int>(i));
    (void)lane.stream->record();
  }
  std::this_thread::sleep_for(1ms);
  const auto before = fake_cuda::calls("cudaEventQuery");
  (void)lane.stream->record();
  CHECK_EQ(fake_cuda::calls("cudaEventQuery") - before, 1);
}

TEST(cuda_stream_lets_go_at_its_end_and_not_before_the_device_is_there) {
  fake_cuda::reset(1, 500);
  const ForeignLane::OnDevice here(0);
  const RawStream raw;
  auto memory = device_memory<int>(100);
  const std::weak_ptr<int> watch = memory;
  {
    const auto stream = make_cuda_stream(raw.get(), 0);
    for (int i = 0; i < 20; ++i) {
      fake_cuda_enqueue(raw.get(), [data = memory.get(), i] { data[i] = i; });
    }
    stream->hold(std::move(memory));
    stream->hold(nullptr);
  }
  CHECK(watch.expired());
}

TEST(cuda_stream_may_be_called_by_what_it_lets_go_of) {
  fake_cuda::reset();
  const ForeignLane lane;
  bool called = false;
  lane.stream->hold(std::shared_ptr<int>(new int(1), [&](int* old) {
    delete old;
    lane.stream->hold(std::make_shared<int>(2));
    (void)lane.stream->record();
    called = true;
  }));
  lane.stream->synchronize();
  (void)lane.stream->record();
  CHECK(called);
}

TEST(cuda_stream_holds_for_many_threads) {
  fake_cuda::reset(7, 50);
  const ForeignLane lane;
  std::atomic<int> alive = 0;
  run_ranks(4, [&](int rank) {
    for (int i = 0; i < 200; ++i) {
      ++alive;
      auto memory = std::shared_ptr<int>(new int(rank), [&alive](int* old) {
        *old = -1;  // a kernel that still reads it races
        delete old;
        --alive;
      });
      lane.launch([data = memory.get(), rank] { CHECK_EQ(*data, rank); });
      lane.stream->hold(std::move(memory));
      if (i % 10 == rank) {
        (void)lane.stream->idle();
      }
    }
  });
  CHECK(eventually([&] {
    (void)lane.stream->record();
    return alive == 0;
  }));
}

// --- Captures
// ---------------------------------------------------------------------------------------------------------

TEST(cuda_stream_in_a_capture_asks_about_no_event) {
  fake_cuda::reset(1, 0);
  const ForeignLane lane;
  auto gate = lane.gate();
  lane.stream->hold(std::make_shared<int>(0));  // something that could be asked about
  gate->open();
  cudaStreamSynchronize(lane.raw->get());
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  std::optional<Event> inside;
  bool ran = false;
  cudaGraph_t graph = capture(lane, [&] {
    const auto queries = fake_cuda::calls("cudaEventQuery") + fake_cuda::calls("cudaStreamQuery");
    lane.launch([&ran] { ran = true; });
    lane.stream->hold(std::move(memory));
    inside = lane.stream->record();
    lane.stream->wait(*inside);
    lane.stream->wait(Event());
    CHECK(!lane.stream->idle());
    CHECK(!inside->done());
    CHECK_THROWS(ErrorKind::kInvalidArgument, inside->wait_until(Clock::now()), "inside a CUDA graph capture");
    CHECK_THROWS(ErrorKind::kInvalidArgument, lane.stream->synchronize(), "inside a CUDA graph capture");
    CHECK_EQ(fake_cuda::calls("cudaEventQuery") + fake_cuda::calls("cudaStreamQuery"), queries);
    CHECK(!watch.expired());
  });
  CHECK(!watch.expired());
  CHECK(!ran);
  (void)lane.stream->record();
  CHECK(watch.expired());
  replay(lane, graph, 1, [&ran] { CHECK(ran); });
  CHECK(!inside->done());  // an edge of the graph, whether or not that ran
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
  check_no_error_is_left();
}

TEST(cuda_stream_capture_survives_waits_of_other_threads) {
  fake_cuda::reset(1, 50);
  const ForeignLane captured;
  const ForeignLane other;
  auto gate = other.gate();
  const Event event = other.stream->record();
  std::atomic<bool> asked = false;
  std::atomic<bool> stop = false;
  std::thread watcher([&] {
    while (!stop) {
      (void)event.done();
      (void)other.stream->idle();
      other.stream->hold(std::make_shared<int>(1));
      (void)event.wait_until(Clock::now() + 100us);
      asked = true;
    }
  });
  CHECK(eventually([&asked] { return asked.load(); }));
  for (int i = 0; i < 20; ++i) {
    cudaGraphDestroy(capture(captured, [&] {
      captured.launch([] {});
      asked = false;
      CHECK(eventually([&asked] { return asked.load(); }));
      captured.launch([] {});
    }));
  }
  stop = true;
  watcher.join();
  gate->open();
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
}

TEST(cuda_stream_events_are_edges_of_a_captured_graph) {
  fake_cuda::reset(1, 0);
  const ForeignLane compute;
  const ForeignLane side;
  const ForeignLane third;
  std::string order;
  cudaGraph_t graph = capture(compute, [&] {
    const auto node = [&order](const ForeignLane& lane, char name) { lane.launch([&order, name] { order += name; }); };
    node(compute, 'a');
    side.stream->wait(compute.stream->record());
    node(side, 'b');
    third.stream->wait(side.stream->record());
    node(third, 'c');
    side.stream->hold(std::make_shared<int>(1));
    node(compute, 'd');
    compute.stream->wait(third.stream->record());
    node(compute, 'e');
  });
  bool swapped = false;
  replay(compute, graph, 30, [&] {
    const auto at = [&order](char name) { return order.find(name); };
    CHECK_EQ(order.size(), 5);
    CHECK(at('a') < at('b') && at('b') < at('c') && at('c') < at('e') && at('a') < at('d') && at('d') < at('e'));
    swapped = swapped || at('d') < at('c');
    order.clear();
  });
  CHECK(swapped);  // the fake shows any order that the edges allow
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
}

TEST(cuda_stream_in_a_capture_refuses_events_that_have_not_happened) {
  fake_cuda::reset(1, 0);
  const ForeignLane lane;
  const ForeignLane other;
  auto gate = other.gate();
  const Event outside = other.stream->record();
  capture(
      lane,
      [&] {
        CHECK_THROWS(ErrorKind::kInvalidArgument, lane.stream->wait(outside), "from before it");
        check_no_error_is_left();
      },
      cudaErrorStreamCaptureInvalidated);
  gate->open();
  lane.stream->wait(outside);
  lane.stream->synchronize();
}

TEST(cuda_stream_in_a_capture_passes_events_that_have_happened) {
  fake_cuda::reset(1, 0);
  const ForeignLane lane;
  const ForeignLane other;
  const Event seen = other.stream->record();
  seen.wait();
  const Event unseen = other.stream->record();
  CHECK_EQ(cudaStreamSynchronize(other.raw->get()), cudaSuccess);  // as a program does before it captures
  cudaGraph_t graph = capture(lane, [&] {
    lane.stream->wait(seen);
    lane.stream->wait(unseen);
    check_no_error_is_left();
  });
  CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
  CHECK_EQ(fake_cuda::queries_in_captures(), 0);
}

TEST(cuda_stream_keeps_what_one_of_its_captures_holds) {
  // The caller's stream changes between captured and others; only the end of the capture counts.
  fake_cuda::reset(1, 0);
  const ForeignLane captured;
  const ForeignLane plain;
  const ForeignLane* now = &captured;
  const auto caller = make_cuda_caller_stream([&now]() -> void* { return now->raw->get(); }, 0);
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  cudaGraphDestroy(capture(captured, [&] {
    caller->hold(std::move(memory));
    now = &plain;
    caller->hold(std::make_shared<int>(2));
    (void)caller->record();
    CHECK(!watch.expired());
    captured.launch([] {});
  }));
  (void)caller->record();
  CHECK(watch.expired());
}

TEST(cuda_stream_spares_a_capture_that_the_default_stream_would_wait_for) {
  fake_cuda::reset(1, 0);
  const auto caller = make_cuda_caller_stream([]() -> void* { return nullptr; }, 0);
  const RawStream blocking(cudaStreamDefault);
  CHECK_EQ(cudaStreamBeginCapture(blocking.get(), cudaStreamCaptureModeGlobal), cudaSuccess);
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  caller->hold(std::move(memory));
  CHECK(!caller->idle());
  CHECK_THROWS(ErrorKind::kTransport, caller->record(), "cudaEventRecord");
  check_no_error_is_left();
  CHECK(!watch.expired());
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(blocking.get(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  std::this_thread::sleep_for(1ms);
  caller->synchronize();
  CHECK(watch.expired());
}

TEST(cuda_stream_that_ends_in_a_capture_keeps_what_it_holds) {
  fake_cuda::reset(1, 0);
  const ForeignLane lane;
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  CapturedStderr log;
  cudaGraphDestroy(capture(lane, [&] { make_cuda_stream(lane.raw->get(), 0)->hold(std::move(memory)); }));
  CHECK(!watch.expired());
  CHECK(log.text().find("kept for ever") != std::string::npos);
}

// --- Failures
// ---------------------------------------------------------------------------------------------------------

TEST(cuda_stream_turns_errors_into_exceptions) {
  struct Case {
    const char* function;
    std::function<void(Stream&)> call;
  };
  const std::vector<Case> cases = {
      {"cudaGetDevice", [](Stream& stream) { (void)stream.record(); }},
      {"cudaSetDevice", [](Stream& stream) { (void)stream.record(); }},
      {"cudaStreamIsCapturing", [](Stream& stream) { (void)stream.record(); }},
      {"cudaEventCreateWithFlags", [](Stream& stream) { (void)stream.record(); }},
      {"cudaEventRecord", [](Stream& stream) { (void)stream.record(); }},
      {"cudaEventRecord",
       [](Stream& stream) {
         for (int i = 0; i < 20; ++i) {
           stream.hold(std::make_shared<int>(i));
         }
       }},
      {"cudaStreamIsCapturing", [](Stream& stream) { stream.hold(std::make_shared<int>(1)); }},
      {"cudaEventQuery",
       [](Stream& stream) {
         stream.hold(std::make_shared<int>(1));
         (void)stream.record();
       }},
      {"cudaEventQuery", [](Stream& stream) { stream.synchronize(); }},
      {"cudaThreadExchangeStreamCaptureMode", [](Stream& stream) { stream.synchronize(); }},
      {"cudaStreamWaitEvent", [](Stream& stream) { stream.wait(stream.record()); }},
  };
  int device = 1;
  for (const Case& each : cases) {
    fake_cuda::reset(1, 0);
    fake_cuda::set_device_count(16);
    CapturedStderr quiet;  // what hold() could not follow is kept, and said so at the end
    {
      const ForeignLane lane(++device);
      fake_cuda::fail(each.function, 1, cudaErrorLaunchFailure);
      CHECK_THROWS(ErrorKind::kTransport, each.call(*lane.stream), "unspecified launch failure");
      check_no_error_is_left();
      int current = -1;
      cudaGetDevice(&current);
      CHECK_EQ(current, 0);
      cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
      cudaThreadExchangeStreamCaptureMode(&mode);
      CHECK_EQ(mode, cudaStreamCaptureModeGlobal);
      each.call(*lane.stream);  // it was a passing error
      lane.stream->synchronize();
    }
  }
}

TEST(cuda_stream_that_cannot_follow_memory_never_frees_it) {
  fake_cuda::reset(1, 0);
  const ForeignLane::OnDevice here(0);
  std::weak_ptr<int> watch;
  CapturedStderr log;
  {
    const ForeignLane lane;
    const auto gate = lane.gate();
    auto memory = device_memory<int>(10);
    watch = memory;
    lane.launch([data = memory.get()] { data[0] = 1; });
    fake_cuda::fail("cudaEventRecord", 1, cudaErrorLaunchFailure);
    lane.stream->hold(std::move(memory));
    CHECK_THROWS(ErrorKind::kTransport, lane.stream->record(), "cudaEventRecord");
    (void)lane.stream->record();
    CHECK(!watch.expired());
  }
  CHECK(!watch.expired());
  CHECK(log.text().find("kept for ever (1)") != std::string::npos);
}

TEST(cuda_stream_on_a_broken_device_throws_and_does_not_hang) {
  constexpr int kDevice = 8;
  fake_cuda::reset();
  fake_cuda::set_device_count(16);
  std::weak_ptr<int> watch;
  CapturedStderr log;
  {
    const ForeignLane lane(kDevice);
    const auto gate = lane.gate();
    const Event event = lane.stream->record();
    auto memory = std::make_shared<int>(1);
    watch = memory;
    lane.stream->hold(std::move(memory));
    std::thread waiter(
        [&event] { CHECK_THROWS(ErrorKind::kTransport, event.wait(), "an illegal memory access was encountered"); });
    fake_cuda::break_device(kDevice);
    waiter.join();
    CHECK_THROWS(ErrorKind::kTransport, event.done(), "CUDA error 700");
    CHECK_THROWS(ErrorKind::kTransport, lane.stream->record(), "illegal memory access");
    CHECK_THROWS(ErrorKind::kTransport, lane.stream->wait(event), "illegal memory access");
    CHECK_THROWS(ErrorKind::kTransport, lane.stream->hold(std::make_shared<int>(1)), "illegal memory access");
    CHECK(!lane.stream->idle());
    const ForeignLane healthy(1);
    healthy.stream->synchronize();
  }
  CHECK(!watch.expired());
  CHECK(log.text().find("its device failed: kept for ever") != std::string::npos);
  fake_cuda::reset();
}

TEST(cuda_stream_survives_a_runtime_that_is_gone) {
  fake_cuda::reset();
  std::weak_ptr<int> watch;
  CapturedStderr log;
  {
    const ForeignLane lane;
    const auto gate = lane.gate();
    auto memory = std::make_shared<int>(1);
    watch = memory;
    lane.stream->hold(std::move(memory));
    const Event event = lane.stream->record();
    fake_cuda::unload();
    CHECK_THROWS(ErrorKind::kTransport, event.done(), "driver shutting down");
  }
  CHECK(!watch.expired());
  CHECK_EQ(log.text(), "");  // every process ends once: not worth a line
  fake_cuda::reset();
  (void)cudaGetLastError();
}

TEST(cuda_stream_needs_a_device_that_is_there) {
  fake_cuda::reset();
  CHECK_THROWS(ErrorKind::kInvalidArgument, make_cuda_stream(nullptr, 2), "there is no CUDA device 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, make_cuda_stream(nullptr, -1), "there is no CUDA device -1");
}

namespace {

// The end of the process: CUDA goes first, then a stream that somebody kept in a global. Nothing may crash or hang,
// which the exit status of the tests shows.
struct Survivor {
  ~Survivor() {
    if (stream != nullptr) {
      fake_cuda::unload();
    }
  }
  std::shared_ptr<Stream> stream;
  Event event;
};
Survivor survivor;  // NOLINT: a global on purpose

}  // namespace

TEST(cuda_stream_may_outlive_cuda_at_the_end_of_the_process) {
  fake_cuda::reset();
  cudaStream_t raw = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), cudaSuccess);
  survivor.stream = make_cuda_stream(raw, 0);
  fake_cuda_enqueue(raw, [] { std::this_thread::sleep_for(1ms); });
  survivor.stream->hold(std::make_shared<int>(1));
  survivor.event = survivor.stream->record();
}

// --- What runs on streams
// ---------------------------------------------------------------------------------------------

TEST(cuda_stream_packs_and_unpacks_as_the_cpu_does) {
  fake_cuda::reset(13, 200);
  const ForeignLane::OnDevice here(0);
  const Layout layout({{1000, DType::kFloat32}, {77, DType::kFloat64}, {5, DType::kInt16}, {300, DType::kBFloat16}},
                      DType::kBFloat16);
  const auto sizes = layout.entries();
  std::vector<std::shared_ptr<char>> sources;
  std::vector<const void*> tensors;
  for (const Layout::Entry& entry : sizes) {
    const std::size_t bytes = entry.count * size_of(entry.dtype);
    sources.push_back(device_memory<char>(bytes));
    for (std::size_t i = 0; i < bytes; ++i) {
      sources.back().get()[i] = static_cast<char>(i * 7 % 61);
    }
    tensors.push_back(sources.back().get());
  }
  const auto run = [&](Stream& stream, Stream& back, const Scale& factor, Keepalive held) {
    auto buffer = device_memory<char>(layout.bytes());
    std::memset(buffer.get(), 0, layout.bytes());
    const BufferView view{buffer.get(), layout.bytes(), layout.bytes(), DType::kUInt8, stream.device()};
    std::vector<std::shared_ptr<char>> results;
    std::vector<void*> targets;
    for (const Layout::Entry& entry : sizes) {
      results.push_back(device_memory<char>(entry.count * size_of(entry.dtype)));
      targets.push_back(results.back().get());
    }
    pack(stream, layout, tensors, view, factor, std::move(held));
    back.wait(stream.record());
    unpack(back, layout, view, targets, {}, std::move(buffer));
    return std::pair(std::move(results), back.record());
  };

  const auto cpu = make_caller_stream();
  const auto expected = run(*cpu, *cpu, {nullptr, 0.25}, nullptr).first;
  const ForeignLane first;
  const ForeignLane second;
  for (int i = 0; i < 20; ++i) {
    // The factor is known only when the kernel runs; buffer and factor belong to nobody but the streams.
    auto factor = device_memory<double>(1);
    const auto gate = first.gate();
    first.launch([at = factor.get()] { *at = 0.25; });
    auto token = std::make_shared<int>(i);
    const std::weak_ptr<int> watch = token;
    auto [results, end] = run(*first.stream, *second.stream, {std::move(factor)}, std::move(token));
    CHECK(!end.done());
    CHECK(!watch.expired());
    gate->open();
    end.wait();
    for (std::size_t entry = 0; entry < sizes.size(); ++entry) {
      CHECK_EQ(
          std::memcmp(results[entry].get(), expected[entry].get(), sizes[entry].count * size_of(sizes[entry].dtype)),
          0);
    }
  }
  CHECK_EQ(fake_cuda::synchronising_calls(), 0);
}
