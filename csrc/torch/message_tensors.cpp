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

at::IntArrayRef sizes_of(const TensorSchema& schema) { return {schema.shape.data(), schema.shape.size()}; }

void lay_out(c10::TensorImpl& tensor, const TensorSchema& schema, const Parcel::Place& place) {
  tensor.set_storage_offset(static_cast<std::int64_t>(place.offset / size_of(schema.dtype)));
  if (schema.order.empty()) {
    tensor.set_sizes_contiguous(sizes_of(schema));
  } else {
    tensor.set_sizes_and_strides(sizes_of(schema), schema.strides());
  }
}

}  // namespace

MessageTensors::MessageTensors(KnownPtr known, Device device)
    : known_(std::move(known)), device_(torch_device(device)) {
  make_storages();
  const Schema& schema = known_->schema;
  tensors_.reserve(schema.tensors.size());
  for (std::size_t i = 0; i < schema.tensors.size(); ++i) {
    tensors_.push_back(make(i));
    if (schema.tensors[i].requires_grad) {
      tensors_.back().set_requires_grad(true);
    }
  }
}

std::vector<at::Tensor> MessageTensors::release() {
  released_.reserve(tensors_.size());
  for (const at::Tensor& tensor : tensors_) {
    released_.push_back(tensor.unsafeGetTensorImpl());
  }
  return std::move(tensors_);
}

bool MessageTensors::become(const KnownPtr& known) {
  if (known == known_) {
    return true;
  }
  if (!same_but_shapes(known->schema, known_->schema)) {
    return false;
  }
  known_ = known;
  make_storages();
  for (std::size_t i = 0; i < released_.size(); ++i) {
    const TensorSchema& schema = known_->schema.tensors[i];
    const Parcel::Place& place = known_->parcel.places[i];
    const bool empty = place.area == Parcel::Area::kNowhere;
    c10::TensorImpl* const impl = released_[i];
    impl->set_storage_keep_dtype(empty ? at::empty({0}, options(schema)).storage() : storage_of(place.area));
    lay_out(*impl, schema, place);
  }
  return true;
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

void MessageTensors::make_storages() {
  packed_ = storage(known_->parcel.packed.bytes());
  direct_ = storage(known_->parcel.direct_bytes);
  cast_ = storage(known_->parcel.cast_bytes);
}

const c10::Storage& MessageTensors::storage_of(Parcel::Area area) const noexcept {
  switch (area) {
    case Parcel::Area::kNowhere:
    case Parcel::Area::kPacked:
      return packed_;
    case Parcel::Area::kDirect:
      return direct_;
    case Parcel::Area::kCast:
      return cast_;
  }
  return packed_;
}

at::Tensor MessageTensors::make(std::size_t i) const {
  const TensorSchema& schema = known_->schema.tensors[i];
  const Parcel::Place& place = known_->parcel.places[i];
  if (place.area == Parcel::Area::kNowhere) {
    return at::empty(sizes_of(schema), options(schema));
  }
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage_of(place.area)),
                                                              c10::DispatchKeySet(options(schema).computeDispatchKey()),
                                                              c10::scalarTypeToTypeMeta(scalar_type(schema.dtype)));
  lay_out(*tensor.unsafeGetTensorImpl(), schema, place);
  return tensor;
}

}  // namespace hpcomm
