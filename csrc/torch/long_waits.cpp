// Long waits: when somebody is told of one, and where in the program that is.
#include "torch/long_waits.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "comm/waiting.h"
#include "torch/gil.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

// A wait is told of again when it has lasted so many times as long.
constexpr int kAgain = 6;

std::mutex mutex;  // guards `teller`
std::weak_ptr<Control> teller;
std::atomic<std::chrono::milliseconds::rep> limit = 0;
std::atomic<std::uint64_t> last_number = 0;

std::shared_ptr<Control> current_teller() {
  const std::lock_guard lock(mutex);
  return teller.lock();
}

void say_over(std::uint64_t number) {
  if (const auto control = current_teller()) {
    control->say_waiting(number, std::nullopt);
  }
}

// "train.py:41 (main)": the innermost function that is neither torch's nor ours. Empty where there is none. With the
// GIL, whose errors stay as they are.
std::string place_in_program() {
  const py::error_scope kept;
  try {
    const auto folder = [](const char* package) {
      return py::module_::import("os.path")
                 .attr("dirname")(py::module_::import(package).attr("__file__"))
                 .cast<std::string>() +
             "/";
    };
    const std::string ours = folder("hpcomm");
    const std::string theirs = folder("torch");
    for (py::object frame = py::module_::import("sys").attr("_getframe")(); !frame.is_none();
         frame = frame.attr("f_back")) {
      const py::object code = frame.attr("f_code");
      const auto file = code.attr("co_filename").cast<std::string>();
      const bool is_made = file.starts_with('<') && file != "<stdin>" && file != "<string>";  // by torch, or frozen
      if (is_made || file.starts_with(ours) || file.starts_with(theirs)) {
        continue;
      }
      return str(file.substr(file.rfind('/') + 1), ":", frame.attr("f_lineno").cast<int>(), " (",
                 code.attr("co_name").cast<std::string>(), ")");
    }
  } catch (const std::exception&) {
    return {};
  }
  return {};
}

bool goes_on(const Control* control) {
  try {
    return control != nullptr && !control->has_left(control->rank());
  } catch (const Error&) {
    return false;  // in a forked child: it was the parent's
  }
}

}  // namespace

void tell_long_waits(const std::shared_ptr<Control>& control, std::chrono::milliseconds after) {
  const std::lock_guard lock(mutex);
  const auto before = teller.lock();
  if (!goes_on(before.get()) || before->size() < control->size()) {
    teller = control;
    limit = after.count();
  }
}

void look_at_wait(bool in_main_thread) noexcept {
  Waiting* const waiting = Waiting::current();
  const std::chrono::milliseconds after(limit.load(std::memory_order_relaxed));
  if (waiting == nullptr || after.count() == 0) {
    return;
  }
  Waiting::Told& told = waiting->told;
  const Deadline now = Clock::now();
  if (told.begun == Deadline{}) {
    told.begun = now;
    told.next = now + after;
  }
  if (now < told.next) {
    return;
  }
  const auto lasted = now - told.begun;
  told.next = now + (kAgain - 1) * lasted;
  try {
    const auto control = current_teller();
    if (control == nullptr || interpreter_ends()) {
      return;
    }
    std::string where = waiting->words();
    if (in_main_thread) {
      const WithGil gil;
      if (const std::string place = place_in_program(); !place.empty()) {
        where += ", at " + place;
      }
    }
    if (told.number == 0) {
      told.number = ++last_number;
      told.over = &say_over;
    }
    control->say_waiting(told.number, control::LongWait{std::chrono::floor<std::chrono::seconds>(lasted), where});
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace hpcomm
