// control/: peers that fall silent, leave, die while the job starts, or fork; and strangers in great numbers.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "control/control.h"
#include "control/heartbeat.h"
#include "control/refusals.h"
#include "control/wire.h"
#include "native/check.h"
#include "native/control_peer.h"
#include "native/patience.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::control;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

// Rank 0 of two; rank 1 is played by hand.
struct BeatingPair {
  explicit BeatingPair(std::chrono::milliseconds heartbeat) {
    ControlListener listener("127.0.0.1", 0, 2, JobToken{7});
    peer = std::make_unique<Stranger>(listener.address());
    std::thread greeting([this] { CHECK(peer->greet(1, 0)); });
    mine = listener.connect({listener.address(), "127.0.0.1:9"}, soon(), heartbeat);
    greeting.join();
  }
  std::unique_ptr<Stranger> peer;
  std::shared_ptr<Control> mine;
};

std::size_t count(const std::string& text, std::string_view part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

const std::string kBeat = encode(FrameKind::kHeartbeat, 0, {});

}  // namespace

// --- Silence ---------------------------------------------------------------------------------------------------------

TEST(heartbeat_judges_by_the_last_word) {
  const Deadline start{};
  Heartbeat beats(20s, 2, start);
  using Verdict = Heartbeat::Verdict;
  Deadline now = start;
  const auto after = [&](std::chrono::milliseconds time) {
    for (; now < start + time; now += 100ms) {
      beats.woke(now);  // the thread runs all the time
    }
    return beats.judge(1, start + time);
  };
  CHECK(beats.interval() == 1s);
  CHECK(after(1000s) == Verdict::kFine);  // who has not spoken yet may still be starting
  CHECK(!beats.heard(1, start + 1000s));
  CHECK(after(1004999ms) == Verdict::kFine);
  CHECK(after(1005000ms) == Verdict::kSuspect);
  CHECK(after(1006s) == Verdict::kFine);  // said once
  CHECK(beats.last_heard(1) == start + 1000s);
  CHECK(beats.heard(1, start + 1007s));  // it was suspect
  CHECK(after(1011s) == Verdict::kFine);
  CHECK(after(1012s) == Verdict::kSuspect);
  CHECK(after(1026999ms) == Verdict::kFine);
  CHECK(after(1027s) == Verdict::kDead);
}

TEST(heartbeat_intervals_follow_the_limit) {
  CHECK(Heartbeat(2s, 1, {}).interval() == 100ms);
  CHECK(Heartbeat(5ms, 1, {}).interval() == 1ms);
  CHECK(Heartbeat(24h, 1, {}).interval() == 1s);
  CHECK(Heartbeat(0ms, 1, {}).interval() == 1s);
}

TEST(heartbeat_without_a_limit_waits_for_ever) {
  Heartbeat beats(0ms, 2, {});
  beats.heard(1, {});
  CHECK(beats.judge(1, Deadline{} + 1000h) == Heartbeat::Verdict::kFine);
}

TEST(heartbeat_own_sleep_is_no_silence_of_the_peers) {
  Heartbeat beats(20s, 2, {});
  beats.heard(1, {});
  const Deadline morning = Deadline{} + 8h;
  beats.woke(morning);
  CHECK(beats.judge(1, morning) == Heartbeat::Verdict::kFine);
  for (Deadline now = morning; now < morning + 20s; now += 1s) {
    beats.woke(now);
    CHECK(beats.judge(1, now) != Heartbeat::Verdict::kDead);
  }
  CHECK(beats.judge(1, morning + 20s) == Heartbeat::Verdict::kDead);
}

TEST(control_knows_who_is_silent_and_since_when) {
  const Deadline begin = Clock::now();
  const BeatingPair pair(4s);
  pair.peer->say(kBeat);  // watched from here on
  const Deadline end = soon();
  while (pair.mine->silences().empty() && Clock::now() < end) {
    std::this_thread::sleep_for(10ms);
  }
  const auto silences = pair.mine->silences();
  CHECK(silences.size() == 1 && silences.front().peer == 1);
  CHECK(silences.empty() || (silences.front().since >= begin && silences.front().since <= Clock::now() - 1s));
  CHECK(!pair.mine->failure());
  pair.peer->say(kBeat);
  while (!pair.mine->silences().empty() && Clock::now() < end) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(pair.mine->silences().empty());
}

