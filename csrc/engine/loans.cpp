// Lending, and finding out what has come back.
#include "engine/loans.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"

namespace hpcomm {

LoanPool::LoanPool(std::shared_ptr<PeerMemory> memory, std::size_t most, std::size_t bytes)
    : memory_(std::move(memory)), most_(most) {
  for (std::size_t i = 0; bytes > 0 && i < most_; ++i) {
    blocks_.push_back(make(bytes));
  }
}

LoanPool::~LoanPool() {
  for (Block& block : blocks_) {
    if (block.is_lent()) {
      memory_->park(std::move(block.buffer.owner));
    }
  }
}

LoanPool::Block LoanPool::make(std::size_t bytes) {
  Block block;
  block.buffer = memory_->allocate(sizeof(LoanFlag) + bytes);
  new (block.buffer.view.data) LoanFlag;
  const auto place = memory_->locate(block.buffer.view.data, block.buffer.view.bytes);
  HPCOMM_ASSERT(place.has_value(), "memory from allocate() that peers cannot find");
  block.place = *place;
  return block;
}

std::optional<LoanPool::Loan> LoanPool::lend(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t need = sizeof(LoanFlag) + bytes;
  const std::size_t count = blocks_.size();
  std::size_t found = count;
  std::size_t other = count;  // free, but of another size
  for (std::size_t turn = 1; turn <= count; ++turn) {
    const std::size_t i = (last_ + turn) % count;
    if (blocks_[i].is_lent()) {
      continue;
    }
    const std::size_t size = blocks_[i].buffer.view.bytes;
    if (size >= need && (found == count || size < blocks_[found].buffer.view.bytes)) {
      found = i;
    } else {
      other = i;
    }
  }
  const bool has_second = count > 1 || bytes > kCached || no_second_;
  if ((found == count || !has_second) && count < most_) {
    try {
      blocks_.push_back(make(bytes));
      found = count;
    } catch (const Error&) {
      if (found == count) {
        throw;
      }
      no_second_ = true;  // the one that is free serves as well
    }
  } else if (found == count) {
    if (other == count) {
      return std::nullopt;
    }
    blocks_[other].buffer = {};  // first, so that its place may serve
    try {
      blocks_[other] = make(bytes);
    } catch (...) {
      blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(other));
      throw;
    }
    found = other;
  }
  last_ = found;
  Block& block = blocks_[found];
  // Relaxed: the header that names it comes later.
  block.flag().filled.store(0, std::memory_order_relaxed);
  block.flag().lent.store(LoanFlag::kLent, std::memory_order_relaxed);
  return Loan{static_cast<char*>(block.buffer.view.data) + sizeof(LoanFlag), block.place};
}

namespace {

LoanFlag& flag_of(const LoanPool::Loan& loan) { return *reinterpret_cast<LoanFlag*>(loan.payload - sizeof(LoanFlag)); }

}  // namespace

void LoanPool::fill(const Loan& loan) noexcept { flag_of(loan).filled.store(1, std::memory_order_release); }

void LoanPool::take_back(const Loan& loan) noexcept { flag_of(loan).lent.store(0, std::memory_order_release); }

bool LoanPool::is_looked_for() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
    return block.flag().lent.load(std::memory_order_relaxed) == LoanFlag::kLent;
  });
}

std::size_t LoanPool::bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const Block& block : blocks_) {
    total += block.buffer.view.bytes;
  }
  return total;
}

}  // namespace hpcomm
