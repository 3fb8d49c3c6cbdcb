// control/: the wire format against damaged bytes, and jobs whose ranks are threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "control/control.h"
#include "control/tcp_control.h"
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

std::size_t count_entries(const char* folder) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator{}));
}

// A port where nobody listens, and nobody else can begin to while this lives.
class DeafPort {
 public:
  DeafPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    ::inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    CHECK_EQ(::bind(fd_, reinterpret_cast<const sockaddr*>(&where), sizeof where), 0);
    socklen_t length = sizeof where;
    CHECK_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&where), &length), 0);
    address = str("127.0.0.1:", ntohs(where.sin_port));
  }
  DeafPort(const DeafPort&) = delete;
  DeafPort& operator=(const DeafPort&) = delete;
  ~DeafPort() { ::close(fd_); }
  std::string address;

 private:
  int fd_;
};

}  // namespace

// --- Wire ------------------------------------------------------------------------------------------------------------

TEST(wire_frames_come_back) {
  for (std::size_t length : {0U, 1U, 23U, 24U, 25U, 1000U, 1U << 20}) {
    const std::string body(length, 'x');
    for (FrameKind kind :
         {FrameKind::kHello, FrameKind::kMessage, FrameKind::kAbort, FrameKind::kGoodbye, FrameKind::kChallenge,
          FrameKind::kProof, FrameKind::kHeartbeat, FrameKind::kLong, FrameKind::kPiece, FrameKind::kWaits}) {
      const std::string bytes = encode(kind, 0xfedcba9876543210ULL, body);
      CHECK_EQ(bytes.size(), kPrefixBytes + length);
      const auto parsed = parse(bytes + "the next frame");
      CHECK(parsed.has_value());
      CHECK_EQ(parsed->consumed, bytes.size());
      CHECK_EQ(parsed->frame.kind, kind);
      CHECK_EQ(parsed->frame.channel, 0xfedcba9876543210ULL);
      CHECK(parsed->frame.body == body);
    }
  }
}

TEST(wire_format_is_fixed) {
  using namespace std::string_literals;
  CHECK(encode(FrameKind::kMessage, 0x0102, "ab") == "pcom\x05\x02\0\0\x02\x01\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"s + "ab");
}

TEST(wire_waits_for_the_rest_of_a_cut_frame) {
  const std::string bytes = encode(FrameKind::kMessage, 5, "a body of some bytes");
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    // A copy of its own, so that a read behind the end is seen by the address sanitizer.
    const std::vector<char> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    CHECK(!parse(cut).has_value());
  }
}

TEST(wire_refuses_what_no_hpcomm_sends) {
  const std::string good = encode(FrameKind::kMessage, 5, "body");
  const auto with = [&good](std::size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    return bytes;
  };
  CHECK_THROWS(ErrorKind::kProtocol, parse(with(0, 'P')), "not from hpcomm");
  CHECK_THROWS(ErrorKind::kProtocol, parse(with(4, 1)), "version 1");
  CHECK_THROWS(ErrorKind::kProtocol, parse(with(5, 0)), "kind 0");
  CHECK_THROWS(ErrorKind::kProtocol, parse(with(5, 11)), "kind 11");
  CHECK_THROWS(ErrorKind::kProtocol, parse(with(6, 1)), "unknown frame");
  CHECK_THROWS(ErrorKind::kProtocol, parse(with(23, 1)), "the limit is");
  CHECK_THROWS(ErrorKind::kProtocol, parse(std::string("GET / HTTP/1.1\r\nHost: a\r\n\r\n")), "not from hpcomm");
}

TEST(wire_refuses_a_length_over_the_limit_before_the_body_is_there) {
  std::string bytes = encode(FrameKind::kMessage, 5, "");
  const auto announce = [&bytes](std::uint64_t length) {
    std::memcpy(bytes.data() + 16, &length, sizeof length);
    return bytes;
  };
  CHECK(!parse(announce(kMaxBody)).has_value());
  CHECK_THROWS(ErrorKind::kProtocol, parse(announce(kMaxBody + 1)), "the limit is");
  CHECK_THROWS(ErrorKind::kProtocol, parse(announce(~std::uint64_t{0})), "the limit is");
  CHECK_THROWS(ErrorKind::kProtocol, parse(announce(~std::uint64_t{0} - kPrefixBytes + 1)), "the limit is");
}