TEST(control_says_that_it_is_there) {
  // Whatever the limit, a peer hears most of the twenty beats that go into one: were they further apart, a short stop
  // would end the job. With patience: a machine that stops this rank's thread takes some of them away.
  CHECK_EQ(with_patience(200ms,
                         [](milliseconds limit) -> std::string {
                           const BeatingPair pair(limit);
                           std::string heard = pair.peer->read_until(kBeat);
                           const Deadline end = Clock::now() + limit;
                           while (Clock::now() < end && count(heard, kBeat) <= 20) {
                             heard += pair.peer->read_until(kBeat);
                           }
                           const std::size_t beats = count(heard, kBeat);
                           return beats >= 12 ? "" : str(beats, " beats in ", limit.count(), " ms");
                         }),
           "");
  const BeatingPair careless(0ms);  // has no limit, but others may have one
  CHECK(careless.peer->read_until(kBeat).find(kBeat) != std::string::npos);
}

TEST(control_idle_ranks_stay_together) {
  // With patience: a machine that stops one rank's thread alone for the limit ends the job, and rightly. How often
  // ranks speak is the test above.
  CapturedStderr captured;
  CHECK_EQ(with_patience(400ms,
                         [](milliseconds limit) -> std::string {
                           const auto controls = connect_controls(3, limit);
                           std::this_thread::sleep_for(3 * limit);
                           for (const auto& control : controls) {
                             if (const auto failure = control->failure()) {
                               return failure->what();
                             }
                           }
                           return "";
                         }),
           "");
}

TEST(control_fails_a_rank_that_falls_silent) {
  CapturedStderr captured;
  const BeatingPair pair(200ms);
  std::atomic<int> left = -1;
  (void)pair.mine->on_departure([&left](int peer) { left = peer; });
  pair.peer->say(kBeat);
  check_kind(error_from([&] { (void)pair.mine->receive(1, 0, soon()); }), ErrorKind::kRankFailed,
             "rank 1 is gone: no heartbeat for 0.2 s: its host or the link to it is down, or the process is stopped");
  CHECK(pair.mine->has_ended(1));
  CHECK(eventually([&] { return left == 1; }));
  CHECK_EQ(count(captured.text(), "rank 0 has not heard from rank 1 for 0.05 s"), 1);
  // Should it wake up, it is told, and its connection ends.
  CHECK(pair.peer->read_until("rank 1 for 0.2 s").find("it had not heard from rank 1 for 0.2 s") != std::string::npos);
  CHECK(eventually([&] { return pair.peer->hung_up_on(); }));
}

TEST(control_waits_for_a_silent_rank_without_a_limit) {
  const BeatingPair pair(0ms);
  pair.peer->say(kBeat);
  CHECK(!pair.mine->try_receive(1, 0, Clock::now() + 300ms).has_value());
  CHECK(!pair.mine->failure());
}

TEST(control_does_not_watch_a_rank_that_is_still_starting) {
  // Ranks 0 and 1 have met, and rank 1 is done; rank 2 comes after many limits. With patience: once rank 0 has started
  // as well, one of the two may be stopped for the limit.
  CapturedStderr captured;
  CHECK_EQ(with_patience(200ms,
                         [](milliseconds limit) {
                           const Listeners job(3);
                           const Stranger to1(job.addresses[1]);
                           std::unique_ptr<Stranger> to0;
                           std::vector<std::string> wrong(3);
                           run_ranks(3, [&](int rank) {
                             const auto r = static_cast<std::size_t>(rank);
                             if (rank == 2) {
                               CHECK(to1.greet(2, 1));
                               std::this_thread::sleep_for(5 * limit);
                               to0 = std::make_unique<Stranger>(job.addresses[0], false);  // rank 0 may have failed
                               (void)to0->greet(2, 0);
                               return;
                             }
                             if (const auto error = error_from([&] {
                                   const auto mine = job.connect(rank, Clock::now() + 60s, limit);
                                   CHECK_EQ(mine->exchange({0, 1}, 0, str(rank), soon()),
                                            (std::vector<std::string>{"0", "1"}));
                                 })) {
                               wrong[r] = str("rank ", rank, ": ", error->what());
                             }
                           });
                           return wrong[0] + wrong[1];
                         }),
           "");
}

