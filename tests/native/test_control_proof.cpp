// control/: the hash against published vectors, and the greeting against those who do not know the secret.
#include <array>
#include <set>
#include <string>
#include <string_view>

#include "control/handshake.h"
#include "control/hmac.h"
#include "native/check.h"
#include "native/control_peer.h"

using namespace hpcomm;
using namespace hpcomm::control;
using namespace hpcomm::testing;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const unsigned char byte : digest) {
    text += "0123456789abcdef"[byte / 16];
    text += "0123456789abcdef"[byte % 16];
  }
  return text;
}

const JobToken kToken{1, 2, 3};

// Passes frames to and fro until nobody has anything to say.
void introduce(Handshake& opener, Handshake& listener) {
  for (;;) {
    const std::string there = opener.output();
    listener.take(there);
    const std::string back = listener.output();
    opener.take(back);
    if (there.empty() && back.empty()) {
      return;
    }
  }
}

}  // namespace

TEST(sha256_of_published_vectors) {
  // NIST, "Examples with Intermediate Values", and the CAVP short messages.
  CHECK_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                      "mnopqrstnopqrstu")),
           "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(hex(sha256(std::string(1000000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK_EQ(hex(sha256("\xd3")), "28969cdfa74a12c82f3bad960b0b000aca2ac329deea5c2328ebc6f2ba9802c1");
}

TEST(sha256_pads_every_length) {
  // One digest over the digests of all lengths around the ends of blocks; the reference is Python's hashlib.
  std::string all;
  for (std::size_t length = 0; length < 200; ++length) {
    all += hex(sha256(std::string(length, static_cast<char>('a' + length % 26))));
  }
  CHECK_EQ(hex(sha256(all)), "d85f3ab7682c0ec6e7bd412e8350455c2cdcf0df7213e7aeecabe97c048834dc");
}

TEST(hmac_sha256_of_published_vectors) {
  // RFC 4231, test cases 1 to 4, 6 and 7.
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char byte = 1; byte <= 25; ++byte) {
    counting += byte;
  }
  CHECK_EQ(hex(hmac_sha256(counting, std::string(50, '\xcd'))),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                           "This is a test using a larger than block-size key and a larger than block-size data. The "
                           "key needs to be hashed before being used by the HMAC algorithm.")),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(proofs_are_compared_whole) {
  std::array<unsigned char, 32> a{};
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto b = a;
    CHECK(equal_in_constant_time(a, b));
    b[i] = 1;
    CHECK(!equal_in_constant_time(a, b));
  }
  CHECK(!equal_in_constant_time(a, std::span(a).first(31)));
}

TEST(nonces_are_not_used_twice) {
  std::set<Nonce> seen;
  for (int i = 0; i < 1000; ++i) {
    Nonce nonce{};
    fill_random(nonce);
    CHECK(seen.insert(nonce).second);
  }
}

TEST(handshake_of_two_who_know_the_secret) {
  Handshake opener = Handshake::open(kToken, 5, 2);
  Handshake listener = Handshake::accept(kToken, 2, 6);
  CHECK(!listener.greeted());
  introduce(opener, listener);
  CHECK(opener.done());
  CHECK(listener.done());
  CHECK_EQ(opener.peer(), 2);
  CHECK_EQ(listener.peer(), 5);
  CHECK_EQ(opener.surplus() + listener.surplus(), "");
}

TEST(handshake_byte_by_byte_and_with_more_behind_it) {
  Handshake opener = Handshake::open(kToken, 1, 0);
  Handshake listener = Handshake::accept(kToken, 0, 2);
  std::string back;
  while (!listener.done()) {
    for (const char byte : opener.output()) {
      listener.take({&byte, 1});
    }
    back = listener.output();
    if (!listener.done()) {
      for (const char byte : back) {
        opener.take({&byte, 1});
      }
    }
  }
  opener.take(back + "the first message");
  CHECK(opener.done());
  CHECK_EQ(opener.surplus(), "the first message");
}

