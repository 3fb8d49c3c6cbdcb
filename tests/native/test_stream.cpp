// stream/: order within a worker, order between two, and what happens at the end of one.
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "native/check.h"
#include "native/thread_communicator.h"
#include "stream/stream.h"

using namespace hpcomm;
using namespace std::chrono_literals;

namespace {

void nap(std::chrono::microseconds time) { std::this_thread::sleep_for(time); }

}  // namespace

TEST(stream_runs_tasks_first_in_first_out) {
  const auto stream = make_worker_stream("fifo");
  std::vector<int> seen;
  for (int i = 0; i < 10000; ++i) {
    stream->enqueue([&seen, i] { seen.push_back(i); });
  }
  stream->synchronize();
  CHECK_EQ(seen.size(), 10000);
  for (int i = 0; i < 10000; ++i) {
    CHECK_EQ(seen[static_cast<std::size_t>(i)], i);
  }
}

TEST(stream_keeps_the_order_of_each_of_many_writers) {
  const auto stream = make_worker_stream("fifo");
  std::vector<std::pair<int, int>> seen;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      for (int i = 0; i < 2000; ++i) {
        stream->enqueue([&seen, writer, i] { seen.emplace_back(writer, i); });
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  stream->synchronize();
  std::vector<int> next(4, 0);
  for (const auto& [writer, i] : seen) {
    CHECK_EQ(i, next[static_cast<std::size_t>(writer)]++);
  }
  CHECK_EQ(seen.size(), 8000);
}

TEST(stream_event_happens_after_what_came_before_it_only) {
  const auto stream = make_worker_stream("event");
  std::atomic<bool> gate = false;
  std::atomic<int> ran = 0;
  stream->enqueue([&] { ++ran; });
  const Event before = stream->record();
  stream->enqueue([&] {
    while (!gate) {
      nap(50us);
    }
    ++ran;
  });
  const Event after = stream->record();
  before.wait();
  CHECK_EQ(ran.load(), 1);
  CHECK(before.done());
  CHECK(!after.done());
  CHECK(!after.wait_until(Clock::now() + 5ms));
  CHECK(!after.wait_until(Clock::now() - 1s));
  gate = true;
  after.wait();
  CHECK_EQ(ran.load(), 2);
}

TEST(stream_events_outlive_their_stream) {
  Event event;
  CHECK(event.done());
  CHECK(event.wait_until(Clock::now()));
  {
    const auto stream = make_worker_stream("gone");
    stream->enqueue([] { nap(2ms); });
    event = stream->record();
  }
  CHECK(event.done());
  event.wait();
}

TEST(stream_waits_for_an_event_of_another_in_both_directions) {
  // A relay between two workers: each adds to a plain int only when the other has passed it on. Without the waits this
  // is a data race and a wrong sequence.
  const auto left = make_worker_stream("left");
  const auto right = make_worker_stream("right");
  std::vector<int> seen;
  for (int i = 0; i < 200; ++i) {
    left->enqueue([&seen, i] {
      if (i % 20 == 0) {
        nap(300us);
      }
      seen.push_back(2 * i);
    });
    right->wait(left->record());
    right->enqueue([&seen, i] {
      if (i % 20 == 10) {
        nap(300us);
      }
      seen.push_back(2 * i + 1);
    });
    left->wait(right->record());
  }
  left->synchronize();
  CHECK_EQ(seen.size(), 400);
  for (int i = 0; i < static_cast<int>(seen.size()); ++i) {
    CHECK_EQ(seen[static_cast<std::size_t>(i)], i);
  }
}

TEST(stream_wait_does_not_hold_the_host_nor_what_came_before) {
  const auto slow = make_worker_stream("slow");
  const auto fast = make_worker_stream("fast");
  std::atomic<bool> gate = false;
  std::atomic<bool> before = false;
  std::atomic<bool> after = false;
  slow->enqueue([&] {
    while (!gate) {
      nap(50us);
    }
  });
  fast->enqueue([&] { before = true; });
  fast->wait(slow->record());  // returns at once: this thread opens the gate
  fast->enqueue([&] { after = true; });
  CHECK(testing::eventually([&] { return before.load(); }));
  nap(1ms);
  CHECK(!after.load());
  gate = true;
  fast->synchronize();
  CHECK(after.load());
}

TEST(stream_is_current_in_its_own_tasks_only) {
  const auto one = make_worker_stream("one");
  const auto two = make_worker_stream("two");
  CHECK(!one->is_current());
  bool own = false;
  bool other = true;
  one->enqueue([&] {
    own = one->is_current();
    other = two->is_current();
  });
  one->synchronize();
  CHECK(own);
  CHECK(!other);
}

TEST(stream_is_idle_when_nothing_is_queued_or_running) {
  const auto stream = make_worker_stream("idle");
  CHECK(stream->idle());
  std::atomic<bool> started = false;
  std::atomic<bool> gate = false;
  bool idle_inside = true;
  stream->enqueue([&] {
    started = true;
    while (!gate) {
      nap(50us);
    }
    idle_inside = stream->idle();
  });
  CHECK(!stream->idle());
  while (!started) {
    nap(50us);
  }
  CHECK(!stream->idle());
  gate = true;
  stream->synchronize();
  // The task that set the event is still ending.
  const Deadline deadline = Clock::now() + 10s;
  while (!stream->idle() && Clock::now() < deadline) {
    nap(50us);
  }
  CHECK(stream->idle());
  CHECK(!idle_inside);
}

TEST(stream_is_not_idle_while_a_task_is_being_destroyed) {
  // What a task keeps alive may be what the next user of an idle stream wants to write.
  const auto stream = make_worker_stream("idle");
  std::atomic<bool> destroying = false;
  std::atomic<bool> gate = false;
  auto held = std::shared_ptr<int>(new int(1), [&](int* number) {
    destroying = true;
    while (!gate) {
      nap(50us);
    }
    delete number;
  });
  stream->enqueue([held = std::move(held)] {});
  while (!destroying) {
    nap(50us);
  }
  CHECK(!stream->idle());
  gate = true;
  stream->synchronize();
}

TEST(stream_destructor_runs_what_is_enqueued) {
  for (int round = 0; round < 20; ++round) {
    int ran = 0;
    {
      const auto stream = make_worker_stream("last");
      stream->enqueue([] { nap(200us); });
      for (int i = 0; i < 100; ++i) {
        stream->enqueue([&ran] { ++ran; });
      }
    }
    CHECK_EQ(ran, 100);
  }
}

TEST(stream_tasks_may_enqueue_more_tasks_while_it_is_destroyed) {
  int ran = 0;
  {
    const auto stream = make_worker_stream("nested");
    Stream* raw = stream.get();
    stream->enqueue([raw, &ran] {
      nap(1ms);  // the destructor is waiting by now
      raw->enqueue([raw, &ran] {
        ++ran;
        raw->enqueue([&ran] { ++ran; });
      });
    });
  }
  CHECK_EQ(ran, 2);
}

TEST(stream_may_be_dropped_by_its_own_task) {
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> ran = 0;
    std::atomic<bool> gate = false;
    auto stream = make_worker_stream("suicide");
    Stream* raw = stream.get();
    raw->enqueue([&gate, &ran, stream]() mutable {
      while (!gate) {
        nap(20us);
      }
      stream.reset();  // the last reference
      ++ran;
    });
    raw->enqueue([&ran] { ++ran; });  // still runs
    stream.reset();
    gate = true;
    const Deadline deadline = Clock::now() + 10s;
    while (ran < 2 && Clock::now() < deadline) {
      nap(50us);
    }
    CHECK_EQ(ran.load(), 2);
  }
}

