// Checks and the list of copies; device kernels are the twins pack_cpu / pack_cuda.
#include "pack/pack.h"

#include <utility>

#include "base/error.h"

namespace hpcomm {

namespace {

void require_buffer(const Layout& layout, std::size_t tensors, const BufferView& buffer) {
  HPCOMM_REQUIRE(tensors == layout.entries().size(), "the layout has ", layout.entries().size(), " entries, got ",
                 tensors, " tensors");
  HPCOMM_REQUIRE(buffer.bytes >= layout.bytes(), "the layout needs ", layout.bytes(), " bytes, the buffer has ",
                 buffer.bytes);
}

void launch(Stream& stream, std::vector<CopyItem> items, const Scale& scale, Keepalive keepalive) {
  for (const CopyItem& item : items) {
    HPCOMM_REQUIRE(can_convert(item.source_dtype, item.target_dtype), "no kernel casts ", to_string(item.source_dtype),
                   " to ", to_string(item.target_dtype));
    HPCOMM_REQUIRE(scale.factor == nullptr || !is_floating(item.source_dtype) || can_scale(item.source_dtype),
                   "no kernel scales ", to_string(item.source_dtype));
  }
  if (stream.device().type == DeviceType::kCuda) {
    launch_copies_cuda(stream, items, scale.factor.get());
    stream.hold(std::make_shared<const std::pair<Keepalive, Keepalive>>(scale.factor, std::move(keepalive)));
    return;
  }
  stream.enqueue([items = std::move(items), factor = scale.factor, keepalive = std::move(keepalive)] {
    run_copies_cpu(items, factor.get());
  });
}

}  // namespace

void pack(Stream& stream, const Layout& layout, const std::vector<const void*>& tensors, const BufferView& buffer,
          const Scale& scale, Keepalive keepalive) {
  require_buffer(layout, tensors.size(), buffer);
  std::vector<CopyItem> items;
  items.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Layout::Entry& entry = layout.entries()[i];
    items.push_back({tensors[i], static_cast<char*>(buffer.data) + entry.offset, entry.count, entry.dtype, entry.wire});
  }
  launch(stream, std::move(items), scale, std::move(keepalive));
}

void unpack(Stream& stream, const Layout& layout, const BufferView& buffer, const std::vector<void*>& tensors,
            const Scale& scale, Keepalive keepalive) {
  require_buffer(layout, tensors.size(), buffer);
  std::vector<CopyItem> items;
  items.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Layout::Entry& entry = layout.entries()[i];
    if (tensors[i] != nullptr) {
      items.push_back(
          {static_cast<const char*>(buffer.data) + entry.offset, tensors[i], entry.count, entry.wire, entry.dtype});
    }
  }
  launch(stream, std::move(items), scale, std::move(keepalive));
}

void scale(Stream& stream, const std::vector<BufferView>& buffers, const Scale& scale, Keepalive keepalive) {
  std::vector<CopyItem> items;
  items.reserve(buffers.size());
  for (const BufferView& buffer : buffers) {
    HPCOMM_REQUIRE(is_floating(buffer.dtype), "only floating point buffers are scaled, this one is ",
                   to_string(buffer.dtype));
    items.push_back({buffer.data, buffer.data, buffer.count, buffer.dtype, buffer.dtype});
  }
  launch(stream, std::move(items), scale, std::move(keepalive));
}

}  // namespace hpcomm