TEST(wire_does_not_send_what_it_would_not_read) {
  CHECK_EQ(encode(FrameKind::kMessage, 0, std::string(kMaxBody, 'x')).size(), kMaxBody + kPrefixBytes);
  CHECK_THROWS(ErrorKind::kInvalidArgument, encode(FrameKind::kMessage, 0, std::string(kMaxBody + 1, 'x')), "limit");
}

TEST(wire_parser_withstands_mutations) {
  std::mt19937 random(11);
  int accepted = 0;
  for (int round = 0; round < 200000; ++round) {
    std::string bytes = encode(static_cast<FrameKind>(1 + random() % 4), random(), std::string(random() % 40, 'b'));
    for (std::size_t flips = random() % 4; flips > 0; --flips) {
      // Mostly the prefix: that is where a parser can be led astray.
      bytes[random() % std::min<std::size_t>(bytes.size(), random() % 4 == 0 ? 64 : kPrefixBytes)] ^=
          static_cast<char>(1U << random() % 8);
    }
    bytes.resize(random() % 8 == 0 ? random() % (bytes.size() + 1) : bytes.size());
    const std::vector<char> exact(bytes.begin(), bytes.end());
    try {
      const auto parsed = parse(exact);
      if (parsed) {
        ++accepted;
        CHECK(parsed->consumed <= exact.size());
        CHECK_EQ(parsed->frame.body.size() + kPrefixBytes, parsed->consumed);
        // Accepted means: some hpcomm may have sent exactly this.
        CHECK(encode(parsed->frame.kind, parsed->frame.channel, parsed->frame.body) ==
              std::string(exact.data(), parsed->consumed));
      }
    } catch (const Error& error) {
      CHECK_EQ(error.kind(), ErrorKind::kProtocol);
    }
  }
  CHECK(accepted > 1000);  // or this test says nothing
}

TEST(wire_refuses_more_than_its_caller_expects) {
  const std::string bytes = encode(FrameKind::kProof, 0, std::string(33, 'x'));
  CHECK(parse(bytes, 33).has_value());
  CHECK_THROWS(ErrorKind::kProtocol, parse(bytes, 32), "33 bytes; the limit is 32");
  CHECK_THROWS(ErrorKind::kProtocol, parse(bytes.substr(0, kPrefixBytes), 32), "the limit is 32");
}

TEST(wire_greetings_come_back) {
  Hello greeting{1023, 7, {}};
  for (std::size_t i = 0; i < greeting.nonce.size(); ++i) {
    greeting.nonce[i] = static_cast<unsigned char>(255 - i);
  }
  const std::string body = encode_hello(greeting);
  const Hello parsed = parse_hello(body);
  CHECK(parsed.nonce == greeting.nonce);
  CHECK_EQ(parsed.from, 1023);
  CHECK_EQ(parsed.to, 7);
  for (std::size_t length = 0; length < body.size(); ++length) {
    CHECK_THROWS(ErrorKind::kProtocol, parse_hello(body.substr(0, length)), "wrong length");
  }
  CHECK_THROWS(ErrorKind::kProtocol, parse_hello(body + "x"), "wrong length");
}

TEST(wire_a_lost_rank_stays_one_whoever_reports_it) {
  const auto told = [](const Error& error) { return reported_error(parse(encode_abort(error))->frame, 2, 0); };
  const Error lost = told(Error(ErrorKind::kRankFailed, "rank 5 is gone", {0, 5, -1, "init"}));
  check_kind(lost, ErrorKind::kRankFailed, "rank 5 is gone");
  CHECK_EQ(lost.context().peer, 5);
  CHECK_EQ(lost.context().rank, 2);
  const Error late = told(Error(ErrorKind::kTimedOut, "nobody came", {0, -1, -1, "init"}));
  check_kind(late, ErrorKind::kPeerError, "rank 0 failed: nobody came");
  CHECK_EQ(late.context().peer, 0);
}

// --- A job of threads ------------------------------------------------------------------------------------------------

TEST(control_largest_message_arrives) {
  const auto controls = connect_controls(2);
  std::string body(kMaxBody, 'x');
  body.back() = 'y';
  controls[0]->send(1, 0, body);
  CHECK(controls[1]->receive(0, 0, soon()) == body);
  CHECK_THROWS(ErrorKind::kInvalidArgument, controls[0]->send(1, 0, body + "z"), "the limit is");
  CHECK(!controls[0]->failure());
}

