// The greeting of a new connection: both sides prove that they know the job's secret, which does not travel.
//
//   opener (higher rank)                                listener (lower rank)
//     kHello      ranks, nonce            ------>
//                                         <------       kChallenge  nonce
//     kProof      HMAC("open", all that)  ------>       checks it before it says anything about the secret
//                                         <------       kProof      HMAC("accept", all that)
//
// A pure state machine of bytes: it neither reads nor waits, so nobody who dawdles holds up the others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "control/hmac.h"
#include "control/wire.h"

namespace hpcomm::control {

enum class Side : std::uint8_t { kOpener, kListener };

// HMAC-SHA256 over version, side, ranks and nonces: a proof of one side is none of the other, of another pair of
// ranks, or of another connection. `hello` is the opener's, `challenge` the listener's nonce.
[[nodiscard]] Digest prove(const JobToken& token, Side side, const Hello& hello, const Nonce& challenge);

class Handshake {
 public:
  // As rank `rank`, which opened the connection to `peer`.
  [[nodiscard]] static Handshake open(const JobToken& token, int rank, int peer);
  // As rank `rank` of `size`, which accepted the connection of somebody who says he is a higher rank.
  [[nodiscard]] static Handshake accept(const JobToken& token, int rank, int size);

  // Takes what came in. Throws kProtocol for bytes that are no greeting of ours, and kInvalidArgument for a greeting
  // of ours by somebody else: of another job, or meant for another rank.
  void take(std::string_view bytes);
  // What to send now; taken out.
  [[nodiscard]] std::string output() { return std::exchange(output_, {}); }

  [[nodiscard]] bool done() const noexcept { return state_ == State::kDone; }
  // True from the first valid frame of the other side on.
  [[nodiscard]] bool greeted() const noexcept { return state_ != State::kAwaitHello; }
  // Who the other side is. Proved once done().
  [[nodiscard]] int peer() const noexcept { return side_ == Side::kOpener ? hello_.to : hello_.from; }
  // Bytes behind the greeting, once done().
  [[nodiscard]] const std::string& surplus() const noexcept { return incoming_; }

 private:
  enum class State : std::uint8_t { kAwaitHello, kAwaitChallenge, kAwaitProof, kDone };

  Handshake(const JobToken& token, Side side, int size) : token_(token), side_(side), size_(size) {}
  void take_hello(const Frame& frame);
  void take_challenge(const Frame& frame);
  void take_proof(const Frame& frame);

  JobToken token_;
  Side side_;
  int size_;
  State state_ = State::kAwaitHello;
  Hello hello_;
  Nonce challenge_{};
  std::string incoming_;
  std::string output_;
};

}  // namespace hpcomm::control
