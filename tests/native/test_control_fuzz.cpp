// control/: whatever bytes come, the parser and the greeting parse, want more, or throw kProtocol; nothing else.
//
// HPCOMM_FUZZ_ITERATIONS sets the number of cases (by default what fits into a second), HPCOMM_FUZZ_SEED other ones.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "control/handshake.h"
#include "control/inflow.h"
#include "control/outbox.h"
#include "control/wire.h"
#include "native/check.h"
#include "native/control_peer.h"

using namespace hpcomm;
using namespace hpcomm::control;
using namespace hpcomm::testing;

namespace {

using Random = std::mt19937_64;

constexpr long kDefaultCases = 100000;

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atol(text) : otherwise;
}

long cases() { return setting("HPCOMM_FUZZ_ITERATIONS", kDefaultCases); }

std::uint64_t seed() { return static_cast<std::uint64_t>(setting("HPCOMM_FUZZ_SEED", 11)); }

// Random lengths near the edges that a parser can get wrong, and everywhere.
std::uint64_t some_length(Random& random) {
  constexpr std::uint64_t kEdges[] = {0, 1, kPrefixBytes, kHelloBytes, 32, kMaxBody, ~std::uint64_t{0}, 1ULL << 63};
  return random() % 2 == 0 ? kEdges[random() % std::size(kEdges)] + random() % 5 - 2 : random() >> random() % 64;
}

void damage(Random& random, std::string& bytes) {
  switch (random() % 6) {
    case 0:  // bits, mostly of the prefix
      for (std::uint64_t flips = random() % 4; flips > 0 && !bytes.empty(); --flips) {
        bytes[random() % std::min<std::size_t>(bytes.size(), random() % 4 == 0 ? bytes.size() : kPrefixBytes)] ^=
            static_cast<char>(1U << random() % 8);
      }
      break;
    case 1:  // cut off
      bytes.resize(random() % (bytes.size() + 1));
      break;
    case 2:  // another length
      if (bytes.size() >= kPrefixBytes) {
        const std::uint64_t length = some_length(random);
        std::memcpy(bytes.data() + 16, &length, sizeof length);
      }
      break;
    case 3:  // nothing of ours
      for (char& byte : bytes) {
        byte = static_cast<char>(random());
      }
      break;
    case 4:  // something in between
      bytes.insert(random() % (bytes.size() + 1), std::string(random() % 50, static_cast<char>(random())));
      break;
    default:  // as it is
      break;
  }
}

std::string some_frame(Random& random) {
  const std::size_t length = random() % 4 == 0 ? random() % 2000 : random() % 48;
  return encode(static_cast<FrameKind>(1 + random() % 9), random(), std::string(length, static_cast<char>(random())));
}

}  // namespace

TEST(fuzz_frames) {
  Random random(seed());
  long parsed_frames = 0;
  long refused = 0;
  for (long i = 0; i < cases(); ++i) {
    std::string bytes;
    for (std::uint64_t frames = random() % 3 + 1; frames > 0; --frames) {
      bytes += some_frame(random);
      damage(random, bytes);
    }
    // A copy of its own, so that a read behind the end is seen by the address sanitizer.
    const std::vector<char> exact(bytes.begin(), bytes.end());
    const std::size_t limit = random() % 2 == 0 ? kMaxBody : 40;
    try {
      std::size_t used = 0;
      while (const auto parsed = parse(std::span(exact).subspan(used), limit)) {
        ++parsed_frames;
        CHECK(parsed->frame.body.size() <= limit);
        CHECK_EQ(parsed->consumed, parsed->frame.body.size() + kPrefixBytes);
        // Accepted means: some hpcomm may have sent exactly this.
        CHECK(encode(parsed->frame.kind, parsed->frame.channel, parsed->frame.body) ==
              std::string(exact.data() + used, parsed->consumed));
        used += parsed->consumed;
        CHECK(used <= exact.size());
      }
    } catch (const Error& error) {
      ++refused;
      CHECK_EQ(error.kind(), ErrorKind::kProtocol);
    }
  }
  CHECK(parsed_frames > cases() / 10);  // or this test says nothing
  CHECK(refused > cases() / 10);
}

