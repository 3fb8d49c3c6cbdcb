// The words of issued.h.
#include "comm/issued.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace hpcomm {

std::string title_of(const ErrorContext& what, const std::string& lane) {
  return str(what.operation, " #", what.sequence, " on lane ", lane);
}

Error as_end_of(ErrorContext what, const std::string& lane, const Error& why) {
  const std::string title = title_of(what, lane);
  const std::string_view text = why.what();
  if (text.starts_with(str(title, " ")) || text.starts_with(str(title, ":"))) {
    return why;
  }
  return {why.kind(), str(title, ": ", text), std::move(what)};
}

std::string elements_of(std::uint64_t count, const char* dtype) {
  return str(count, " ", dtype, count == 1 ? " element" : " elements");
}

std::string words_of_collective(const char* operation, std::uint64_t count, const char* dtype,
                                std::optional<ReduceOp> op, int root) {
  std::string words = str(operation, "(", count, " ", dtype);
  if (op) {
    words += str(", ", to_string(*op));
  }
  if (root >= 0) {
    words += str(", root ", root);
  }
  return words + ")";
}

std::string words_of_label(std::int32_t label) {
  return label < 0 ? "" : str(" of wrapper ", label >> 16, ", bucket ", label & 0xffff);
}

std::string who_issued_what(const std::vector<int>& ranks, const std::vector<std::string>& words) {
  std::vector<std::pair<std::string, std::string>> sides;
  for (std::size_t r = 0; r < words.size(); ++r) {
    const auto side =
        std::find_if(sides.begin(), sides.end(), [&](const auto& known) { return known.second == words[r]; });
    if (side == sides.end()) {
      sides.emplace_back(str("rank ", ranks[r]), words[r]);
    } else {
      side->first += str(", ", ranks[r]);
    }
  }
  std::string all;
  for (const auto& [who, what] : sides) {
    all += str(all.empty() ? "" : "; ", who, " issued ", what);
  }
  return all;
}

}  // namespace hpcomm
