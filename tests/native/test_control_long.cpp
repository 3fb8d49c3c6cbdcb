// control/: long messages. Their order among others, where they are put together, and what becomes of those that are
// under way when something fails.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "control/control.h"
#include "control/inflow.h"
#include "control/outbox.h"
#include "control/wire.h"
#include "native/check.h"
#include "native/control_peer.h"
#include "native/thread_communicator.h"

using namespace hpcomm;
using namespace hpcomm::control;
using namespace hpcomm::testing;
using namespace std::chrono_literals;

namespace {

std::string some_body(std::size_t bytes, unsigned seed) {
  std::string body(bytes, '\0');
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < bytes; i += 97) {
    body[i] = static_cast<char>(random());
  }
  return body;
}

// What became of a lent body.
struct Fate {
  std::promise<std::optional<Error>> told;
  std::future<std::optional<Error>> future = told.get_future();

  [[nodiscard]] std::optional<Error> get() {
    CHECK(future.wait_for(20s) == std::future_status::ready);
    return future.get();
  }
};

LentBody lent(const std::string& body, const std::shared_ptr<Fate>& fate) {
  const std::string_view view = body;
  const std::size_t third = body.size() / 3;
  return {{view.substr(0, third), {}, view.substr(third, 1), view.substr(third + 1)}, [fate](const Error* why) {
            fate->told.set_value(why != nullptr ? std::optional<Error>(*why) : std::nullopt);
          }};
}

// All that is to be sent, `most` bytes at a time, of which `between` is called after each.
template <typename Between>
std::string drain(Outbox& outbox, std::size_t most, const Between& between) {
  std::string sent;
  std::vector<Outbox::Sent> done;
  while (!outbox.empty()) {
    std::array<iovec, 2> parts;
    const std::size_t count = outbox.next(parts);
    CHECK(count > 0);
    std::size_t took = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t now = std::min(parts[i].iov_len, most - took);
      sent.append(static_cast<const char*>(parts[i].iov_base), now);
      took += now;
    }
    outbox.took(took, done);
    for (const Outbox::Sent& one : std::exchange(done, {})) {
      one(nullptr);
    }
    between();
  }
  return sent;
}

// "kind channel bytes" of each frame.
std::vector<std::string> frames_of(std::string_view bytes) {
  std::vector<std::string> found;
  while (const auto parsed = parse(bytes)) {
    found.push_back(str(int{static_cast<std::uint8_t>(parsed->frame.kind)}, " ", parsed->frame.channel, " ",
                        parsed->frame.body.size()));
    bytes.remove_prefix(parsed->consumed);
  }
  CHECK(bytes.empty());
  return found;
}

constexpr std::size_t kLongBytes = 2 * kPieceBytes + 5;

// Rank 0 of two; rank 1 is played by hand.
struct Pair {
  Pair() {
    ControlListener listener("127.0.0.1", 0, 2, JobToken{7});
    peer = std::make_unique<Stranger>(listener.address());
    std::thread greeting([this] { CHECK(peer->greet(1, 0)); });
    mine = listener.connect({listener.address(), "127.0.0.1:9"}, soon());
    greeting.join();
  }
  std::unique_ptr<Stranger> peer;
  std::shared_ptr<Control> mine;
};

// While it lives, this process may take `more` bytes of memory; also of what malloc has reserved for threads, which
// RLIMIT_AS counts already.
class LittleMemory {
 public:
  explicit LittleMemory(rlim_t more) {
    CHECK_EQ(::getrlimit(RLIMIT_DATA, &before_), 0);
    std::ifstream file("/proc/self/statm");
    rlim_t pages = 0;
    for (int field = 1; field <= kData; ++field) {
      file >> pages;
    }
    const rlimit little{pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + more, before_.rlim_max};
    CHECK_EQ(::setrlimit(RLIMIT_DATA, &little), 0);
  }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;
  ~LittleMemory() { ::setrlimit(RLIMIT_DATA, &before_); }

 private:
  static constexpr int kData = 6;  // proc_pid_statm(5)
  rlimit before_{};
};

}  // namespace

// --- Order -----------------------------------------------------------------------------------------------------------