// A part of a larger job: ranks keep their numbers, and those in between do not exist.
TEST(control_of_some_ranks_of_a_job) {
  constexpr std::array<int, 2> kRanks{1, 3};
  std::vector<std::unique_ptr<ControlListener>> listeners;
  std::vector<std::string> addresses(4);
  for (const int rank : kRanks) {
    listeners.push_back(std::make_unique<ControlListener>("127.0.0.1", rank, 4, JobToken{7}));
    addresses[static_cast<std::size_t>(rank)] = listeners.back()->address();
  }
  run_ranks(2, [&](int place) {
    const auto control = listeners[static_cast<std::size_t>(place)]->connect(addresses, soon());
    const int rank = kRanks[static_cast<std::size_t>(place)];
    CHECK_EQ(control->rank(), rank);
    const auto all = control->exchange({1, 3}, 5, str("rank ", rank), soon());
    CHECK_EQ(all[0], "rank 1");
    CHECK_EQ(all[1], "rank 3");
    CHECK(control->has_left(2));
    CHECK_THROWS(ErrorKind::kRankFailed, control->send(2, 5, "anybody?"), "rank 2 has left the job");
    CHECK(!control->failure());
    if (rank == 3) {
      CHECK_EQ(control->receive(1, 6, soon()), "checked");
      control->abort("enough");
      return;
    }
    control->send(3, 6, "checked");
    const auto error = error_from([&] { (void)control->receive(3, 5, soon()); });
    check_kind(error, ErrorKind::kPeerError, "rank 3 failed");
  });
}

// A rank whose process dies: its sockets close without a goodbye. Played by a peer that speaks the protocol by hand.
TEST(control_names_a_rank_that_dies) {
  for (const bool hard : {false, true}) {
    ControlListener listener0("127.0.0.1", 0, 3, JobToken{7});
    ControlListener listener1("127.0.0.1", 1, 3, JobToken{7});
    const std::vector<std::string> addresses{listener0.address(), listener1.address(), "127.0.0.1:9"};
    auto to0 = std::make_unique<Stranger>(addresses[0]);
    auto to1 = std::make_unique<Stranger>(addresses[1]);
    std::vector<std::shared_ptr<Control>> controls(2);
    std::thread dying([&] {
      CHECK(to0->greet(2, 0));
      to0->say(encode(FrameKind::kMessage, 4, "alive"));
      CHECK(to1->greet(2, 1));
    });
    run_ranks(2, [&](int rank) {
      controls[static_cast<std::size_t>(rank)] = (rank == 0 ? listener0 : listener1).connect(addresses, soon());
    });
    dying.join();
    CHECK_EQ(controls[0]->receive(2, 4, soon()), "alive");
    if (hard) {
      to0->reset();
      to1->reset();
    }
    std::thread killer([&] {
      std::this_thread::sleep_for(3ms);
      to0.reset();
      to1.reset();
    });
    run_ranks(2, [&](int rank) {
      Control& mine = *controls[static_cast<std::size_t>(rank)];
      // Rank 0 waits for the dead rank, rank 1 for the living one: both must learn it, and by the end of the
      // connection.
      const auto error = error_from([&] { (void)mine.receive(rank == 0 ? 2 : 0, 0, soon()); });
      check_kind(error, ErrorKind::kRankFailed, "rank 2 is gone: its ");
      CHECK_EQ(error->context().peer, 2);
      CHECK_EQ(error->context().rank, rank);
      check_kind(mine.failure(), ErrorKind::kRankFailed, "rank 2 is gone");
    });
    killer.join();
  }
}

