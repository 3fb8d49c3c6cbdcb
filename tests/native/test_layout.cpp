// plan/layout: offsets, padding, wire types, fingerprints.
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "native/check.h"
#include "plan/layout.h"

using namespace hpcomm;

namespace {

struct Row {
  std::size_t count;
  DType dtype;
  std::size_t offset;
  std::size_t wire_bytes;
};

void check_rows(const Layout& layout, const std::vector<Row>& rows, std::size_t bytes) {
  CHECK_EQ(layout.bytes(), bytes);
  CHECK_EQ(layout.entries().size(), rows.size());
  for (std::size_t i = 0; i < rows.size() && i < layout.entries().size(); ++i) {
    const Layout::Entry& entry = layout.entries()[i];
    CHECK_EQ(entry.count, rows[i].count);
    CHECK_EQ(entry.dtype, rows[i].dtype);
    CHECK_EQ(entry.offset, rows[i].offset);
    CHECK_EQ(entry.wire_bytes(), rows[i].wire_bytes);
  }
}

std::vector<TensorSize> sizes_of(const std::vector<Row>& rows) {
  std::vector<TensorSize> sizes;
  for (const Row& row : rows) {
    sizes.push_back({row.count, row.dtype});
  }
  return sizes;
}

}  // namespace

TEST(layout_of_nothing_is_empty) {
  check_rows(Layout(), {}, 0);
  check_rows(Layout(std::vector<TensorSize>{}), {}, 0);
  CHECK(!Layout().is_plain());
  CHECK_EQ(Layout().fingerprint(), Layout(std::vector<TensorSize>{}).fingerprint());
}

TEST(layout_starts_every_entry_on_a_cache_line) {
  const std::vector<Row> rows{
      {1, DType::kBool, 0, 1},         // one byte takes a whole line
      {16, DType::kFloat32, 64, 64},   // a full line takes no more
      {17, DType::kFloat32, 128, 68},  // one element over takes the next
      {0, DType::kInt64, 256, 0},      // empty: shares its offset with what follows
      {5, DType::kComplex128, 256, 80}, {3, DType::kFloat8E4M3FN, 384, 3},
  };
  check_rows(Layout(sizes_of(rows)), rows, 448);
}

TEST(layout_offsets_hold_for_every_size) {
  // One property over many sizes: aligned, in order, disjoint, and no gap of a line or more.
  std::vector<TensorSize> sizes;
  for (std::size_t count = 0; count < 300; ++count) {
    sizes.push_back({count, count % 2 == 0 ? DType::kFloat16 : DType::kInt8});
  }
  const Layout layout(sizes);
  std::size_t end = 0;
  for (const Layout::Entry& entry : layout.entries()) {
    CHECK_EQ(entry.offset % Layout::kAlignment, 0);
    CHECK(entry.offset >= end && entry.offset - end < Layout::kAlignment);
    end = entry.offset + entry.wire_bytes();
  }
  CHECK(layout.bytes() >= end && layout.bytes() - end < Layout::kAlignment);
  CHECK_EQ(layout.bytes() % Layout::kAlignment, 0);
}

TEST(layout_wire_type_replaces_floating_point_only) {
  const Layout layout({{10, DType::kFloat32}, {10, DType::kInt32}, {10, DType::kFloat64}, {10, DType::kComplex64}},
                      DType::kBFloat16);
  const std::vector<DType> wires{DType::kBFloat16, DType::kInt32, DType::kBFloat16, DType::kComplex64};
  for (std::size_t i = 0; i < wires.size(); ++i) {
    CHECK_EQ(layout.entries()[i].wire, wires[i]);
  }
  CHECK_EQ(layout.entries()[0].wire_bytes(), 20);
  CHECK_EQ(layout.entries()[0].dtype, DType::kFloat32);
  CHECK_EQ(layout.bytes(), 64 + 64 + 64 + 128);
}

TEST(layout_is_plain_when_nothing_needs_packing) {
  CHECK(Layout({{7, DType::kFloat32}}).is_plain());
  CHECK(Layout({{7, DType::kFloat32}}, DType::kFloat32).is_plain());
  CHECK(Layout({{7, DType::kInt64}}, DType::kBFloat16).is_plain());
  CHECK(!Layout({{7, DType::kFloat32}}, DType::kBFloat16).is_plain());
  CHECK(!Layout({{7, DType::kFloat32}, {7, DType::kFloat32}}).is_plain());
}

TEST(layout_fingerprints_differ) {
  const std::vector<Layout> layouts{
      Layout(),
      Layout({{0, DType::kFloat32}}),
      Layout({{1, DType::kFloat32}}),
      Layout({{2, DType::kFloat32}}),
      Layout({{1, DType::kInt32}}),
      Layout({{1, DType::kFloat32}, {1, DType::kFloat32}}),
      Layout({{1, DType::kFloat32}, {2, DType::kFloat32}}),
      Layout({{2, DType::kFloat32}, {1, DType::kFloat32}}),
      Layout({{1, DType::kFloat32}}, DType::kBFloat16),
      Layout({{1, DType::kFloat32}}, DType::kFloat16),
  };
  std::set<std::uint64_t> seen;
  for (const Layout& layout : layouts) {
    CHECK(seen.insert(layout.fingerprint()).second);
  }
  CHECK_EQ(Layout({{3, DType::kFloat32}}).fingerprint(), Layout({{3, DType::kFloat32}}).fingerprint());
}