// --- Departures ------------------------------------------------------------------------------------------------------

TEST(control_departures_are_told_once_each) {
  auto controls = connect_controls(4);
  std::mutex mutex;
  std::vector<int> seen;
  const auto listener = [&](int peer) {
    const std::lock_guard lock(mutex);
    seen.push_back(peer);
  };
  const auto number = [&] {
    const std::lock_guard lock(mutex);
    return seen.size();
  };
  const std::uint64_t removed = controls[0]->on_departure(listener);
  controls[0]->remove_listener(removed);
  const std::uint64_t token = controls[0]->on_departure(listener);
  CHECK(token != 0);
  for (int peer : {1, 2, 3}) {
    CHECK(!controls[0]->has_left(peer));
  }
  controls[3]->close();
  CHECK(eventually([&] { return number() == 1; }));
  CHECK(controls[0]->has_left(3));
  CHECK(!controls[0]->has_left(1));
  controls[3].reset();
  CHECK(eventually([&] { return controls[0]->has_ended(3); }));
  CHECK(!controls[0]->failure());
  controls[1]->close();
  CHECK(eventually([&] { return number() == 2; }));
  CHECK_EQ(seen, (std::vector<int>{3, 1}));
  // Who asks late is told at once, and of what is still to come.
  std::vector<int> late;
  const std::uint64_t second = controls[0]->on_departure([&](int peer) {
    const std::lock_guard lock(mutex);
    late.push_back(peer);
  });
  CHECK_EQ(late, (std::vector<int>{3, 1}));
  controls[0]->remove_listener(token);
  controls[2]->close();
  CHECK(eventually([&] {
    const std::lock_guard lock(mutex);
    return late.size() == 3;
  }));
  controls[0]->remove_listener(second);
  CHECK_EQ(number(), 2);
  CHECK_THROWS(ErrorKind::kInvalidArgument, controls[0]->has_ended(0), "has no peer 0");
  // Of itself it knows what it did.
  CHECK(!controls[0]->has_left(0));
  controls[0]->close();
  CHECK(controls[0]->has_left(0));
}

TEST(control_a_dead_rank_has_left_after_the_failure_is_told) {
  const BeatingPair pair(0ms);
  std::vector<std::string> order;
  std::atomic<bool> told = false;
  (void)pair.mine->on_departure([&](int peer) {
    order.push_back(str("left ", peer));
    told = true;
  });
  (void)pair.mine->on_failure([&](const Error&) { order.emplace_back("failed"); });
  CHECK(!pair.mine->has_left(1));
  pair.peer->reset();
  const_cast<std::unique_ptr<Stranger>&>(pair.peer).reset();
  CHECK(eventually([&] { return told.load(); }));
  CHECK_EQ(order, (std::vector<std::string>{"failed", "left 1"}));
  CHECK(pair.mine->has_left(1));
}

TEST(solo_control_has_nobody_to_leave) {
  const auto solo = make_solo_control();
  solo->remove_listener(solo->on_departure([](int) { CHECK(false); }));
  solo->abort("the end");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->has_left(0), "rank 0 does not exist");
}

// --- Ends while the job starts ---------------------------------------------------------------------------------------