// Of frames that are right and frames that are not: whatever an Inflow makes of them, it stays within what came and
// what was announced.
TEST(fuzz_pieces) {
  Random random(seed() + 2);
  long refused = 0;
  long arrived = 0;
  for (long i = 0; i < cases() / 1000; ++i) {
    std::string bytes;
    for (std::uint64_t frames = random() % 6 + 1; frames > 0; --frames) {
      const std::uint64_t channel = random() % 2;
      switch (random() % 4) {
        case 0:
          bytes += encode(FrameKind::kLong, channel, encode_length(kPieceBytes + 1 + random() % 1000));
          [[fallthrough]];
        case 1:
          for (std::uint64_t pieces = random() % 4; pieces > 0; --pieces) {
            bytes += encode(FrameKind::kPiece, channel, std::string(random() % 2 == 0 ? 700000 : kPieceBytes, 'p'));
          }
          break;
        case 2:
          bytes += encode(FrameKind::kMessage, channel, std::string(random() % 200000, 'm'));
          break;
        default:
          bytes += some_frame(random);
          damage(random, bytes);
      }
    }
    Inflow inflow([&](std::uint64_t channel, std::size_t length) {
      CHECK(length <= kMaxBody);
      if (channel != 0 || length > 2 * kPieceBytes) {
        return Buffer{};
      }
      auto memory = std::make_shared<std::vector<char>>(length);
      return Buffer{{memory->data(), length, length, DType::kUInt8, {}}, Keepalive(memory, memory->data())};
    });
    try {
      for (std::string_view rest = bytes; !rest.empty();) {
        const auto landing = inflow.landing();
        const std::size_t cut = std::min<std::size_t>(rest.size(), random() % 500000 + 1);
        const std::size_t landed = random() % 2 == 0 ? std::min(cut, landing.size()) : 0;
        std::copy_n(rest.begin(), landed, landing.begin());
        inflow.landed(landed);
        // A copy of its own, so that a read behind the end is seen by the address sanitizer.
        const std::vector<char> exact(rest.begin() + static_cast<std::ptrdiff_t>(landed),
                                      rest.begin() + static_cast<std::ptrdiff_t>(cut));
        inflow.take(exact);
        rest.remove_prefix(cut);
        while (const auto arrival = inflow.next()) {
          ++arrived;
          CHECK(arrival->body.view().size() <= bytes.size());
        }
      }
    } catch (const Error& error) {
      ++refused;
      CHECK_EQ(error.kind(), ErrorKind::kProtocol);
    }
  }
  CHECK(arrived > cases() / 10000);  // or this test says nothing
  CHECK(refused > cases() / 10000);
}