TEST(control_fails_on_bytes_that_are_not_ours) {
  // A connection that stood and then speaks nonsense: damaged frame, second greeting, wrong version.
  std::string version = encode(FrameKind::kMessage, 0, "x");
  version[4] = 99;
  for (const auto& [bytes, part] : std::vector<std::pair<std::string, const char*>>{
           {std::string(64, 'Z'), "not from hpcomm"}, {hello(1), "second greeting"}, {version, "version 99"}}) {
    ControlListener listener("127.0.0.1", 0, 2, JobToken{7});
    const Stranger peer(listener.address());
    std::thread talking([&, words = bytes] {
      CHECK(peer.greet(1, 0));
      peer.say(encode(FrameKind::kMessage, 4, "good") + words);
    });
    const auto mine = listener.connect({listener.address(), "127.0.0.1:9"}, soon());
    talking.join();
    CHECK_EQ(mine->receive(1, 4, soon()), "good");
    check_kind(error_from([&] { (void)mine->receive(1, 4, soon()); }), ErrorKind::kRankFailed, part);
  }
}

// --- Starting --------------------------------------------------------------------------------------------------------

TEST(control_start_is_not_disturbed_by_strangers) {
  CapturedStderr captured;
  const Listeners job(3);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (const std::string& address : job.addresses) {
    for (const std::string& words :
         {std::string("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),  // garbage
          hello(2, 7),                                                 // another job
          hello(1).substr(0, 30),                                      // half a greeting, then silence
          std::string(), hello(-1), hello(0), hello(3), hello(1 << 30), encode(FrameKind::kMessage, 0, "no greeting"),
          encode(FrameKind::kHello, 0, "short")}) {
      strangers.push_back(std::make_unique<Stranger>(address));
      strangers.back()->say(words);
    }
    strangers.push_back(std::make_unique<Stranger>(address));
    strangers.pop_back();  // hangs up at once
  }
  std::vector<std::shared_ptr<Control>> controls(3);
  const Stranger impostor(job.addresses[0]);  // connected before rank 0 may be done and hear nobody any more
  std::thread forger([&] { CHECK(!impostor.greet(2, 0, 8)); });
  run_ranks(3, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::this_thread::sleep_for(rank * 3ms);
    controls[r] = job.connect(rank, soon());
    CHECK_EQ(controls[r]->exchange({0, 1, 2}, 0, str(rank), soon()), (std::vector<std::string>{"0", "1", "2"}));
  });
  forger.join();
  for (const auto& stranger : strangers) {
    CHECK(eventually([&] { return stranger->hung_up_on(); }));
  }
  const std::string log = captured.text();
  CHECK(log.find("dropped a connection from 127.0.0.1:") != std::string::npos);
  CHECK(log.find("belongs to another job") != std::string::npos);
  CHECK(log.find("not from hpcomm") != std::string::npos);
}

TEST(control_start_reads_no_more_of_a_stranger_than_a_greeting) {
  // The magic is no secret: a stranger may announce a body of 64 MiB and send it.
  CapturedStderr captured;
  ControlListener listener("127.0.0.1", 0, 2, JobToken{7});
  Stranger flood(listener.address());
  std::string announced = encode(FrameKind::kHello, 0, "");
  const std::uint64_t length = kMaxBody;
  std::memcpy(announced.data() + 16, &length, sizeof length);
  flood.say(announced + std::string(8192, 'x'));
  // The rank that this one waits for comes when the stranger is gone: it was refused during the start.
  std::unique_ptr<Stranger> peer;
  std::thread watcher([&] {
    CHECK(eventually([&] { return flood.hung_up_on(); }));
    peer = std::make_unique<Stranger>(listener.address());
    CHECK(peer->greet(1, 0));
  });
  const auto mine = listener.connect({listener.address(), "127.0.0.1:9"}, soon());
  watcher.join();
  CHECK(captured.text().find("the limit is 40") != std::string::npos);
}

TEST(control_start_does_not_run_out_of_descriptors) {
  CapturedStderr captured;
  ControlListener zero("127.0.0.1", 0, 2, JobToken{7});
  ControlListener one("127.0.0.1", 1, 2, JobToken{7});
  const std::vector<std::string> addresses{zero.address(), one.address()};
  std::vector<std::unique_ptr<Stranger>> strangers;
  std::atomic<std::ptrdiff_t> most = 0;  // fewer, too, where something else of this process ends meanwhile
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      CHECK_EQ(zero.connect(addresses, soon())->exchange({0, 1}, 0, "0", soon())[1], "1");
    } else {
      const auto open = [] { return static_cast<std::ptrdiff_t>(count_entries("/proc/self/fd")); };
      const std::ptrdiff_t before = open();
      for (std::ptrdiff_t i = 0; i < 200; ++i) {
        strangers.push_back(std::make_unique<Stranger>(zero.address()));  // open, and silent
        if (i % 8 == 7) {
          std::this_thread::sleep_for(1ms);  // a full backlog would cost us a second
        }
        most = std::max(most.load(), open() - before - i - 1);
      }
      CHECK(eventually([&] { return strangers.front()->hung_up_on(); }));
      CHECK_EQ(one.connect(addresses, soon())->exchange({0, 1}, 0, "1", soon())[0], "0");
    }
  });
  CHECK(most < 100);  // of 200 that it might have kept
  CHECK(captured.text().find("without a greeting") != std::string::npos);
}