TEST(control_passes_on_the_loss_of_a_rank) {
  // Rank 1 dies while rank 0 still waits for rank 3, or when rank 0 has started; rank 2 is told both times.
  for (const int size : {4, 3}) {
    ControlListener listener("127.0.0.1", 0, size, JobToken{7});
    std::vector<std::string> addresses(static_cast<std::size_t>(size), "127.0.0.1:9");
    addresses[0] = listener.address();
    std::thread others([&] {
      auto one = std::make_unique<Stranger>(addresses[0]);
      const Stranger two(addresses[0]);
      CHECK(two.greet(2, 0));
      CHECK(one->greet(1, 0));
      one.reset();
      std::string words = two.read_until("(seen by rank 0)");
      while (words.starts_with(kBeat)) {
        words.erase(0, kBeat.size());
      }
      const auto frame = parse(words);
      CHECK(frame.has_value());
      if (frame) {
        const Error told = reported_error(frame->frame, 2, 0);
        check_kind(told, ErrorKind::kRankFailed, "rank 1 is gone: ");
        CHECK_EQ(told.context().peer, 1);
      }
    });
    const auto error = error_from([&] { (void)listener.connect(addresses, soon())->receive(2, 0, soon()); });
    check_kind(error, ErrorKind::kRankFailed, "rank 1 is gone: its ");
    CHECK_EQ(error->context().peer, 1);
    others.join();
  }
}

TEST(control_passes_on_an_error_before_it_leaves) {
  // Rank 2 has not heard of it yet: a goodbye alone would make rank 0 the one that it misses.
  const std::vector<std::pair<Error, std::string>> cases = {
      {Error(ErrorKind::kTransport, "it broke", {1, -1, -1, ""}), "rank 1 failed: it broke"},
      {Error(ErrorKind::kRankFailed, "rank 1 is gone: it died", {2, 1, -1, "heartbeat"}), "rank 1 is gone: it died"}};
  for (const auto& [error, told] : cases) {
    ControlListener listener("127.0.0.1", 0, 3, JobToken{7});
    const std::vector<std::string> addresses{listener.address(), "127.0.0.1:9", "127.0.0.1:9"};
    const Stranger one(addresses[0]);
    const Stranger two(addresses[0]);
    std::thread others([&] {
      CHECK(one.greet(1, 0));
      CHECK(two.greet(2, 0));
    });
    const auto control = listener.connect(addresses, soon());
    others.join();
    one.say(encode_abort(error));
    check_kind(error_from([&] { (void)control->receive(2, 0, soon()); }),
               error.kind() == ErrorKind::kRankFailed ? error.kind() : ErrorKind::kPeerError, told);
    control->close();
    std::string words = two.read_until(encode(FrameKind::kGoodbye, 0, {}));
    while (words.starts_with(kBeat)) {
      words.erase(0, kBeat.size());
    }
    const auto frame = parse(words);
    CHECK(frame.has_value() && frame->frame.kind == FrameKind::kAbort);
    if (frame) {
      const Error heard = reported_error(frame->frame, 2, 0);
      CHECK_EQ(std::string(heard.what()), told);
      CHECK_EQ(heard.context().peer, 1);
    }
  }
}

TEST(control_start_hears_of_a_rank_that_another_one_lost) {
  ControlListener listener("127.0.0.1", 0, 3, JobToken{7});
  const std::vector<std::string> addresses{listener.address(), "127.0.0.1:9", "127.0.0.1:9"};
  const Stranger one(addresses[0]);
  std::thread talking([&] {
    CHECK(one.greet(1, 0));
    one.say(encode_abort(Error(ErrorKind::kRankFailed, "rank 2 is gone: it died", {1, 2, -1, "init"})));
  });
  const auto error = error_from([&] { (void)listener.connect(addresses, soon()); });
  check_kind(error, ErrorKind::kRankFailed, "rank 2 is gone: it died");
  CHECK_EQ(error->context().peer, 2);
  talking.join();
}

