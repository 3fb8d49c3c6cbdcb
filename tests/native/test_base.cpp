// base/: element types, errors, fingerprints.
#include <array>
#include <cstdint>
#include <set>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "base/hash.h"
#include "native/check.h"

using namespace hpcomm;

namespace {

struct Row {
  DType dtype;
  int wire;
  std::size_t bytes;
  const char* name;
  bool floating;
};

// Written out by hand: the wire numbers are a promise to other versions, not something to compute.
constexpr std::array<Row, 21> kTable{{
    {DType::kBool, 0, 1, "bool", false},
    {DType::kUInt8, 1, 1, "uint8", false},
    {DType::kInt8, 2, 1, "int8", false},
    {DType::kInt16, 3, 2, "int16", false},
    {DType::kInt32, 4, 4, "int32", false},
    {DType::kInt64, 5, 8, "int64", false},
    {DType::kFloat16, 6, 2, "float16", true},
    {DType::kBFloat16, 7, 2, "bfloat16", true},
    {DType::kFloat32, 8, 4, "float32", true},
    {DType::kFloat64, 9, 8, "float64", true},
    {DType::kComplex64, 10, 8, "complex64", false},
    {DType::kComplex128, 11, 16, "complex128", false},
    {DType::kFloat8E4M3FN, 12, 1, "float8_e4m3fn", true},
    {DType::kFloat8E5M2, 13, 1, "float8_e5m2", true},
    {DType::kUInt16, 14, 2, "uint16", false},
    {DType::kUInt32, 15, 4, "uint32", false},
    {DType::kUInt64, 16, 8, "uint64", false},
    {DType::kComplex32, 17, 4, "complex32", false},
    {DType::kFloat8E4M3FNUZ, 18, 1, "float8_e4m3fnuz", false},
    {DType::kFloat8E5M2FNUZ, 19, 1, "float8_e5m2fnuz", false},
    {DType::kFloat8E8M0FNU, 20, 1, "float8_e8m0fnu", false},
}};

int require_positive(int value) {
  HPCOMM_REQUIRE(value > 0, "value is ", value, ", expected > 0");
  return value;
}

int assert_even(int value) {
  HPCOMM_ASSERT(value % 2 == 0, "value is ", value);
  return value;
}

}  // namespace

TEST(dtype_table) {
  for (const Row& row : kTable) {
    CHECK_EQ(static_cast<int>(row.dtype), row.wire);
    CHECK_EQ(size_of(row.dtype), row.bytes);
    CHECK_EQ(to_string(row.dtype), row.name);
    CHECK_EQ(is_floating(row.dtype), row.floating);
    CHECK_EQ(is_only_moved(row.dtype), row.wire >= 14);
  }
}

TEST(dtype_from_wire_takes_known_codes_only) {
  for (int code = 0; code < 256; ++code) {
    const auto dtype = dtype_from_wire(static_cast<std::uint8_t>(code));
    const bool known = code < static_cast<int>(kTable.size());
    CHECK_EQ(dtype.has_value(), known);
    if (dtype) {
      CHECK_EQ(static_cast<int>(*dtype), code);
    }
  }
}

TEST(error_carries_kind_message_and_context) {
  const Error error(ErrorKind::kTimedOut, "no answer", {.rank = 1, .peer = 2, .sequence = 7, .operation = "send"});
  CHECK_EQ(error.kind(), ErrorKind::kTimedOut);
  CHECK_EQ(error.what(), "no answer");
  CHECK_EQ(error.context().rank, 1);
  CHECK_EQ(error.context().peer, 2);
  CHECK_EQ(error.context().sequence, 7);
  CHECK_EQ(error.context().operation, "send");
}

TEST(error_context_is_empty_by_default) {
  const Error error(ErrorKind::kInternal, "bug");
  CHECK_EQ(error.context().rank, -1);
  CHECK_EQ(error.context().peer, -1);
  CHECK_EQ(error.context().sequence, -1);
  CHECK(error.context().operation.empty());
}

TEST(error_kinds_have_the_names_of_the_python_classes) {
  CHECK_EQ(to_string(ErrorKind::kInvalidArgument), "InvalidArgument");
  CHECK_EQ(to_string(ErrorKind::kRankFailed), "RankFailed");
  CHECK_EQ(to_string(ErrorKind::kPeerError), "PeerError");
  CHECK_EQ(to_string(ErrorKind::kTimedOut), "TimedOut");
  CHECK_EQ(to_string(ErrorKind::kSchemaMismatch), "SchemaMismatch");
  CHECK_EQ(to_string(ErrorKind::kProtocol), "ProtocolError");
  CHECK_EQ(to_string(ErrorKind::kDeadlock), "DeadlockError");
  CHECK_EQ(to_string(ErrorKind::kClosed), "Closed");
  CHECK_EQ(to_string(ErrorKind::kTransport), "TransportError");
  CHECK_EQ(to_string(ErrorKind::kInternal), "InternalError");
}

TEST(require_blames_the_caller) {
  CHECK_EQ(require_positive(3), 3);
  CHECK_THROWS(ErrorKind::kInvalidArgument, require_positive(-1), "value is -1, expected > 0");
}

TEST(assert_blames_hpcomm_and_says_where) {
  CHECK_EQ(assert_even(4), 4);
  CHECK_THROWS(ErrorKind::kInternal, assert_even(3), "value % 2 == 0");
  CHECK_THROWS(ErrorKind::kInternal, assert_even(3), "test_base.cpp:");
}

TEST(str_joins_its_parts) { CHECK_EQ(str("rank ", 3, " of ", 4u), "rank 3 of 4"); }

TEST(fingerprint_is_fnv1a) {
  // Published test vectors of the 64-bit variant.
  CHECK_EQ(Fingerprint().value(), 0xcbf29ce484222325ULL);
  CHECK_EQ(Fingerprint().add("a", 1).value(), 0xaf63dc4c8601ec8cULL);
  CHECK_EQ(Fingerprint().add("foobar", 6).value(), 0x85944171f73967e8ULL);
}

TEST(fingerprint_by_words_tells_texts_apart) {
  // Every byte counts, whatever the length; so does the length itself, where the bytes behind are zero.
  std::set<std::uint64_t> seen;
  std::size_t texts = 0;
  for (std::size_t length = 0; length < 40; ++length) {
    std::string text(length, '\0');
    seen.insert(fingerprint_by_words(text));
    ++texts;
    for (char& byte : text) {
      for (const int bit : {0, 7}) {
        byte = static_cast<char>(1U << static_cast<unsigned>(bit));
        seen.insert(fingerprint_by_words(text));
        ++texts;
      }
      byte = 0;
    }
  }
  CHECK_EQ(seen.size(), texts);
}

TEST(fingerprint_of_texts_keeps_their_boundaries) {
  using namespace std::string_view_literals;
  const auto first = Fingerprint().add("ab"sv).add("c"sv).value();
  const auto second = Fingerprint().add("a"sv).add("bc"sv).value();
  CHECK(first != second);
  CHECK_EQ(first, Fingerprint().add("ab"sv).add("c"sv).value());
}

TEST(fingerprint_depends_on_order) {
  CHECK(Fingerprint().add_int(1).add_int(2).value() != Fingerprint().add_int(2).add_int(1).value());
}
