// Who waits for long: what ranks tell each other of it, and what the first of them shows.
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/waiting.h"
#include "control/control.h"
#include "control/long_wait.h"
#include "control/wait_table.h"
#include "native/check.h"
#include "native/control_peer.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::control;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

LongWait wait_of(std::chrono::seconds lasts, const std::string& where) { return {lasts, where}; }

const std::vector<int> kFive{0, 1, 2, 3, 4};

}  // namespace

TEST(long_wait_comes_back) {
  const auto told = parse_wait(encode_wait(LongWait{70s, "barrier #3 on lane dp"}));
  CHECK(told.has_value());
  CHECK_EQ(told->lasts.count(), 70);
  CHECK_EQ(told->where, "barrier #3 on lane dp");
  CHECK(!parse_wait(encode_wait(std::nullopt)).has_value());
  CHECK_EQ(parse_wait(encode_wait(LongWait{1s, std::string(100000, 'x')}))->where.size(), 400U);
  CHECK_EQ(parse_wait(std::string(8, '\xff'))->lasts.count(), 366 * 86400);
  CHECK_THROWS(ErrorKind::kProtocol, parse_wait("short"), "5 bytes");
  CHECK_THROWS(ErrorKind::kProtocol, parse_wait(std::string(409, 'x')), "409 bytes");
}

TEST(wait_table_shows_who_waits_in_what) {
  const Deadline start{};
  WaitTable table;
  CHECK_EQ(table.due(kFive, start + 1h), "");
  table.note(0, 1, wait_of(10s, "barrier"), start + 100s);
  table.note(2, 7, wait_of(11s, "barrier"), start + 100s);
  table.note(3, 1, wait_of(10s, "recv\n\x1b[2J"), start + 100s);
  table.note(1, 1, wait_of(10s, "barrier"), start + 100500ms);
  CHECK_EQ(table.due(kFive, start + 100900ms), "");  // others may have something to say
  CHECK_EQ(table.due(kFive, start + 101s),
           "hpcomm: some ranks have waited for long:\n"
           "  rank 0-2, for 12 s: barrier\n"
           "  rank 3, for 11 s: recv  [2J\n"
           "  rank 4 has not: computing, or waiting for something else\n");
  CHECK_EQ(table.due(kFive, start + 1h), "");  // nothing new
}

TEST(wait_table_forgets_what_is_over) {
  const Deadline start{};
  WaitTable table;
  table.note(0, 1, wait_of(10s, "barrier"), start);
  table.note(0, 1, std::nullopt, start);
  CHECK_EQ(table.due(kFive, start + 2s), "");
  table.note(1, 5, wait_of(10s, "barrier"), start + 10s);
  table.note(1, 6, wait_of(10s, "recv"), start + 10s);
  table.note(2, 5, wait_of(10s, "barrier"), start + 10s);
  table.forget(1);
  CHECK_EQ(table.due({0, 2, 4}, start + 12s),
           "hpcomm: some ranks have waited for long:\n  rank 2, for 12 s: barrier\n"
           "  rank 0, 4 have not: computing, or waiting for something else\n");
}

TEST(wait_table_shows_less_and_less_often) {
  const Deadline start{};
  WaitTable table;
  int shown = 0;
  for (auto now = start; now < start + 24h; now += 12s) {  // steps that one rank makes slow
    table.note(1, 1, wait_of(10s, "backward"), now);
    shown += table.due(kFive, now + 1s).empty() ? 0 : 1;
    table.note(1, 1, std::nullopt, now + 2s);
  }
  CHECK(shown > 10);
  CHECK(shown < 160);  // every ten minutes in the end
  // One of them does not end.
  const Deadline last = start + 24h;
  table.note(1, 1, wait_of(10s, "backward"), last);
  table.note(1, 1, wait_of(60s, "backward"), last + 50s);
  CHECK(table.due(kFive, last + 52s).find("rank 1, for 62 s: backward") != std::string::npos);
}

TEST(wait_table_shows_what_is_rare_at_once) {
  const Deadline start{};
  WaitTable table;
  for (auto now = start + 1h; now < start + 72h; now += 30min) {  // checkpoints
    table.note(1, 1, wait_of(10s, "barrier"), now);
    CHECK(table.due(kFive, now + 1s).find("rank 1, for 11 s: barrier") != std::string::npos);
    table.note(1, 1, std::nullopt, now + 2s);
  }
}

TEST(wait_table_of_many_places_stays_short) {
  const Deadline start{};
  WaitTable table;
  std::vector<int> ranks;
  for (int rank = 0; rank < 1000; ++rank) {
    ranks.push_back(rank);
    for (std::uint64_t wait = 1; wait < 1000; ++wait) {
      table.note(rank, wait, wait_of(10s, str("recv #", wait, " of ", rank)), start);
    }
  }
  const std::string text = table.due(ranks, start + 1s);
  CHECK(text.size() < 4000);
  CHECK(text.find("and others in 7980 more places\n") != std::string::npos);
  CHECK(text.find("have not") == std::string::npos);
}

TEST(waiting_says_what_the_outermost_waits_for) {
  CHECK(Waiting::current() == nullptr);
  static int over = 0;
  const std::string lane = "dp";
  const ErrorContext sum{0, -1, 3, "all_reduce"};
  const ErrorContext message{0, 2, 7, "recv"};
  {
    const Waiting outer(sum, &lane);
    {
      const Waiting inner(message);
      CHECK(Waiting::current() == &outer);
      std::thread([&] {
        CHECK(Waiting::current() == nullptr);
        const Waiting other(message);
        CHECK_EQ(Waiting::current()->words(), "recv #7 from rank 2");
      }).join();
    }
    CHECK_EQ(Waiting::current()->words(), "all_reduce #3 on lane dp");
    Waiting::current()->told.over = [](std::uint64_t number) { over = static_cast<int>(number); };
    Waiting::current()->told.number = 5;
    CHECK_EQ(over, 0);
  }
  CHECK_EQ(over, 5);
  CHECK(Waiting::current() == nullptr);
  const Waiting other(&lane, [](const void* about) { return "lane " + *static_cast<const std::string*>(about); });
  CHECK_EQ(Waiting::current()->words(), "lane dp");
}

// What is said of waits is nobody's failure, whatever the state of the job; what no hpcomm says is.
TEST(control_says_who_waits) {
  ControlListener listener0("127.0.0.1", 0, 2, JobToken{7});
  const std::vector<std::string> addresses{listener0.address(), "127.0.0.1:9"};
  Stranger other(addresses[0]);
  std::shared_ptr<Control> control;
  std::thread greeting([&] { CHECK(other.greet(1, 0)); });
  control = listener0.connect(addresses, soon());
  greeting.join();
  control->say_waiting(1, LongWait{10s, "its own"});
  other.say(encode(FrameKind::kWaits, 1, encode_wait(LongWait{10s, "theirs"})) + encode(FrameKind::kWaits, 1, "") +
            encode(FrameKind::kMessage, 4, "behind"));
  CHECK_EQ(control->receive(1, 4, soon()), "behind");
  control->say_waiting(1, std::nullopt);
  other.say(encode(FrameKind::kWaits, 1, "short"));
  check_kind(error_from([&] { (void)control->receive(1, 4, soon()); }), ErrorKind::kRankFailed, "5 bytes");
  control->say_waiting(2, LongWait{10s, "after the end"});
  control->close();
  control->say_waiting(2, std::nullopt);
}