TEST(control_start_tells_the_others_why_a_rank_gave_up) {
  // With patience: rank 1 has to greet within the limit.
  CHECK_EQ(with_patience(500ms,
                         [](milliseconds limit) -> std::string {
                           ControlListener listener("127.0.0.1", 0, 3, JobToken{7});
                           const std::vector<std::string> addresses{listener.address(), "127.0.0.1:9", "127.0.0.1:9"};
                           const Stranger one(addresses[0]);
                           bool greeted = false;
                           std::string words;
                           std::thread waiting([&] {
                             greeted = one.greet(1, 0);
                             words = greeted ? one.read_until("from host to host") : "";
                           });
                           const auto error =
                               error_from([&] { (void)listener.connect(addresses, Clock::now() + limit); });
                           waiting.join();
                           if (!greeted) {
                             return "rank 1 did not greet in time";
                           }
                           check_kind(error, ErrorKind::kTimedOut, "did not hear from rank 2 while");
                           CHECK(words.find("rank 0 did not hear from rank 2 while") != std::string::npos);
                           CHECK(words.find(": higher ranks come to " + addresses[0] + "; ") != std::string::npos);
                           return "";
                         }),
           "");
}

TEST(control_start_believes_what_a_rank_that_is_done_says) {
  const auto start_with = [](const std::function<void(const Stranger&)>& play) {
    ControlListener listener("127.0.0.1", 0, 3, JobToken{7});
    const std::vector<std::string> addresses{listener.address(), "127.0.0.1:9", "127.0.0.1:9"};
    std::thread one([&] {
      const Stranger stranger(addresses[0]);
      CHECK(stranger.greet(1, 0));
      play(stranger);
    });
    const auto error = error_from([&] { (void)listener.connect(addresses, Clock::now() + 10s); });
    one.join();
    return error;
  };
  check_kind(start_with([](const Stranger& one) {
               one.say(encode(FrameKind::kMessage, 0, "x") + encode(FrameKind::kAbort, 0, "ValueError: no"));
               CHECK(eventually([&] { return one.hung_up_on(); }, 10000ms));
             }),
             ErrorKind::kPeerError, "rank 1 failed: ValueError: no");
  check_kind(start_with([](const Stranger&) {}), ErrorKind::kRankFailed,
             "rank 1 is gone: its process ended while the job was starting");
  check_kind(start_with([](const Stranger& one) {
               one.say(std::string(64, 'Z'));
               CHECK(eventually([&] { return one.hung_up_on(); }, 10000ms));
             }),
             ErrorKind::kRankFailed, "not from hpcomm");
}

TEST(control_start_goes_on_without_a_rank_that_left_in_order) {
  ControlListener listener("127.0.0.1", 0, 3, JobToken{7});
  const std::vector<std::string> addresses{listener.address(), "127.0.0.1:9", "127.0.0.1:9"};
  std::thread others([&] {
    {
      const Stranger one(addresses[0]);
      CHECK(one.greet(1, 0));
      one.say(encode(FrameKind::kMessage, 4, "in passing") + encode(FrameKind::kGoodbye, 0, {}));
      std::this_thread::sleep_for(50ms);
    }
    std::this_thread::sleep_for(100ms);
    const Stranger two(addresses[0]);
    CHECK(two.greet(2, 0));
    two.say(encode(FrameKind::kMessage, 4, "here") + encode(FrameKind::kGoodbye, 0, {}));
    (void)two.read_until("thanks");
  });
  const auto mine = listener.connect(addresses, soon());
  CHECK_EQ(mine->receive(1, 4, soon()), "in passing");
  CHECK_EQ(mine->receive(2, 4, soon()), "here");
  CHECK(eventually([&] { return mine->has_left(1); }));
  CHECK(!mine->failure());
  mine->close();
  others.join();
}

// --- Strangers in great numbers --------------------------------------------------------------------------------------

