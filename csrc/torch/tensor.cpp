// Conversions between at::Tensor and BufferView.
#include "torch/tensor.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "base/error.h"
#include "torch/device.h"
#include "torch/gil.h"

namespace hpcomm {

namespace {

using DTypes = std::array<std::optional<DType>, 256>;

// By torch's number. Not a switch: its enum grows with every version, and most of it never travels.
DTypes make_dtypes() {
  DTypes dtypes;
  for (std::uint8_t code = 0;; ++code) {
    const auto dtype = dtype_from_wire(code);
    if (!dtype) {
      return dtypes;
    }
    dtypes[static_cast<std::uint8_t>(scalar_type(*dtype))] = dtype;
  }
}

bool is_supported(at::ScalarType type) {
  const auto dtype = movable_dtype_of(type);
  return dtype.has_value() && !is_only_moved(*dtype);
}

}  // namespace

std::optional<DType> movable_dtype_of(at::ScalarType type) {
  static const DTypes dtypes = make_dtypes();
  return dtypes[static_cast<std::uint8_t>(type)];
}

DType dtype_of(at::ScalarType type) {
  HPCOMM_REQUIRE(is_supported(type), "tensors of dtype ", c10::toString(type), " are not supported");
  return *movable_dtype_of(type);
}

at::ScalarType scalar_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBool:
      return at::kBool;
    case DType::kUInt8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kComplex64:
      return at::kComplexFloat;
    case DType::kComplex128:
      return at::kComplexDouble;
    case DType::kFloat8E4M3FN:
      return at::kFloat8_e4m3fn;
    case DType::kFloat8E5M2:
      return at::kFloat8_e5m2;
    case DType::kUInt16:
      return at::kUInt16;
    case DType::kUInt32:
      return at::kUInt32;
    case DType::kUInt64:
      return at::kUInt64;
    case DType::kComplex32:
      return at::kComplexHalf;
    case DType::kFloat8E4M3FNUZ:
      return at::kFloat8_e4m3fnuz;
    case DType::kFloat8E5M2FNUZ:
      return at::kFloat8_e5m2fnuz;
    case DType::kFloat8E8M0FNU:
      return at::kFloat8_e8m0fnu;
  }
  return at::kByte;
}

bool has_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return false;
  }
  if (tensor.numel() == 0) {
    return true;
  }
  if (tensor.storage().data() == nullptr) {
    return false;
  }
  const std::size_t end = tensor.is_contiguous()
                              ? static_cast<std::size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize()
                              : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                                 static_cast<std::size_t>(tensor.storage_offset()));
  return end <= tensor.storage().nbytes();
}

void require_memory(const at::Tensor& tensor, const char* what) {
  HPCOMM_REQUIRE(has_memory(tensor), what,
                 ": the tensor has no memory of its own (a wrapper such as a DTensor, or its ",
                 "storage was given back, or resized)");
}

BufferView view_of(const at::Tensor& tensor, const char* what, Device device) {
  HPCOMM_REQUIRE(tensor.defined(), what, ": expected a tensor, got None");
  HPCOMM_REQUIRE(tensor.device() == torch_device(device), what, ": this communicator serves tensors on ",
                 torch_device(device).str(), ", got one on ", tensor.device().str());
  HPCOMM_REQUIRE(tensor.layout() == at::kStrided, what, ": sparse tensors are not supported");
  HPCOMM_REQUIRE(is_supported(tensor.scalar_type()), what, ": tensors of dtype ", c10::toString(tensor.scalar_type()),
                 " are not supported");
  const DType dtype = dtype_of(tensor);
  HPCOMM_REQUIRE(tensor.is_contiguous(), what, ": the tensor must be contiguous; call .contiguous() first");
  HPCOMM_REQUIRE(holds_its_values(tensor), what, ": the tensor is a view that torch conjugates or negates when it is ",
                 "read; call .resolve_conj().resolve_neg() first");
  require_memory(tensor, what);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return {tensor.data_ptr(), count * size_of(dtype), count, dtype, device};
}

Keepalive keep(const at::Tensor& tensor) {
  // The storage, not the tensor: mostly it has no Python object, so a lane may let go of it without the GIL.
  return std::make_shared<const HeldByLane<c10::Storage>>(tensor.storage());
}

at::Tensor as_tensor(const BufferView& view, Keepalive owner) {
  const auto options = at::TensorOptions().dtype(scalar_type(view.dtype)).device(torch_device(view.device));
  if (view.count == 0) {
    return at::empty({0}, options);
  }
  return at::from_blob(
      view.data, {static_cast<std::int64_t>(view.count)}, [owner = std::move(owner)](void*) {}, options);
}

std::size_t bytes_of(std::int64_t count, std::size_t itemsize, const char* what) {
  HPCOMM_REQUIRE(count >= 0, what, ": a tensor of ", count, " elements");
  HPCOMM_REQUIRE(count <= INT64_MAX / static_cast<std::int64_t>(itemsize), what, ": a tensor of ", count,
                 " elements is larger than any memory");
  return static_cast<std::size_t>(count) * itemsize;
}

namespace {

class TorchAllocator final : public Allocator {
 public:
  Buffer allocate(std::size_t bytes) override {
    auto memory = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    return {{memory->get(), bytes, bytes, DType::kUInt8, {}}, Keepalive(memory, memory->get())};
  }
};

}  // namespace

std::shared_ptr<Allocator> make_torch_allocator() { return std::make_shared<TorchAllocator>(); }

at::Tensor on_device(const at::Tensor& numbers, const c10::Device& device) {
  at::Tensor sent = at::empty(numbers.sizes(), numbers.options().device(device));
  if (device.is_cpu()) {
    return sent.copy_(numbers);  // not clone(): a program may forbid it, to find copies of its own
  }
  at::Tensor pinned = at::empty(numbers.sizes(), numbers.options().pinned_memory(true));
  return sent.copy_(pinned.copy_(numbers), /*non_blocking=*/true);
}

bool EndsWithGil<c10::Storage>::now(const c10::Storage& held) noexcept {
  return held && held.use_count() == 1 && held.device().is_cpu() && held.data_ptr().get_deleter() != nullptr &&
         held.data_ptr().get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter() && !holds_gil();
}

bool EndsWithGil<std::pair<c10::Storage, c10::Storage>>::now(
    const std::pair<c10::Storage, c10::Storage>& held) noexcept {
  return EndsWithGil<c10::Storage>::now(held.first) || EndsWithGil<c10::Storage>::now(held.second);
}

bool EndsWithGil<std::vector<c10::Storage>>::now(const std::vector<c10::Storage>& held) noexcept {
  return std::any_of(held.begin(), held.end(), &EndsWithGil<c10::Storage>::now);
}

}  // namespace hpcomm
