// How errors show what ranks issued: one wording for all transports.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/reduce_op.h"

namespace hpcomm {

// "all_reduce #12 on lane gradient".
[[nodiscard]] std::string title_of(const ErrorContext& what, const std::string& lane);
// `why` in the words of the operation `what`, which it has ended: of its kind, and about `what.peer`. As it is where
// these are its words: what ends an operation may have been told to all others, and come back.
[[nodiscard]] Error as_end_of(ErrorContext what, const std::string& lane, const Error& why);

// "4 float32 elements". `dtype` is the name of one.
[[nodiscard]] std::string elements_of(std::uint64_t count, const char* dtype);

// "all_reduce(4 float32, sum)", "broadcast(4 float32, root 1)". `root` is -1 where there is none.
[[nodiscard]] std::string words_of_collective(const char* operation, std::uint64_t count, const char* dtype,
                                              std::optional<ReduceOp> op, int root);
// " of wrapper 1, bucket 0": OpOptions::label(); empty for -1.
[[nodiscard]] std::string words_of_label(std::int32_t label);

// "rank 0, 2 issued barrier; rank 1 issued all_reduce(4 float32, sum)": equal ones together. `words` are those of
// `ranks`, in their order.
[[nodiscard]] std::string who_issued_what(const std::vector<int>& ranks, const std::vector<std::string>& words);

// How the text of a mismatch ends that was found before anything moved.
inline constexpr std::string_view kNothingMoved = ". No data was moved and the communicator can be used again";

// What one rank issued, as it tells the others: a collective, or one end of a message.
struct Issued {
  ErrorContext what;
  int peer = -1;       // the other end of a message, by its place in the group; -1 for a collective
  bool sends = false;  // of a message
  std::string words;
};

}  // namespace hpcomm