// To say who one is takes no secret: those who have said it and stay there are no reason to drop a peer whose word is
// still under way.
TEST(control_start_waits_for_a_word_that_is_under_way_among_strangers_who_say_names) {
  CapturedStderr captured;
  ControlListener zero("127.0.0.1", 0, 2, JobToken{7});
  std::shared_ptr<Control> control;
  std::thread start([&] { control = zero.connect({zero.address(), "127.0.0.1:1"}, soon()); });
  std::vector<std::unique_ptr<Stranger>> strangers;
  const auto more = [&](int count) {
    for (int i = 0; i < count; ++i) {
      strangers.push_back(std::make_unique<Stranger>(zero.address()));
      strangers.back()->say(control::Handshake::open(JobToken{9}, 1, 0).output());
      if (i % 8 == 7) {
        std::this_thread::sleep_for(1ms);
      }
    }
  };
  more(80);
  const Stranger one(zero.address());  // says nothing yet
  more(80);
  CHECK(eventually([&] { return strangers[80]->hung_up_on(); }));  // and all that came before it
  CHECK(one.greet(1, 0));
  start.join();
  one.say(encode(FrameKind::kMessage, 5, "from rank 1"));
  CHECK_EQ(control->receive(1, 5, soon()), "from rank 1");
  CHECK(captured.text().find("without a proof") != std::string::npos);
}

