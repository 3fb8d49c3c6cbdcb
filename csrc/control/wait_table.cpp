// The table of long waits: what is in it, when it is shown, and its lines.
#include "control/wait_table.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "base/error.h"

namespace hpcomm::control {

namespace {

constexpr auto kGather = std::chrono::seconds(1);
constexpr std::ptrdiff_t kMostWaits = 8;  // of a rank, which has as many threads that wait
constexpr auto kEach = std::chrono::minutes(10);
constexpr auto kAhead = 5 * kEach;
// A job of thousands of ranks that all wait in places of their own is cut short.
constexpr std::size_t kMostLines = 20;

// "0, 2-5": of numbers that grow.
std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (std::size_t first = 0; first < numbers.size();) {
    std::size_t last = first;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) {
      ++last;
    }
    text += str(text.empty() ? "" : ", ", numbers[first]);
    if (last > first) {
      text += str(last > first + 1 ? "-" : ", ", numbers[last]);
    }
    first = last + 1;
  }
  return text;
}

// The texts are other processes': nothing that moves a cursor.
std::string printable(std::string clean) {
  std::replace_if(clean.begin(), clean.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  return clean;
}

}  // namespace

void WaitTable::note(int rank, std::uint64_t wait, std::optional<LongWait> said, Deadline now) {
  const std::pair<int, std::uint64_t> key{rank, wait};
  if (!said) {
    waits_.erase(key);
    return;
  }
  const bool again = waits_.count(key) != 0;
  const auto others = std::distance(waits_.lower_bound({rank, 0}), waits_.upper_bound({rank, UINT64_MAX}));
  if (!again && others >= kMostWaits) {
    return;
  }
  waits_.insert_or_assign(key, Wait{std::move(said->where), now - said->lasts});
  const Deadline due = again ? now + kGather : std::max(now + kGather, paid_until_ - kAhead);
  due_ = std::min(due_.value_or(due), due);
}

void WaitTable::forget(int rank) {
  waits_.erase(waits_.lower_bound({rank, 0}), waits_.upper_bound({rank, UINT64_MAX}));
}

std::string WaitTable::due(const std::vector<int>& ranks, Deadline now) {
  if (!due_ || now < *due_) {
    return {};
  }
  due_.reset();
  if (waits_.empty()) {
    return {};  // all are over
  }
  paid_until_ = std::max(paid_until_, now) + kEach;
  struct Line {
    std::string where;
    std::chrono::seconds lasts{0};
    std::vector<int> ranks;
  };
  std::vector<Line> lines;
  std::set<int> waiting;
  for (const auto& [whose, wait] : waits_) {
    const std::string where = printable(wait.where);
    auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& one) { return one.where == where; });
    if (line == lines.end()) {
      line = lines.insert(lines.end(), Line{where, {}, {}});
    }
    line->lasts = std::max(line->lasts, std::chrono::floor<std::chrono::seconds>(now - wait.begun));
    if (line->ranks.empty() || line->ranks.back() != whose.first) {
      line->ranks.push_back(whose.first);
    }
    waiting.insert(whose.first);
  }
  std::string text = "hpcomm: some ranks have waited for long:\n";
  for (std::size_t i = 0; i < std::min(lines.size(), kMostLines); ++i) {
    text += str("  rank ", ranges(lines[i].ranks), ", for ", lines[i].lasts.count(), " s: ", lines[i].where, "\n");
  }
  if (lines.size() > kMostLines) {
    text += str("  and others in ", lines.size() - kMostLines, " more places\n");
  }
  std::vector<int> others;
  std::set_difference(ranks.begin(), ranks.end(), waiting.begin(), waiting.end(), std::back_inserter(others));
  if (!others.empty()) {
    text += str("  rank ", ranges(others), others.size() == 1 ? " has" : " have",
                " not: computing, or waiting for something else\n");
  }
  return text;
}

}  // namespace hpcomm::control