TEST(control_start_drops_those_who_drip) {
  // With patience: the start has to look at the stranger between a quarter of the limit and its end.
  CHECK_EQ(
      with_patience(
          1000ms,
          [](milliseconds limit) -> std::string {
            CapturedStderr captured;
            ControlListener listener("127.0.0.1", 0, 2, JobToken{7});
            const Stranger stranger(listener.address());
            std::thread dripping([&] {
              // A greeting takes 64 of these steps: more than a quarter of the limit.
              for (const char byte : hello(1)) {
                stranger.say(std::string(1, byte));
                std::this_thread::sleep_for(limit / 100);
                if (stranger.hung_up_on()) {
                  return;
                }
              }
              CHECK(eventually([&] { return stranger.hung_up_on(); }, 2 * limit));
            });
            check_kind(
                error_from([&] { (void)listener.connect({listener.address(), "127.0.0.1:9"}, Clock::now() + limit); }),
                ErrorKind::kTimedOut, "rank 1");
            dripping.join();
            const std::string log = captured.text();
            return log.find("its greeting takes too long") != std::string::npos ? "" : "not dropped; the log: " + log;
          }),
      "");
}

TEST(control_starts_in_spite_of_a_thousand_idle_connections) {
  rlimit files{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const std::size_t number = files.rlim_cur >= 2500 ? 1000 : 300;
  CapturedStderr captured;
  const Listeners job(3);
  const auto start = Clock::now();
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (std::size_t i = 0; i < number; ++i) {
    strangers.push_back(std::make_unique<Stranger>(job.addresses[0]));
    if (i % 3 == 0) {
      strangers.back()->say("GET / HTTP/1.1\r\n\r\n        ");
    }
  }
  run_ranks(3, [&](int rank) {
    const auto mine = job.connect(rank, soon());
    CHECK_EQ(mine->exchange({0, 1, 2}, 0, str(rank), soon()), (std::vector<std::string>{"0", "1", "2"}));
  });
  CHECK(eventually([&] {
    return std::all_of(strangers.begin(), strangers.end(), [](const auto& stranger) { return stranger->hung_up_on(); });
  }));
  const std::string log = captured.text();
  CHECK(log.find("not from hpcomm") != std::string::npos);
  // A line for the first of each kind, and its sums: at the first look, for each second that has begun meanwhile, and
  // at the end.
  const std::size_t kinds = count(log, "dropped a connection from");
  CHECK(kinds <= kRefusals);
  const auto seconds = static_cast<std::size_t>((Clock::now() - start) / 1s);
  CHECK(count(log, "\n") <= kinds * (3 + seconds));
  // Together they tell of everyone that was dropped: of all but those it still had patience with.
  std::size_t told = kinds;
  constexpr std::string_view kSum = "rank 0 dropped ";
  for (std::size_t at = log.find(kSum); at != std::string::npos; at = log.find(kSum, at + 1)) {
    told += std::strtoul(log.c_str() + at + kSum.size(), nullptr, 10);  // 0 for "a connection"
  }
  CHECK(told + 70 >= number);
  CHECK(told <= number + 10);  // ranks 1 and 2 may have been dropped among them, and knocked again
}

TEST(refusals_are_summed_up) {
  CapturedStderr captured;
  {
    RefusalLog log(3);
    for (int i = 0; i < 100; ++i) {
      log.add(Refusal::kHungUp, "host:1", "it hung up");
      log.add(Refusal::kNotOurs, "host:2", "garbage");
    }
  }
  const std::string text = captured.text();
  CHECK_EQ(count(text, "\n"), 4);
  CHECK_EQ(count(text, "hpcomm: rank 3 dropped a connection from host:1: it hung up\n"), 1);
  CHECK_EQ(count(text, "hpcomm: rank 3 dropped a connection from host:2: garbage\n"), 1);
  CHECK_EQ(count(text, "dropped 99 more connections of this kind, the last from host:1: it hung up\n"), 1);
}

TEST(refusals_are_summed_up_once_a_second) {
  CapturedStderr captured;
  const auto start = Clock::now();
  {
    RefusalLog log(3);
    log.tick();
    for (int i = 0; i < 1000; ++i) {
      log.add(Refusal::kHungUp, "host:1", "it hung up");
      log.tick();
    }
  }
  // The first, a sum for each second that has begun meanwhile, and what is left at the end.
  const auto seconds = static_cast<std::size_t>((Clock::now() - start) / 1s);
  CHECK(count(captured.text(), "\n") <= 2 + seconds);
}

// --- Forks -----------------------------------------------------------------------------------------------------------

namespace {

// Runs `body` in a forked child and returns its exit code; -1 when it did not end by itself.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // a hang is a failure, not the end of the run
    ::_exit(body());
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST(control_in_a_forked_child_says_that_it_is_closed) {
  auto controls = connect_controls(2);
  // A thread that waits in a Control at the fork: its waiter must not hold up the child's end.
  std::thread waiter([&] { CHECK_EQ(controls[0]->receive(1, 9, soon()), "done"); });
  std::this_thread::sleep_for(20ms);
  const int code = in_child([&] {
    const std::vector<std::function<void()>> calls = {
        [&] { controls[0]->send(1, 0, "x"); },
        [&] { (void)controls[0]->receive(1, 0, soon()); },
        [&] { (void)controls[0]->has_left(1); },
        [&] { (void)controls[0]->has_ended(1); },
        [&] { controls[0]->check(); },
        [&] { (void)controls[0]->on_failure([](const Error&) {}); },
        [&] { (void)controls[0]->on_departure([](int) {}); },
    };
    int refused = 0;
    for (const auto& call : calls) {
      const auto error = error_from(call);
      refused += error && error->kind() == ErrorKind::kClosed &&
                 std::string_view(error->what()).find("in a forked child") != std::string_view::npos;
    }
    controls[0]->abort("a child's own trouble");
    controls[0]->remove_listener(1);
    controls[0]->close();
    controls[0].reset();
    controls[1].reset();
    return refused == static_cast<int>(calls.size()) ? 0 : 1;
  });
  CHECK_EQ(code, 0);
  // The parent has noticed nothing.
  controls[1]->send(0, 9, "done");
  waiter.join();
  CHECK(!controls[0]->failure());
  CHECK(!controls[0]->has_left(1));
  CHECK(!controls[1]->has_left(0));
}

TEST(control_leaves_no_socket_in_a_forked_child) {
  const auto sockets = [] {
    int found = 0;
    for (int fd = 0; fd < 200; ++fd) {
      std::array<char, 64> target{};
      if (::readlink(str("/proc/self/fd/", fd).c_str(), target.data(), target.size() - 1) > 0) {
        found += std::string_view(target.data()).starts_with("socket:") ||
                 std::string_view(target.data()).find("eventfd") != std::string_view::npos;
      }
    }
    return found;
  };
  const int before = sockets();
  auto controls = connect_controls(3);
  ControlListener listener("127.0.0.1", 0, 2, JobToken{7});
  CHECK(sockets() > before + 6);
  CHECK_EQ(in_child([&] { return sockets() == before ? 0 : 1; }), 0);
  // A number that the child uses for something else is not closed by what it inherited.
  CHECK_EQ(in_child([&] {
             std::vector<int> own;
             for (int i = 0; i < 40; ++i) {
               own.push_back(::dup(STDERR_FILENO));
             }
             controls.clear();
             listener.~ControlListener();
             return std::all_of(own.begin(), own.end(), [](int fd) { return ::write(fd, "", 0) == 0; }) ? 0 : 1;
           }),
           0);
  CHECK_EQ(controls.size(), 3);
  CHECK(!controls[0]->failure());
}

TEST(control_notices_the_death_of_a_rank_whose_child_lives) {
  ControlListener zero("127.0.0.1", 0, 2, JobToken{7});
  ControlListener one("127.0.0.1", 1, 2, JobToken{7});
  const std::vector<std::string> addresses{zero.address(), one.address()};
  std::vector<std::shared_ptr<Control>> controls(2);
  run_ranks(2, [&](int rank) {
    controls[static_cast<std::size_t>(rank)] = (rank == 0 ? zero : one).connect(addresses, soon(), 0ms);
  });
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    for (;;) {
      ::pause();
    }
  }
  controls[1]->close();
  controls[1].reset();
  CHECK(eventually([&] { return controls[0]->has_ended(1); }));  // the end of the connection, not only the goodbye
  CHECK_EQ(::kill(child, 0), 0);
  CHECK_EQ(::kill(child, SIGKILL), 0);
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
}
