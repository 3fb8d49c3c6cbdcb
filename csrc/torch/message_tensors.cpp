// Storages without memory, tensors in them, and the memory at last.
#include "torch/message_tensors.h"

#include <utility>

#include "base/error.h"
#include "torch/device.h"
#include "torch/tensor.h"

namespace hpcomm {

namespace {

void give(c10::Storage& storage, const Buffer& buffer) {
  if (!storage || buffer.owner == nullptr) {
    return;
  }
  auto* const owner = new Keepalive(buffer.owner);
  storage.set_data_ptr_noswap(c10::DataPtr(
      buffer.view.data, owner, [](void* kept) { delete static_cast<Keepalive*>(kept); }, storage.device()));
}

}  // namespace

MessageTensors::MessageTensors(KnownPtr known, Device device)
    : known_(std::move(known)),
      device_(torch_device(device)),
      packed_(storage(known_->parcel.packed.bytes())),
      direct_(storage(known_->parcel.direct_bytes)),
      cast_(storage(known_->parcel.cast_bytes)) {
  const Schema& schema = known_->schema;
  tensors_.reserve(schema.tensors.size());
  for (std::size_t i = 0; i < schema.tensors.size(); ++i) {
    const Parcel::Place& place = known_->parcel.places[i];
    switch (place.area) {
      case Parcel::Area::kNowhere:
        tensors_.push_back(at::empty(schema.tensors[i].shape, options(schema.tensors[i])));
        break;
      case Parcel::Area::kPacked:
        tensors_.push_back(view(packed_, schema.tensors[i], place.offset));
        break;
      case Parcel::Area::kDirect:
        tensors_.push_back(view(direct_, schema.tensors[i], place.offset));
        break;
      case Parcel::Area::kCast:
        tensors_.push_back(view(cast_, schema.tensors[i], place.offset));
        break;
    }
    if (schema.tensors[i].requires_grad) {
      tensors_.back().set_requires_grad(true);
    }
  }
}

void MessageTensors::set_memory(const Incoming& message) {
  HPCOMM_ASSERT(message.known == known_, "memory of a message with another schema");
  give(packed_, message.packed);
  give(direct_, message.direct);
  give(cast_, message.cast);
}

at::TensorOptions MessageTensors::options(const TensorSchema& schema) const {
  return at::TensorOptions().dtype(scalar_type(schema.dtype)).device(device_);
}

c10::Storage MessageTensors::storage(std::size_t bytes) const {
  if (bytes == 0) {
    return {};
  }
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device_), nullptr, false};
}

at::Tensor MessageTensors::view(const c10::Storage& memory, const TensorSchema& schema, std::size_t offset) const {
  const auto meta = c10::scalarTypeToTypeMeta(scalar_type(schema.dtype));
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(memory), c10::DispatchKeySet(options(schema).computeDispatchKey()), meta);
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(static_cast<std::int64_t>(offset / meta.itemsize()));
  impl->set_sizes_contiguous(schema.shape);
  return tensor;
}

}  // namespace hpcomm