// Whatever is added, lent and let go of, in whatever pieces it goes out: what an Inflow makes of it are the messages of
// each channel in their order, and a lent body is neither touched after its sender was told nor forgotten.
TEST(fuzz_outbox) {
  Random random(seed() + 3);
  constexpr std::array<std::size_t, 5> kSizes{30, 5000, 200000, kPieceBytes, 3 * kPieceBytes + 2};
  long arrived = 0;
  long failed = 0;
  for (long i = 0; i < cases() / 5000; ++i) {
    Outbox outbox;
    Inflow inflow([&](std::uint64_t channel, std::size_t bytes) {
      auto memory = std::make_shared<std::vector<char>>(channel % 2 == 0 ? bytes : 0);
      return channel % 2 == 0 ? Buffer{{memory->data(), bytes, bytes, DType::kUInt8, {}}, Keepalive(memory, &*memory)}
                              : Buffer{};
    });
    std::map<std::uint64_t, std::vector<std::string>> due;
    std::map<std::uint64_t, std::size_t> came;
    int lent = 0;
    bool is_over = false;
    const auto carry = [&](std::string_view bytes) {
      while (!bytes.empty()) {
        const std::size_t cut = std::min<std::size_t>(bytes.size(), random() % 300000 + 1);
        const auto landing = inflow.landing();
        const std::size_t landed = std::min(cut, landing.size());
        std::copy_n(bytes.begin(), landed, landing.begin());
        inflow.landed(landed);
        inflow.take(bytes.substr(landed, cut - landed));
        bytes.remove_prefix(cut);
        while (const auto arrival = inflow.next()) {
          if (arrival->kind == FrameKind::kMessage) {
            ++arrived;
            const auto& bodies = due[arrival->channel];
            const std::size_t number = came[arrival->channel]++;
            CHECK(number < bodies.size() && arrival->body.view() == bodies[number]);
          }
        }
      }
    };
    // Up to so many bytes go out.
    const auto drain = [&](std::size_t most) {
      while (most > 0 && !outbox.empty()) {
        std::array<iovec, 3> parts;
        const std::size_t count = outbox.next(parts);
        CHECK(count > 0);
        std::size_t took = 0;
        std::string sent;
        for (std::size_t k = 0; k < count; ++k) {
          const std::size_t now = std::min(parts[k].iov_len, most - took);
          sent.append(static_cast<const char*>(parts[k].iov_base), now);
          took += now;
        }
        most -= took;
        std::vector<Outbox::Sent> done;
        outbox.took(took, done);
        for (const Outbox::Sent& one : done) {
          one(nullptr);
        }
        carry(sent);
      }
    };
    for (std::uint64_t steps = random() % 12; steps > 0; --steps) {
      const std::uint64_t channel = random() % 3;
      auto body = std::make_unique<std::string>(kSizes[random() % kSizes.size()] + random() % 3, '\0');
      for (std::size_t at = 0; at < body->size(); at += 61) {
        (*body)[at] = static_cast<char>(random());
      }
      due[channel].push_back(*body);
      const std::string_view view = *body;
      const std::size_t cut = random() % (view.size() + 1);
      switch (random() % 3) {
        case 0:  // as a TcpControl sends what the socket takes in part
          if (outbox.empty() && view.size() <= kPieceBytes) {
            const std::string frame = encode(FrameKind::kMessage, channel, view);
            const std::size_t first = random() % frame.size();
            carry(std::string_view(frame).substr(0, first));
            outbox.add_rest(std::string_view(frame).substr(first), {});
            break;
          }
          if (outbox.empty()) {
            outbox.lend(channel, {{view}, nullptr});
            drain(random() % view.size());
            outbox.keep_last();
            break;
          }
          [[fallthrough]];
        case 1:
          outbox.add(FrameKind::kMessage, channel, view);
          break;
        default:
          ++lent;
          // The body ends with what is called: the address sanitizer sees who reads it later.
          outbox.lend(channel, {{view.substr(0, cut), {}, view.substr(cut)},
                                [&, held = std::shared_ptr<std::string>(std::move(body))](const Error* why) {
                                  CHECK(why == nullptr || is_over);
                                  failed += why != nullptr ? 1 : 0;
                                  --lent;
                                }});
      }
      if (random() % 3 == 0) {
        outbox.add(FrameKind::kHeartbeat, 0, {});
      }
      drain(random() % (2 * kPieceBytes));
    }
    is_over = true;
    const Error enough(ErrorKind::kClosed, "enough");
    if (random() % 2 == 0) {
      outbox.add(FrameKind::kAbort, 0, "why");
      for (const Outbox::Sent& one : outbox.let_go()) {
        one(&enough);
      }
      CHECK_EQ(lent, 0);
      outbox.add(FrameKind::kGoodbye, 0, {});
      drain(~std::size_t{0});
    } else if (random() % 2 == 0) {
      for (const Outbox::Sent& one : outbox.clear()) {
        one(&enough);
      }
    } else {
      drain(~std::size_t{0});
      for (const auto& [channel, bodies] : due) {
        CHECK_EQ(came[channel], bodies.size());
      }
    }
    CHECK_EQ(lent, 0);
    CHECK(outbox.empty());
    CHECK_EQ(outbox.bytes(), 0U);
  }
  CHECK(arrived > cases() / 5000);  // or this test says nothing
  CHECK(failed > cases() / 100000);
}

TEST(fuzz_greetings) {
  Random random(seed() + 1);
  long refused = 0;
  long done = 0;
  const JobToken token{7};
  for (long i = 0; i < cases() / 8; ++i) {
    Handshake opener = Handshake::open(token, 1, 0);
    Handshake listener = Handshake::accept(token, 0, 2);
    try {
      // Both sides hear the other through a line that damages one frame of four or adds one.
      for (int round = 0; round < 4; ++round) {
        for (auto [from, to] : {std::pair(&opener, &listener), std::pair(&listener, &opener)}) {
          std::string bytes = from->output();
          if (random() % 8 == 0) {
            damage(random, bytes);
          }
          if (random() % 16 == 0) {
            bytes += some_frame(random);
          }
          const std::size_t cut = random() % (bytes.size() + 1);
          to->take(std::string_view(bytes).substr(0, cut));
          to->take(std::string_view(bytes).substr(cut));
        }
      }
    } catch (const Error& error) {
      ++refused;
      CHECK(error.kind() == ErrorKind::kProtocol || error.kind() == ErrorKind::kInvalidArgument);
      CHECK(error.kind() == ErrorKind::kProtocol ||
            std::string_view(error.what()).find("belongs to another job") != std::string_view::npos);
    }
    if (opener.done()) {
      ++done;
      CHECK(listener.done());  // who is let in was proved by the other side
    }
    // Without a proof, nobody makes us keep more than one read.
    CHECK(opener.surplus().size() + listener.surplus().size() < 10000);
  }
  CHECK(refused > cases() / 100);
  CHECK(done > cases() / 100);
}
