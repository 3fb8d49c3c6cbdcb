// The value of HPCOMM_EMULATE.
#include <algorithm>
#include <charconv>
#include <limits>
#include <string>

#include "comm/emulated/emulated_communicator.h"

namespace hpcomm {

namespace {

// The number behind `key`; false when `option` is another one or says no number.
bool read_number(std::string_view option, std::string_view key, std::uint64_t limit, std::uint64_t& number) {
  if (!option.starts_with(key)) {
    return false;
  }
  option.remove_prefix(key.size());
  const auto [end, error] = std::from_chars(option.data(), option.data() + option.size(), number);
  return error == std::errc() && end == option.data() + option.size() && number <= limit;
}

}  // namespace

EmulationConfig parse_emulation(std::string_view text) {
  EmulationConfig config;
  config.connects = true;
  bool right = true;
  std::string_view rest = text;
  for (bool first = true; right && (first || !rest.empty()); first = false) {
    const std::size_t colon = std::min(rest.find(':'), rest.size());
    const std::string_view option = rest.substr(0, colon);
    rest.remove_prefix(std::min(colon + 1, rest.size()));
    constexpr std::uint64_t kMinute = 60'000'000;
    std::uint64_t delay = 0;
    if (first) {
      right = option == "nccl";
    } else if (option == "lanes") {
      config.start = EmulationConfig::Start::kAdversarial;
    } else if (read_number(option, "delay=", kMinute, delay)) {
      config.delay = std::chrono::microseconds(delay);
    } else {
      right = read_number(option, "seed=", std::numeric_limits<std::uint64_t>::max(), config.seed);
    }
  }
  HPCOMM_REQUIRE(right && !text.ends_with(':'), "HPCOMM_EMULATE='", text,
                 "': expected nccl[:lanes][:seed=N][:delay=MICROSECONDS]");
  return config;
}

}  // namespace hpcomm
