// SharedFirst: an Allocator of large buffers that prefers memory which a peer can write to, so that bytes are copied
// once.
//
// Shared memory that was taken is kept until the job ends, so there are bounds: buffers of more than a quarter of a GiB
// come from `own`, as do all when there is no more, and sizes are rounded up, so that messages which grow slowly use
// the same memory again.
#pragma once

#include <bit>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/host_memory.h"
#include "base/view.h"
#include "comm/peer_memory.h"

namespace hpcomm {

class SharedFirst final : public Allocator {
 public:
  // Less than this travels through the caches anyway.
  static constexpr std::size_t kFrom = std::size_t{2} << 20;
  static constexpr std::size_t kUpTo = std::size_t{256} << 20;

  // `shared` may be null.
  SharedFirst(std::shared_ptr<PeerMemory> shared, std::shared_ptr<Allocator> own)
      : shared_(std::move(shared)), own_(std::move(own)) {}

  Buffer allocate(std::size_t bytes) override {
    if (shared_ != nullptr && bytes >= kFrom && bytes <= kUpTo) {
      const std::size_t step = std::bit_floor(bytes) / 8;
      try {
        return shared_->allocate(round_up(bytes, step));
      } catch (const Error&) {
        // None left.
      }
    }
    return own_->allocate(bytes);
  }

 private:
  const std::shared_ptr<PeerMemory> shared_;
  const std::shared_ptr<Allocator> own_;
};

// An Allocator of shared memory as long as there is some, then of this process's own: what lies there is copied once
// more on its way.
class OwnWhenFull final : public Allocator {
 public:
  explicit OwnWhenFull(std::shared_ptr<Allocator> shared) : shared_(std::move(shared)) {}

  Buffer allocate(std::size_t bytes) override {
    try {
      return shared_->allocate(bytes);
    } catch (const Error& why) {
      auto own = why.kind() == ErrorKind::kTransport ? host_memory(bytes) : std::nullopt;
      if (!own) {
        throw;
      }
      return *std::move(own);
    }
  }

 private:
  const std::shared_ptr<Allocator> shared_;
};

}  // namespace hpcomm
