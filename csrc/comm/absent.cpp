// Control knows; this is what an error says of it.
#include "comm/absent.h"

#include <algorithm>
#include <chrono>

namespace hpcomm {

namespace {

bool has(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

}  // namespace

std::optional<int> first_left(const Control& control, const std::vector<int>& ranks) {
  const std::vector<int> departed = control.departed();
  const auto first = std::find_if(departed.begin(), departed.end(), [&](int rank) { return has(ranks, rank); });
  return first == departed.end() || control.failure() ? std::nullopt : std::optional(*first);
}

std::string told_of_silence(const Control& control, const std::vector<int>& ranks, ErrorContext& what) {
  std::vector<Control::Silence> silences = control.silences();
  std::erase_if(silences, [&](const Control::Silence& silence) { return !has(ranks, silence.peer); });
  std::string text;
  for (const Control::Silence& silence : silences) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - silence.since).count();
    text += str(text.empty() ? "; nothing has been heard from rank " : ", from rank ", silence.peer, " for ", seconds,
                " s");
  }
  if (silences.size() == 1 && what.peer < 0) {
    what.peer = silences.front().peer;
  }
  return text;
}

}  // namespace hpcomm