// While it lives, this process may open `more` files. Not under UBSan: it looks at objects through a pipe, and takes a
// pipe that it cannot open for a broken object.
class FewFiles {
 public:
  explicit FewFiles(rlim_t more) {
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int next = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::close(next);
    const rlimit few{static_cast<rlim_t>(next) + more, before_.rlim_max};
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  FewFiles(const FewFiles&) = delete;
  FewFiles& operator=(const FewFiles&) = delete;
  ~FewFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(control_start_says_that_there_are_no_descriptors) {
  if (check::under_ubsan()) {
    return;
  }
  ControlListener zero("127.0.0.1", 0, 2, JobToken{7});
  const Stranger one(zero.address());
  one.say(hello(1));
  const FewFiles files(0);
  const auto error = error_from([&] { (void)zero.connect({zero.address(), "127.0.0.1:1"}, soon()); });
  check_kind(error, ErrorKind::kTransport, "no connection to rank 1");
  check_kind(error, ErrorKind::kTransport, "ulimit -n");
}

TEST(control_start_drops_strangers_where_peers_need_their_descriptors) {
  if (check::under_ubsan()) {
    return;
  }
  CapturedStderr captured;
  ControlListener zero("127.0.0.1", 0, 2, JobToken{7});
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 8; ++i) {
    strangers.push_back(std::make_unique<Stranger>(zero.address()));  // open, and silent
  }
  const Stranger one(zero.address());
  const FewFiles files(2);
  std::thread greeting([&] { CHECK(one.greet(1, 0)); });
  const auto control = zero.connect({zero.address(), "127.0.0.1:1"}, soon());
  greeting.join();
  one.say(encode(FrameKind::kMessage, 5, "from rank 1"));
  CHECK_EQ(control->receive(1, 5, soon()), "from rank 1");
  CHECK(captured.text().find("without a greeting") != std::string::npos);
}

TEST(control_start_ends_with_what_its_poll_throws) {
  ControlListener zero("127.0.0.1", 0, 3, JobToken{7});
  const Stranger one(zero.address());
  static std::atomic<bool> interrupt;
  interrupt = false;
  std::thread greeting([&] {
    CHECK(one.greet(1, 0));
    interrupt = true;
    CHECK(one.read_until("interrupted while").find("while the job was starting") != std::string::npos);
  });
  bool thrown = false;
  try {
    (void)zero.connect({zero.address(), "127.0.0.1:1", "127.0.0.1:2"}, soon(), kHeartbeatLimit, [] {
      if (interrupt) {
        throw 7;
      }
    });
  } catch (const int what) {
    thrown = what == 7;
  }
  greeting.join();
  CHECK(thrown);
}

TEST(control_start_refuses_a_second_rank_of_the_same_number) {
  CapturedStderr captured;
  ControlListener listener("127.0.0.1", 0, 3, JobToken{7});
  const Stranger first(listener.address());
  const Stranger second(listener.address());
  const Stranger other(listener.address());
  std::thread late([&] {
    CHECK(first.greet(1, 0));
    first.say(encode(FrameKind::kMessage, 0, "the first"));
    CHECK(!second.greet(1, 0));
    CHECK(other.greet(2, 0));
  });
  const auto mine = listener.connect({listener.address(), "127.0.0.1:9", "127.0.0.1:9"}, soon());
  late.join();
  CHECK_EQ(mine->receive(1, 0, soon()), "the first");
  CHECK(!mine->try_receive(1, 0, Clock::now() + 1ms).has_value());
}

TEST(control_start_names_the_ranks_that_are_missing) {
  // With patience: ranks 0 and 2 have to find each other within the limit.
  CHECK_EQ(with_patience(
               200ms,
               [](milliseconds limit) {
                 const Listeners job(4);
                 std::vector<std::string> wrong(4);
                 // Ranks 1 and 3 never connect, though their ports are open.
                 run_ranks(4, [&](int rank) {
                   const auto r = static_cast<std::size_t>(rank);
                   if (rank % 2 == 0) {
                     const auto error = error_from([&] { (void)job.connect(rank, Clock::now() + limit); });
                     // Whoever notices first tells the other.
                     const bool late =
                         error && (error->kind() == ErrorKind::kPeerError || error->kind() == ErrorKind::kTimedOut);
                     const std::string words = error ? error->what() : "no error";
                     const auto says = [&words](const char* text) { return words.find(text) != std::string::npos; };
                     // Rank 2 has connected to rank 1.
                     const bool where = says(": no word from 127.0.0.1:") || says(": higher ranks come to ");
                     if (!late || !where || !says("did not hear from rank 1, rank 3 ")) {
                       wrong[r] = str("rank ", rank, ": ", words);
                     }
                   }
                 });
                 return wrong[0] + wrong[2];
               }),
           "");
}

TEST(control_start_reports_a_rank_that_cannot_be_reached) {
  const DeafPort closed;
  ControlListener listener("127.0.0.1", 1, 2, JobToken{7});
  const auto error = error_from([&] { (void)listener.connect({closed.address, listener.address()}, soon()); });
  check_kind(error, ErrorKind::kRankFailed, "cannot reach rank 0");
  CHECK_EQ(error->context().peer, 0);
}

TEST(control_start_reports_a_peer_of_another_job) {
  CapturedStderr captured;
  ControlListener zero("127.0.0.1", 0, 2, JobToken{7});
  ControlListener one("127.0.0.1", 1, 2, JobToken{8});
  const std::vector<std::string> addresses{zero.address(), one.address()};
  std::unique_ptr<Stranger> right;
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      (void)zero.connect(addresses, soon());  // it goes on to wait for the right one
    } else {
      check_kind(error_from([&] { (void)one.connect(addresses, soon()); }), ErrorKind::kRankFailed, "refused rank 1");
      right = std::make_unique<Stranger>(addresses[0]);
      CHECK(right->greet(1, 0));
    }
  });
  CHECK(captured.text().find("its secret is another one") != std::string::npos);
}