TEST(stream_survives_a_task_that_throws) {
  testing::CapturedStderr captured;
  const auto stream = make_worker_stream("throws");
  int ran = 0;
  stream->enqueue([] { throw std::runtime_error("a broken promise"); });
  stream->enqueue([] { throw 7; });
  stream->enqueue([&ran] { ++ran; });
  stream->synchronize();
  CHECK_EQ(ran, 1);
  const std::string log = captured.text();
  CHECK(log.find("a broken promise") != std::string::npos);
  CHECK(log.find("no std::exception") != std::string::npos);
}

TEST(stream_takes_names_of_any_length) {
  make_worker_stream("")->synchronize();
  make_worker_stream(std::string(200, 'x'))->synchronize();
}

TEST(caller_stream_is_the_caller) {
  const auto stream = make_caller_stream();
  std::thread::id where;
  stream->enqueue([&where] { where = std::this_thread::get_id(); });
  CHECK(where == std::this_thread::get_id());
  CHECK(stream->is_current());
  CHECK(stream->idle());
  CHECK(stream->record().done());
  stream->synchronize();
  CHECK(stream->device() == Device{});
}

TEST(caller_stream_blocks_on_an_event) {
  const auto worker = make_worker_stream("worker");
  const auto caller = make_caller_stream();
  int written = 0;
  worker->enqueue([&written] {
    nap(2ms);
    written = 1;
  });
  caller->wait(worker->record());
  CHECK_EQ(written, 1);
}
