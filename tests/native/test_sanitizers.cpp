// sanitizers.cpp: what is right in libstdc++, and looks wrong to ThreadSanitizer without it, is not reported.
#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "native/check.h"

using namespace hpcomm;

namespace {

// A turn that is passed on without an order that ThreadSanitizer could see: the count of holders has to give it.
class Turn {
 public:
  void pass() { passed_.store(true, std::memory_order_relaxed); }
  void await() const {
    while (!passed_.load(std::memory_order_relaxed)) {
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<bool> passed_ = false;
};

[[noreturn]] void throw_one() {
  throw Error(ErrorKind::kTransport, "a message that is too long to lie in the string",
              {1, 2, 3, "an operation whose name is long as well"});
}

std::exception_ptr make_one() {
  try {
    throw_one();
  } catch (...) {
    return std::current_exception();
  }
}

void look(const Error& error) {
  CHECK(error.kind() == ErrorKind::kTransport);
  CHECK_EQ(error.context().operation, "an operation whose name is long as well");
  CHECK(std::string(error.what()).find("too long") != std::string::npos);
}

// Rethrows `error`, looks at it, and lets go of it: of the pointer, then of what was rethrown.
void look_and_let_go(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::exchange(error, nullptr));
  } catch (const Error& caught) {
    look(caught);
  }
}

}  // namespace

TEST(an_exception_is_freed_at_the_end_of_the_catch_block_that_passed_it_on) {
  Turn over;
  std::thread other;
  try {
    throw_one();
  } catch (const Error&) {
    other = std::thread([&over, error = std::current_exception()]() mutable {
      look_and_let_go(std::move(error));
      over.pass();
    });
    over.await();
  }
  other.join();
}

TEST(an_exception_is_freed_at_the_end_of_the_last_catch_block_of_two) {
  Turn over;
  std::exception_ptr error = make_one();
  std::thread other([&over, mine = error]() mutable {
    look_and_let_go(std::move(mine));
    over.pass();
  });
  try {
    std::rethrow_exception(std::exchange(error, nullptr));
  } catch (const Error& caught) {
    look(caught);
    over.await();
  }
  other.join();
}

TEST(an_exception_is_freed_by_the_last_pointer_to_it) {
  Turn over;
  std::exception_ptr error = make_one();
  std::thread other([&over, mine = error]() mutable {
    look_and_let_go(std::move(mine));
    over.pass();
  });
  over.await();
  error = nullptr;
  other.join();
}

TEST(a_copy_of_an_error_shares_its_text_with_another_thread) {
  Turn over;
  std::optional<Error> error;
  try {
    throw_one();
  } catch (const Error& caught) {
    error = caught;
  }
  std::optional<std::thread> other(std::in_place, [&over, mine = std::optional<Error>(*error)]() mutable {
    look(*mine);
    mine.reset();
    over.pass();
  });
  over.await();
  error.reset();
  other->join();
}
