// Waiting: what this thread of the program waits for, for OpOptions::poll, which is called meanwhile and may tell
// others of it (torch/long_waits.h).
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "stream/event.h"

namespace hpcomm {

class Waiting {
 public:
  // For an operation. What is passed is not copied: it outlives this. Within another one it is ignored: that one is
  // what the program called.
  explicit Waiting(const ErrorContext& what, const std::string* lane = nullptr) noexcept
      : Waiting(&what, lane, nullptr) {}
  // For anything else: in which words, is asked when they are needed.
  Waiting(const void* about, std::string (*say)(const void* about)) noexcept : Waiting(nullptr, about, say) {}
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting();

  // The outermost one of this thread; null outside.
  [[nodiscard]] static Waiting* current() noexcept;
  // "all_reduce #3 on lane dp", "recv #7 from rank 2".
  [[nodiscard]] std::string words() const;

  // Of whoever looks at it.
  struct Told {
    Deadline begun{};                  // the first look
    Deadline next{};                   // when somebody is told
    std::uint64_t number = 0;          // under which they were; 0: nobody was
    void (*over)(std::uint64_t) = {};  // called at the end, if somebody was; must not throw
  } told;

 private:
  Waiting(const ErrorContext* what, const void* about, std::string (*say)(const void* about)) noexcept;

  const ErrorContext* const what_;
  const void* const about_;  // of an operation: its lane, may be null
  std::string (*const say_)(const void*);
  const bool is_outermost_;
};

}  // namespace hpcomm
