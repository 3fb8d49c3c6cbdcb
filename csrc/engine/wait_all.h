// WaitAll: waits for operations that write what the caller gets back.
#pragma once

#include <exception>
#include <functional>
#include <utility>

#include "base/error.h"
#include "comm/work.h"

namespace hpcomm {

// For all of them, also behind a failed one: nothing may still write the caller's memory. But what is no error of an
// operation, as Ctrl-C, ends the wait for all: the operations hold what they write.
class WaitAll {
 public:
  explicit WaitAll(std::function<void(const Work&)> wait) : wait_(std::move(wait)) {}

  // Null: nothing.
  void add(const WorkPtr& work) {
    if (work == nullptr || (interrupted_ && !work->done())) {
      return;
    }
    try {
      wait_(*work);
    } catch (const Error&) {
      first_ = first_ ? first_ : std::current_exception();
    } catch (...) {
      interrupted_ = true;
      first_ = first_ ? first_ : std::current_exception();
    }
  }
  // The first thing that went wrong; null if nothing did.
  [[nodiscard]] std::exception_ptr first() const noexcept { return first_; }

 private:
  std::function<void(const Work&)> wait_;
  std::exception_ptr first_;
  bool interrupted_ = false;
};

}  // namespace hpcomm
