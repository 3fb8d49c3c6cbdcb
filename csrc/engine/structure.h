// Structure: the tree around a message's tensors as bytes. Read here as untrusted input, without Python; built into
// objects by csrc/torch/tree_build.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hpcomm {

// The first byte of a node. Its content follows; counts and lengths are 4 bytes, numbers 8, little endian.
enum class Node : char {
  kTensor = 'T',  // nothing: tensors are numbered as they are met
  kNone = 'N',
  kTrue = '1',
  kFalse = '0',
  kInteger = 'I',     // signed, 8 bytes
  kBigInteger = 'L',  // hexadecimal as Python prints it, with a length before
  kReal = 'F',
  kComplex = 'C',      // two reals
  kText = 'S',         // UTF-8, with a length before it
  kList = 'l',         // a count, then nodes
  kTuple = 'u',        // likewise
  kDict = 'm',         // a count, then a key (kText, an integer, kTrue or kFalse) and a node, so many times
  kOrderedDict = 'o',  // likewise
  kNamedTuple = 'n',   // the name of the class (module:qualified name) with its length, a count, nodes
  kDataclass = 'D',    // likewise, and before each node the name of its field with a length
};

// Deeper trees are refused on both ends: walking one takes a stack frame a level.
inline constexpr int kMaxDepth = 200;

// Reads one structure from its start. Everything throws Error(kProtocol) for bytes that no sender writes, and nothing
// allocates more than the bytes that are there.
class StructureReader {
 public:
  explicit StructureReader(std::string_view bytes) noexcept : rest_(bytes) {}

  [[nodiscard]] Node node();
  // A count of nodes that follow; each takes at least a byte, so no count is larger than what is left.
  [[nodiscard]] std::uint32_t count();
  [[nodiscard]] std::string_view text();
  [[nodiscard]] std::int64_t integer();
  [[nodiscard]] double real();
  [[nodiscard]] bool at_end() const noexcept { return rest_.empty(); }
  [[nodiscard]] std::size_t left() const noexcept { return rest_.size(); }

 private:
  std::string_view take(std::size_t bytes);

  std::string_view rest_;
};

// Where each tensor of a structure hangs: "message['hidden'][0]", in order. Throws Error(kProtocol) for damaged bytes.
[[nodiscard]] std::vector<std::string> leaf_names(std::string_view structure);
// Where `found` first differs from `expected`, and how: "message['k'] is a list where a tuple is expected". Empty when
// it does not. Without `values`, only what numbers and texts are counts. Throws Error(kProtocol) for damaged bytes.
[[nodiscard]] std::string difference_in_structure(std::string_view found, std::string_view expected, bool values);
// What there is to know of a structure before it is built, with every check of leaf_names() and no text.
struct StructureSummary {
  std::size_t tensors = 0;
  bool has_dataclass = false;
};
[[nodiscard]] StructureSummary summary_of(std::string_view structure);

}  // namespace hpcomm