TEST(control_listener_checks_its_arguments) {
  CHECK_THROWS(ErrorKind::kInvalidArgument, ControlListener("127.0.0.1", 2, 2, {}), "rank 2 of 2");
  CHECK_THROWS(ErrorKind::kInvalidArgument, ControlListener("127.0.0.1", -1, 2, {}), "rank -1");
  CHECK_THROWS(ErrorKind::kInvalidArgument, ControlListener("127.0.0.1", 0, 0, {}), "of 0");
  CHECK_THROWS(ErrorKind::kInvalidArgument, ControlListener("localhost", 0, 2, {}), "no numeric address");
  CHECK_THROWS(ErrorKind::kTransport, ControlListener("192.0.2.1", 0, 2, {}), "cannot listen");
  ControlListener listener("127.0.0.1", 1, 2, {});
  CHECK_THROWS(ErrorKind::kInvalidArgument, listener.connect({"127.0.0.1:1"}, soon()), "one address per rank");
  CHECK_THROWS(ErrorKind::kInvalidArgument, listener.connect({"nowhere", ""}, soon()), "is not host:port");
  CHECK_THROWS(ErrorKind::kInvalidArgument, listener.connect({"127.0.0.1:1", ""}, soon()), "connects once");
}

TEST(control_speaks_ipv6) {
  std::unique_ptr<ControlListener> zero;
  try {
    zero = std::make_unique<ControlListener>("::1", 0, 2, JobToken{7});
  } catch (const Error&) {
    return;  // this machine has no IPv6
  }
  ControlListener one("::1", 1, 2, JobToken{7});
  CHECK(zero->address().starts_with("[::1]:"));
  const std::vector<std::string> addresses{zero->address(), one.address()};
  run_ranks(2, [&](int rank) {
    const auto mine = (rank == 0 ? *zero : one).connect(addresses, soon());
    CHECK_EQ(mine->exchange({0, 1}, 0, str(rank), soon()), (std::vector<std::string>{"0", "1"}));
  });
}

// --- Listeners -------------------------------------------------------------------------------------------------------

TEST(control_leaves_no_descriptor_and_no_thread) {
  (void)connect_controls(2);  // whatever is opened once and kept
  const std::size_t descriptors = count_entries("/proc/self/fd");
  const std::size_t threads = count_entries("/proc/self/task");
  for (int round = 0; round < 50; ++round) {
    auto controls = connect_controls(3);
    controls[0]->send(1, 0, "x");
    if (round % 3 == 0) {
      controls[static_cast<std::size_t>(round) % 3]->abort("enough");
    } else if (round % 3 == 1) {
      controls[2]->close();
    }
    if (round % 10 == 0) {
      ControlListener alone("127.0.0.1", 0, 2, JobToken{7});
      (void)error_from([&] { (void)alone.connect({alone.address(), "127.0.0.1:9"}, Clock::now()); });
    }
  }
  // Threads of the tests before this one, which were joined, may have ended only now in the eyes of the kernel.
  CHECK(count_entries("/proc/self/fd") <= descriptors);
  CHECK(eventually([&] { return count_entries("/proc/self/task") <= threads; }));
}

TEST(solo_control_has_nobody_to_talk_to) {
  const auto solo = make_solo_control();
  CHECK_EQ(solo->rank(), 0);
  CHECK_EQ(solo->size(), 1);
  CHECK_EQ(solo->exchange({0}, 0, "me", soon()), std::vector<std::string>{"me"});
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->send(0, 0, "x"), "rank 0 does not exist");
  CHECK_THROWS(ErrorKind::kInvalidArgument, solo->receive(1, 0, soon()), "rank 1 does not exist");
  CHECK(!solo->failure());
  solo->check();
  solo->close();
  CHECK_EQ(ControlListener("127.0.0.1", 0, 1, {}).connect({""}, soon())->size(), 1);
}

TEST(solo_control_abort_ends_what_runs_here) {
  const auto solo = make_solo_control();
  std::vector<std::string> told;
  const auto listener = [&told](const Error& error) { told.emplace_back(error.what()); };
  const std::uint64_t removed = solo->on_failure(listener);
  (void)solo->on_failure(listener);
  solo->remove_listener(removed);
  std::thread([&] { solo->abort("out of luck"); }).join();
  solo->abort("again");
  CHECK_EQ(told, std::vector<std::string>{"this rank gave up: out of luck"});
  CHECK_THROWS(ErrorKind::kClosed, solo->check(), "out of luck");
  (void)solo->on_failure(listener);  // too late is at once
  CHECK_EQ(told.size(), 2);
}

TEST(solo_control_is_shared_by_threads) {
  const auto solo = make_solo_control();
  run_ranks(4, [&](int rank) {
    if (rank == 0) {
      solo->abort("a reason");
    }
    CHECK(eventually([&] { return solo->failure().has_value(); }));
  });
}