TEST(outbox_lets_short_frames_of_other_channels_overtake) {
  const std::string body = some_body(kLongBytes, 1);
  for (const std::size_t most : {std::size_t{1} << 30, kPieceBytes / 3}) {
    Outbox outbox;
    const auto fate = std::make_shared<Fate>();
    outbox.lend(7, lent(body, fate));
    bool first = true;
    const std::string sent = drain(outbox, most, [&] {
      if (std::exchange(first, false)) {
        outbox.add(FrameKind::kMessage, 7, "behind");
        outbox.add(FrameKind::kGoodbye, 0, {});
        outbox.add(FrameKind::kMessage, 8, "ahead");
        outbox.add(FrameKind::kHeartbeat, 0, {});
      }
    });
    const std::vector<std::string> expected{"8 7 8",       "9 7 1048576", "2 8 5", "7 0 0",
                                            "9 7 1048576", "9 7 5",       "2 7 6", "4 0 0"};
    CHECK(frames_of(sent) == expected);
    CHECK(!fate->get());
    CHECK_EQ(outbox.bytes(), 0U);
    Inflow inflow([](std::uint64_t, std::size_t) { return Buffer{}; });
    inflow.take(sent);
    CHECK_EQ(inflow.next()->body.view(), "ahead");
    CHECK_EQ(inflow.next()->kind, FrameKind::kHeartbeat);
    CHECK(inflow.next()->body.view() == body);
    CHECK_EQ(inflow.next()->body.view(), "behind");
    CHECK_EQ(inflow.next()->kind, FrameKind::kGoodbye);
  }
}

TEST(outbox_ends_a_piece_whose_body_it_lets_go_of) {
  std::string body = some_body(kLongBytes, 1);
  Outbox outbox;
  const auto first = std::make_shared<Fate>();
  const auto second = std::make_shared<Fate>();
  outbox.lend(7, lent(body, first));
  outbox.lend(8, lent(body, second));
  bool told = false;
  const std::string sent = drain(outbox, 1000, [&] {
    if (!std::exchange(told, true)) {
      outbox.add(FrameKind::kAbort, 0, "why");
      for (const auto& one : outbox.let_go()) {
        const Error error(ErrorKind::kClosed, "enough");
        one(&error);
      }
      std::fill(body.begin(), body.end(), '!');  // it is its owner's again
    }
  });
  const std::vector<std::string> expected{"8 7 8", "9 7 1048576", "3 0 3"};
  CHECK(frames_of(sent) == expected);
  CHECK(sent.find('!') == std::string::npos || sent.find("!!!!!!!!!!!!!!!!") == std::string::npos);
  check_kind(first->get(), ErrorKind::kClosed, "enough");
  check_kind(second->get(), ErrorKind::kClosed, "enough");
}

TEST(inflow_puts_messages_together_wherever_they_are_cut) {
  std::mt19937 random(5);
  Outbox outbox;
  std::vector<std::string> bodies;
  for (unsigned i = 0; i < 12; ++i) {
    bodies.push_back(some_body(random() % (3 * kPieceBytes), i));
  }
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    outbox.lend(i % 3, {{bodies[i]}, nullptr});
  }
  const std::string sent = drain(outbox, 300000, [] {});
  for (const bool placed : {false, true}) {
    int places = 0;
    Inflow inflow([&](std::uint64_t, std::size_t bytes) {
      ++places;
      return placed ? HeapAllocator().allocate(bytes) : Buffer{};
    });
    std::vector<std::size_t> next{0, 1, 2};  // by channel
    std::size_t arrived = 0;
    for (std::string_view rest = sent; !rest.empty();) {
      const std::size_t cut = std::min<std::size_t>(rest.size(), random() % 200000 + 1);
      const auto landing = inflow.landing();
      CHECK(placed || landing.empty());
      const std::size_t landed = std::min(cut, landing.size());
      std::copy_n(rest.begin(), landed, landing.begin());
      inflow.landed(landed);
      inflow.take(rest.substr(landed, cut - landed));
      rest.remove_prefix(cut);
      while (const auto arrival = inflow.next()) {
        std::size_t& due = next[arrival->channel];
        CHECK(arrival->body.view() == bodies[due]);
        due += 3;
        ++arrived;
      }
    }
    CHECK_EQ(arrived, bodies.size());
    CHECK(places > 0);
  }
}

