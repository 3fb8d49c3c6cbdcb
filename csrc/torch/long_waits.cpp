// Long waits: when somebody is told of one, and where in the program that is.
#include "torch/long_waits.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/waiting.h"
#include "torch/gil.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

// A wait is told of again when it has lasted so many times as long.
constexpr int kAgain = 6;

// A lane waits for so long more: a thread of the program, if one waits, says where that is.
constexpr auto kLaneLater = std::chrono::seconds(2);

std::mutex mutex;  // guards `teller`
std::weak_ptr<Control> teller;
std::atomic<std::chrono::milliseconds::rep> limit = 0;
std::atomic<std::uint64_t> last_number = 0;
std::atomic<int> known = 0;  // waits of the program's threads that somebody was told of
// Folders of files that are not the program's. Written with the GIL, before anybody is told of anything.
std::vector<std::string>* packages = nullptr;

std::shared_ptr<Control> current_teller() {
  const std::lock_guard lock(mutex);
  return teller.lock();
}

void say_over(std::uint64_t number) {
  if (const auto control = current_teller()) {
    control->say_waiting(number, std::nullopt);
  }
}

void say_known_over(std::uint64_t number) {
  known.fetch_sub(1, std::memory_order_relaxed);
  say_over(number);
}

// "train.py:41 (main)": the innermost function that is neither torch's nor ours. Empty where there is none. With the
// GIL, whose errors stay as they are. Nothing here runs code of Python: a signal's handler would, and what it raises is
// not ours to catch.
std::string place_in_program() {
  const py::error_scope kept;
  try {
    for (py::object frame = py::module_::import("sys").attr("_getframe")(); !frame.is_none();
         frame = frame.attr("f_back")) {
      const py::object code = frame.attr("f_code");
      const auto file = code.attr("co_filename").cast<std::string>();
      const bool is_made = file.starts_with('<') && file != "<stdin>" && file != "<string>";  // by torch, or frozen
      const bool is_of_package =
          packages != nullptr &&
          std::any_of(packages->begin(), packages->end(), [&](const auto& own) { return file.starts_with(own); });
      if (is_made || is_of_package) {
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

void find_packages() {
  if (packages != nullptr) {
    return;
  }
  auto found = std::make_unique<std::vector<std::string>>();
  for (const char* package : {"hpcomm", "torch"}) {
    const auto file = py::module_::import(package).attr("__file__").cast<std::string>();
    found->push_back(file.substr(0, file.rfind('/') + 1));
  }
  packages = found.release();  // threads may look at it until the process is gone
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
  find_packages();
  const std::lock_guard lock(mutex);
  const auto before = teller.lock();
  if (!goes_on(before.get()) || before->size() < control->size()) {
    teller = control;
    limit = after.count();
  }
}

namespace {

enum class Who { kProgram, kMainThread, kLane };

void look(Who who) noexcept {
  Waiting* const waiting = Waiting::current();
  const std::chrono::milliseconds after(limit.load(std::memory_order_relaxed));
  if (waiting == nullptr || after.count() == 0) {
    return;
  }
  Waiting::Told& told = waiting->told;
  const Deadline now = Clock::now();
  if (told.begun == Deadline{}) {
    told.begun = now;
    told.next = now + after + (who == Who::kLane ? kLaneLater : std::chrono::seconds(0));
  }
  if (now < told.next) {
    return;
  }
  if (who == Who::kLane && known.load(std::memory_order_relaxed) > 0) {
    told.next = now + kLaneLater;
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
    if (who == Who::kMainThread) {
      const WithGil gil;
      if (const std::string place = place_in_program(); !place.empty()) {
        where += ", at " + place;
      }
    }
    if (told.number == 0) {
      known.fetch_add(who == Who::kLane ? 0 : 1, std::memory_order_relaxed);
      told.over = who == Who::kLane ? &say_over : &say_known_over;
      told.number = ++last_number;
    }
    control->say_waiting(told.number, control::LongWait{std::chrono::floor<std::chrono::seconds>(lasted), where});
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace

void look_at_wait(bool in_main_thread) noexcept { look(in_main_thread ? Who::kMainThread : Who::kProgram); }

void look_at_lane() noexcept { look(Who::kLane); }

}  // namespace hpcomm