TEST(handshake_shows_nothing_of_the_secret_to_a_stranger) {
  // What a listener says before it has seen a proof is the same with every secret: random bytes.
  Handshake listener = Handshake::accept(kToken, 0, 2);
  listener.take(hello(1));
  const auto frame = parse(listener.output());
  CHECK(frame.has_value());
  CHECK_EQ(frame->frame.kind, FrameKind::kChallenge);
  CHECK_EQ(frame->frame.body.size(), std::tuple_size_v<Nonce>);
  CHECK_THROWS(ErrorKind::kInvalidArgument, listener.take(encode(FrameKind::kProof, 0, std::string(32, 'x'))),
               "its secret is another one");
  CHECK_EQ(listener.output(), "");
}

TEST(handshake_refuses_another_secret_on_both_sides) {
  JobToken other = kToken;
  other.back() ^= 1;
  {
    Handshake opener = Handshake::open(other, 1, 0);
    Handshake listener = Handshake::accept(kToken, 0, 2);
    CHECK_THROWS(ErrorKind::kInvalidArgument, introduce(opener, listener), "its secret is another one");
    CHECK(!opener.done());
    CHECK(!listener.done());
  }
  // A listener that lets everybody in, but cannot prove itself.
  Handshake opener = Handshake::open(kToken, 1, 0);
  (void)opener.output();
  opener.take(encode(FrameKind::kChallenge, 0, std::string(32, 'c')));
  (void)opener.output();
  CHECK_THROWS(ErrorKind::kInvalidArgument, opener.take(encode(FrameKind::kProof, 0, std::string(32, 'x'))),
               "its secret is another one");
  CHECK(!opener.done());
}

TEST(handshake_refuses_its_own_words) {
  // Reflection: a listener that sends everything back.
  Handshake opener = Handshake::open(kToken, 1, 0);
  (void)opener.output();
  opener.take(encode(FrameKind::kChallenge, 0, std::string(32, 'c')));
  const std::string proof = opener.output();
  CHECK_THROWS(ErrorKind::kInvalidArgument, opener.take(proof), "its secret is another one");
  Handshake another = Handshake::open(kToken, 1, 0);
  CHECK_THROWS(ErrorKind::kProtocol, another.take(another.output()), "out of order");
}

TEST(handshake_refuses_a_recording) {
  Handshake opener = Handshake::open(kToken, 1, 0);
  Handshake listener = Handshake::accept(kToken, 0, 2);
  const std::string first = opener.output();
  listener.take(first);
  opener.take(listener.output());
  const std::string second = opener.output();
  listener.take(second);
  CHECK(listener.done());
  Handshake again = Handshake::accept(kToken, 0, 2);
  again.take(first);
  CHECK_THROWS(ErrorKind::kInvalidArgument, again.take(second), "its secret is another one");
}

TEST(proofs_bind_everything_that_was_said) {
  std::set<Digest> seen;
  const Hello said{3, 1, Nonce{1}};
  const auto add = [&seen](const JobToken& token, Side side, const Hello& greeting, const Nonce& challenge) {
    CHECK(seen.insert(prove(token, side, greeting, challenge)).second);
    CHECK(!seen.insert(prove(token, side, greeting, challenge)).second);
  };
  add(kToken, Side::kOpener, said, Nonce{2});
  add(kToken, Side::kListener, said, Nonce{2});
  add(JobToken{}, Side::kOpener, said, Nonce{2});
  add(kToken, Side::kOpener, {4, 1, Nonce{1}}, Nonce{2});
  add(kToken, Side::kOpener, {3, 0, Nonce{1}}, Nonce{2});
  add(kToken, Side::kOpener, {1, 3, Nonce{1}}, Nonce{2});
  add(kToken, Side::kOpener, {3, 1, Nonce{2}}, Nonce{1});
  add(kToken, Side::kOpener, {3, 1, Nonce{9}}, Nonce{2});
  add(kToken, Side::kOpener, said, Nonce{9});
}

TEST(handshake_refuses_ranks_that_do_not_open_connections_here) {
  for (const auto& [from, to] :
       std::vector<std::pair<int, int>>{{-1, 1}, {0, 1}, {1, 1}, {4, 1}, {1 << 30, 1}, {2, 0}}) {
    Handshake listener = Handshake::accept(kToken, 1, 4);
    CHECK_THROWS(ErrorKind::kInvalidArgument, listener.take(hello(from, to)), "belongs to another job");
  }
  Handshake listener = Handshake::accept(kToken, 1, 4);
  CHECK_THROWS(ErrorKind::kProtocol, listener.take(encode(FrameKind::kMessage, 0, "no greeting")), "did not greet");
}