TEST(inflow_refuses_pieces_that_do_not_fit) {
  const auto nowhere = [](std::uint64_t, std::size_t) { return Buffer{}; };
  const auto refuses = [&](const std::string& bytes, const char* part) {
    Inflow inflow(nowhere);
    inflow.take(bytes);
    check_kind(error_from([&] {
                 while (inflow.next()) {
                 }
               }),
               ErrorKind::kProtocol, part);
  };
  const std::string begin = encode(FrameKind::kLong, 1, encode_length(kPieceBytes + 1));
  const std::string piece = encode(FrameKind::kPiece, 1, std::string(kPieceBytes, 'p'));
  refuses(piece, "a piece of no message");
  refuses(begin + encode(FrameKind::kPiece, 2, "p"), "a piece of no message");
  refuses(begin + encode(FrameKind::kPiece, 1, {}), "a piece of no message");
  refuses(begin + piece + encode(FrameKind::kPiece, 1, "pp"), "a piece of no message");
  refuses(begin + begin, "within another one");
  refuses(begin + encode(FrameKind::kMessage, 1, "m"), "within another one");
  refuses(encode(FrameKind::kLong, 1, "x"), "wrong length");
  refuses(encode(FrameKind::kLong, 1, encode_length(kPieceBytes)), "in pieces");
  refuses(encode(FrameKind::kLong, 1, encode_length(kMaxBody + 1)), "the limit is");
  refuses(encode(FrameKind::kLong, 1, encode_length(~std::size_t{0})), "the limit is");
}

// --- Over sockets ----------------------------------------------------------------------------------------------------

