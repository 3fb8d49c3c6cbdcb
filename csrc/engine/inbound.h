// Inbound: what a receiving end knows of its edge, and every check of what comes. Its route shares it with the lane's
// tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/edge.h"
#include "engine/refusal.h"

namespace hpcomm {

// "edge 0->1", of the job's ranks.
[[nodiscard]] std::string edge_name(const Communicator& communicator, int from, int to);
// The Control channel on which a sender that leaves says how many messages it has sent.
[[nodiscard]] std::uint64_t farewell_of(std::uint64_t edge);

struct Inbound {
  Inbound(const EdgeConfig& config, std::uint64_t edge_id);

  // --- of any thread ---
  [[nodiscard]] std::string name() const;  // "edge 0->1"
  // RecvEdge::expect(). Throws kSchemaMismatch where the edge is frozen to something else.
  void expect(std::shared_ptr<const Schema> schema);
  // False on a frozen edge after its first message, whose route may have headers all the same.
  [[nodiscard]] bool needs_header(std::uint64_t sequence) const noexcept {
    return mode != SchemaMode::kFrozen || sequence == 0;
  }
  // Whether the sender is gone, and did not send so many messages.
  [[nodiscard]] bool is_beyond_last(std::uint64_t sequence);
  // Throws what ended the edge, the communicator or the wait.
  void check(std::uint64_t sequence, Deadline deadline);

  // Not owned: a lane's tasks must not keep its communicator alive. The RecvEdge does, and a communicator that is
  // destroyed waits for its lane first.
  Communicator& communicator;
  const int peer;
  const std::uint64_t id;
  const SchemaMode mode;
  const std::uint64_t max_bytes;
  std::atomic<std::uint64_t> sent_in_all = UINT64_MAX;  // by a sender that is gone
  std::atomic<std::uint64_t> begun = 0;                 // messages whose receive a lane has begun; on a host
  std::atomic<std::uint64_t> taken = 0;                 // messages, in full; on a host
  std::atomic<bool> closed = false;                     // by the owner's thread
  std::atomic<std::int32_t> at_hand = -1;               // microbatch of the last message whose header was accepted
  std::atomic<int> missed = -1;                         // RecvEdge::missed()
  Refusal refusal;

  // --- of the lane, or of whoever runs in its order ---
  // Throws kProtocol for the header of any message but `sequence`: one that was repeated, lost or of another edge.
  void require_due(const MessageHeader& header, std::uint64_t sequence) const;
  // As parse_header(), of what came for message `sequence`.
  [[nodiscard]] MessageHeader header_in(std::string_view bytes, std::uint64_t sequence) const;
  // The schema of message `sequence`, whose header has come. Throws kProtocol and kSchemaMismatch.
  KnownPtr accept(const MessageHeader& header, std::string_view schema, std::uint64_t sequence, int microbatch);
  // The first error ends the edge: what comes after it would pair headers with payloads of other messages.
  void fail(std::exception_ptr error);

  std::exception_ptr broken;  // by the first error
  KnownPtr current;           // what the last message was

 private:
  // Parts of accept(). The schema that a header says its message has, which comes with it or was there before.
  [[nodiscard]] KnownPtr schema_of(const MessageHeader& header, std::string_view schema, std::uint64_t sequence);
  // In which way a message is not what was expected; empty where it is.
  [[nodiscard]] std::string unlike_expected(const KnownPtr& known);
  [[noreturn]] void reject(std::uint64_t sequence, const std::string& why) const;

  std::mutex expected_mutex_;
  std::shared_ptr<const Schema> expected_;  // with the mutex, as the next
  KnownPtr fixed_;                          // of a frozen edge, by its first message
  SchemaBook book_;
  // What was expected of the last message, and which schemas of the book are known to be like that.
  std::shared_ptr<const Schema> like_;
  std::vector<KnownPtr> found_like_;
};

}  // namespace hpcomm
