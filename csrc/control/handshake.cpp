// The four frames of a greeting.
#include "control/handshake.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace hpcomm::control {

namespace {

constexpr std::size_t kMaxGreeting = std::max({kHelloBytes, std::tuple_size_v<Nonce>, std::tuple_size_v<Digest>});

template <std::size_t kBytes>
std::string to_string(const std::array<unsigned char, kBytes>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), kBytes};
}

// The body of a frame that has one kind and one length at this point of the greeting.
template <std::size_t kBytes>
std::array<unsigned char, kBytes> to_array(const Frame& frame, FrameKind kind) {
  if (frame.kind != kind || frame.body.size() != kBytes) {
    throw Error(ErrorKind::kProtocol, "control connection: a greeting out of order");
  }
  std::array<unsigned char, kBytes> bytes;
  std::memcpy(bytes.data(), frame.body.data(), kBytes);
  return bytes;
}

}  // namespace

Digest prove(const JobToken& token, Side side, const Hello& hello, const Nonce& challenge) {
  // Every part has a fixed length, so no two transcripts are the same bytes.
  std::string transcript = "hpcomm control greeting";
  transcript += static_cast<char>(kWireVersion);
  transcript += side == Side::kOpener ? 'o' : 'l';
  transcript += encode_hello(hello);
  transcript += to_string(challenge);
  return hmac_sha256(to_string(token), transcript);
}

Handshake Handshake::open(const JobToken& token, int rank, int peer) {
  Handshake greeting(token, Side::kOpener, 0);
  greeting.hello_.from = rank;
  greeting.hello_.to = peer;
  fill_random(greeting.hello_.nonce);
  greeting.output_ = encode(FrameKind::kHello, 0, encode_hello(greeting.hello_));
  greeting.state_ = State::kAwaitChallenge;
  return greeting;
}

Handshake Handshake::accept(const JobToken& token, int rank, int size) {
  Handshake greeting(token, Side::kListener, size);
  greeting.hello_.to = rank;
  return greeting;
}

void Handshake::take(std::string_view bytes) {
  incoming_ += bytes;
  // Whoever has not proved to be ours does not fill our memory: a longer frame is refused when it is announced.
  while (!done()) {
    const auto parsed = parse(incoming_, kMaxGreeting);
    if (!parsed) {
      return;
    }
    incoming_.erase(0, parsed->consumed);
    switch (state_) {
      case State::kAwaitHello:
        take_hello(parsed->frame);
        break;
      case State::kAwaitChallenge:
        take_challenge(parsed->frame);
        break;
      case State::kAwaitProof:
        take_proof(parsed->frame);
        break;
      case State::kDone:
        break;
    }
  }
}

void Handshake::take_hello(const Frame& frame) {
  if (frame.kind != FrameKind::kHello) {
    throw Error(ErrorKind::kProtocol, "control connection: it did not greet");
  }
  const Hello hello = parse_hello(frame.body);
  if (hello.to != hello_.to || hello.from <= hello_.to || hello.from >= size_) {
    throw Error(ErrorKind::kInvalidArgument,
                str("it belongs to another job: it greets as rank ", hello.from, ", for rank ", hello.to));
  }
  hello_ = hello;
  fill_random(challenge_);
  output_ += encode(FrameKind::kChallenge, 0, to_string(challenge_));
  state_ = State::kAwaitProof;
}

void Handshake::take_challenge(const Frame& frame) {
  challenge_ = to_array<std::tuple_size_v<Nonce>>(frame, FrameKind::kChallenge);
  output_ += encode(FrameKind::kProof, 0, to_string(prove(token_, Side::kOpener, hello_, challenge_)));
  state_ = State::kAwaitProof;
}

void Handshake::take_proof(const Frame& frame) {
  const Side theirs = side_ == Side::kOpener ? Side::kListener : Side::kOpener;
  const auto proof = to_array<std::tuple_size_v<Digest>>(frame, FrameKind::kProof);
  if (!equal_in_constant_time(proof, prove(token_, theirs, hello_, challenge_))) {
    throw Error(ErrorKind::kInvalidArgument, "it belongs to another job: its secret is another one");
  }
  if (side_ == Side::kListener) {
    output_ += encode(FrameKind::kProof, 0, to_string(prove(token_, Side::kListener, hello_, challenge_)));
  }
  state_ = State::kDone;
}

}  // namespace hpcomm::control