TEST(control_long_messages_of_several_channels_arrive_among_short_ones) {
  const auto controls = connect_controls(2);
  constexpr unsigned kChannels = 3;
  constexpr unsigned kMessages = 12;
  // Longer and shorter than a piece, and than what is read without a place of its own.
  const auto body = [](unsigned channel, unsigned i) {
    return some_body(std::size_t{1} << (8 + (channel * 5 + i * 7) % 16), channel * 100 + i);
  };
  std::atomic<int> places = 0;
  run_ranks(2, [&](int rank) {
    Control& mine = *controls[static_cast<std::size_t>(rank)];
    const int peer = 1 - rank;
    for (unsigned channel = 1; channel < kChannels; ++channel) {  // channel 0 has none
      mine.land(peer, channel, [&](std::size_t bytes) {
        ++places;
        return HeapAllocator().allocate(bytes);
      });
    }
    std::vector<std::thread> threads;
    for (unsigned channel = 0; channel < kChannels; ++channel) {
      threads.emplace_back([&, channel] {
        std::vector<std::shared_ptr<Fate>> fates;
        std::vector<std::unique_ptr<std::string>> bodies;
        for (unsigned i = 0; i < kMessages; ++i) {
          bodies.push_back(std::make_unique<std::string>(body(channel, i)));
          if (i % 2 == 0) {
            fates.push_back(std::make_shared<Fate>());
            mine.send_lent(peer, channel, lent(*bodies.back(), fates.back()));
          } else {
            mine.send(peer, channel, *bodies.back());
          }
          mine.send(peer, 99, "short");
        }
        for (const auto& fate : fates) {
          CHECK(!fate->get());
        }
      });
      threads.emplace_back([&, channel] {
        for (unsigned i = 0; i < kMessages; ++i) {
          const auto got = mine.try_receive_body(peer, channel, soon());
          CHECK(got.has_value());
          CHECK(got && got->view() == body(channel, i));
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (unsigned i = 0; i < kChannels * kMessages; ++i) {
      CHECK_EQ(mine.receive(peer, 99, soon()), "short");
    }
    for (unsigned channel = 1; channel < kChannels; ++channel) {
      mine.land(peer, channel, nullptr);
    }
  });
  CHECK(places > 0);
}

TEST(control_long_message_needs_no_place) {
  const auto controls = connect_controls(2);
  controls[1]->land(0, 5, [](std::size_t) -> Buffer { throw std::bad_alloc(); });
  const std::string body = some_body(kLongBytes, 3);
  const auto fate = std::make_shared<Fate>();
  controls[0]->send_lent(1, 5, lent(body, fate));
  CHECK(controls[1]->receive(0, 5, soon()) == body);
  CHECK(!fate->get());
}

TEST(control_leaves_after_its_long_messages) {
  const auto controls = connect_controls(2);
  const std::string body = some_body(20 << 20, 4);
  const auto fate = std::make_shared<Fate>();
  controls[0]->send_lent(1, 5, lent(body, fate));
  controls[0]->close();
  CHECK(!fate->get());
  CHECK(controls[1]->receive(0, 5, soon()) == body);
}

TEST(control_abort_does_not_wait_for_a_long_message) {
  const Pair pair;
  std::string body(48 << 20, 'b');  // more than the sockets take, and nobody reads
  const auto fate = std::make_shared<Fate>();
  pair.mine->send_lent(1, 5, lent(body, fate));
  CHECK(fate->future.wait_for(0s) != std::future_status::ready);
  pair.mine->abort("of no use any more");
  check_kind(fate->get(), ErrorKind::kClosed, "of no use any more");
  std::fill(body.begin(), body.end(), '!');
  const std::string heard = pair.peer->read_until("of no use any more");
  CHECK(heard.find("of no use any more") != std::string::npos);
  CHECK(heard.size() < body.size());
  CHECK(heard.find('!') == std::string::npos);
}

TEST(control_says_what_became_of_a_long_message_to_a_peer_that_dies) {
  Pair pair;
  const std::string body(48 << 20, 'b');
  std::vector<std::shared_ptr<Fate>> fates;
  for (std::uint64_t channel = 1; channel < 4; ++channel) {
    fates.push_back(std::make_shared<Fate>());
    pair.mine->send_lent(1, channel, lent(body, fates.back()));
  }
  pair.peer->reset();
  pair.peer.reset();
  for (const auto& fate : fates) {
    check_kind(fate->get(), ErrorKind::kRankFailed, "rank 1");
  }
  check_kind(error_from([&] { (void)pair.mine->receive(1, 5, soon()); }), ErrorKind::kRankFailed, "rank 1 is gone");
}

TEST(control_a_peer_that_dies_within_its_message_leaves_none) {
  for (const bool placed : {false, true}) {
    Pair pair;
    std::atomic<int> places = 0;
    pair.mine->land(1, 5, [&](std::size_t bytes) {
      ++places;
      return placed ? HeapAllocator().allocate(bytes) : Buffer{};
    });
    pair.peer->say(encode(FrameKind::kLong, 5, encode_length(kLongBytes)) +
                   encode(FrameKind::kPiece, 5, std::string(kPieceBytes, 'p')));
    CHECK(eventually([&] { return places == 1; }));
    pair.peer.reset();
    check_kind(error_from([&] { (void)pair.mine->receive(1, 5, soon()); }), ErrorKind::kRankFailed, "rank 1 is gone");
  }
}

TEST(control_tells_of_a_long_message_when_it_is_closed) {
  const auto fate = std::make_shared<Fate>();
  const std::string body(48 << 20, 'b');
  const Pair pair;
  pair.mine->send_lent(1, 5, lent(body, fate));
  pair.mine->close();  // the peer takes nothing: it gives up
  check_kind(fate->get(), ErrorKind::kClosed, "left the job");
}

// The rank that is short of it says so, and its process goes on.
TEST(control_without_memory_for_a_long_message_says_so_on_both_ends) {
  if (check::under_sanitizer()) {
    return;  // which ends a process that asks for what there is not
  }
  Pair pair;
  const std::string begin = encode(FrameKind::kLong, 5, encode_length(kMaxBody));
  const std::string piece = encode(FrameKind::kPiece, 5, std::string(kPieceBytes, 'p'));
  std::optional<Error> error;
  {
    const LittleMemory little(4 << 20);
    pair.peer->say(begin);
    for (std::size_t sent = 0; sent < kMaxBody; sent += kPieceBytes) {
      pair.peer->say(piece);
    }
    error = error_from([&] { (void)pair.mine->receive(1, 5, soon()); });
  }
  check_kind(error, ErrorKind::kTransport, "rank 0 has no memory for what rank 1 sends");
  const std::string words = "has no memory for what rank 1 sends";
  CHECK(pair.peer->read_until(words).find(words) != std::string::npos);
  pair.peer.reset();
  CHECK(eventually([&] { return pair.mine->has_ended(1); }));
}

// What the socket does not take has to be copied: its owner does not keep it.
TEST(control_without_memory_for_the_rest_of_a_message_sends_nothing_of_it_later) {
  if (check::under_sanitizer()) {
    return;
  }
  const Pair pair;
  std::string body(48 << 20, 'b');
  {
    const LittleMemory little(4 << 20);
    bool failed = false;
    try {
      pair.mine->send(1, 5, body);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    CHECK(failed);
  }
  std::fill(body.begin(), body.end(), '!');
  const std::string heard = pair.peer->read_until("!!!!!!!!");
  CHECK(heard.size() < body.size());
  CHECK(heard.find('!') == std::string::npos);
  check_kind(error_from([&] { pair.mine->send(1, 5, "more"); }), ErrorKind::kTransport,
             "rank 0 has no memory for a message to rank 1");
}
