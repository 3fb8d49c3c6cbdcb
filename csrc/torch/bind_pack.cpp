// pack and unpack as Python sees them: on the stream that the caller computes on. What tests and benchmarks look at.
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "pack/pack.h"
#include "torch/bindings.h"
#include "torch/device.h"
#include "torch/tensor.h"

namespace py = pybind11;

namespace hpcomm {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

Layout make_layout(const std::vector<at::Tensor>& tensors, const py::object& wire) {
  std::vector<TensorSize> sizes;
  sizes.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    sizes.push_back({static_cast<std::size_t>(tensor.numel()), dtype_of(tensor)});
  }
  if (wire.is_none()) {
    return Layout(sizes);
  }
  HPCOMM_REQUIRE(THPDtype_Check(wire.ptr()), "layout: wire must be a torch.dtype");
  return Layout(sizes, dtype_of(reinterpret_cast<THPDtype*>(wire.ptr())->scalar_type));
}

// One number of `dtype` on the device, read or written by the kernel when it runs.
template <typename T>
std::shared_ptr<T> number(const MaybeTensor& tensor, DType dtype, Device device, const char* what) {
  if (!tensor) {
    return nullptr;
  }
  const BufferView view = view_of(*tensor, what, device);
  HPCOMM_REQUIRE(view.count == 1 && view.dtype == dtype, what, ": expected one ", to_string(dtype), ", got ",
                 view.count, " ", to_string(view.dtype));
  return std::shared_ptr<T>(keep(*tensor), static_cast<T*>(view.data));
}

// Everything that the kernel touches.
Keepalive keep_all(const std::vector<MaybeTensor>& tensors, const at::Tensor& buffer) {
  auto storages = std::make_shared<std::vector<c10::Storage>>();
  storages->push_back(buffer.storage());
  for (const MaybeTensor& tensor : tensors) {
    if (tensor) {
      storages->push_back(tensor->storage());
    }
  }
  return storages;
}

template <typename Pointer>
std::vector<Pointer> pointers(const Layout& layout, const std::vector<MaybeTensor>& tensors, Device device,
                              const char* what) {
  HPCOMM_REQUIRE(tensors.size() == layout.entries().size(), what, ": the layout has ", layout.entries().size(),
                 " entries, got ", tensors.size(), " tensors");
  std::vector<Pointer> found;
  found.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i]) {
      found.push_back(nullptr);
      continue;
    }
    const BufferView view = view_of(*tensors[i], what, device);
    const Layout::Entry& entry = layout.entries()[i];
    HPCOMM_REQUIRE(view.count == entry.count && view.dtype == entry.dtype, what, ": entry ", i, " is ", entry.count,
                   " ", to_string(entry.dtype), ", the tensor ", view.count, " ", to_string(view.dtype));
    found.push_back(view.data);
  }
  return found;
}

void pack_tensors(const Layout& layout, const std::vector<MaybeTensor>& tensors, const at::Tensor& buffer,
                  const MaybeTensor& scale, const MaybeTensor& first_bad) {
  const Device device = device_of(buffer.device());
  const BufferView to = view_of(buffer, "pack buffer", device);
  pack(*compute_stream(device), layout, pointers<const void*>(layout, tensors, device, "pack"), to,
       {number<const double>(scale, DType::kFloat64, device, "pack scale")}, keep_all(tensors, buffer),
       {number<std::int32_t>(first_bad, DType::kInt32, device, "pack first_bad")});
}

void unpack_tensors(const Layout& layout, const at::Tensor& buffer, const std::vector<MaybeTensor>& tensors,
                    const MaybeTensor& scale) {
  const Device device = device_of(buffer.device());
  const BufferView from = view_of(buffer, "unpack buffer", device);
  unpack(*compute_stream(device), layout, from, pointers<void*>(layout, tensors, device, "unpack"),
         {number<const double>(scale, DType::kFloat64, device, "unpack scale")}, keep_all(tensors, buffer));
}

// The tensors of a buffer, looked up once: what the kernel of the CPU takes without the way from Python to it.
class CopyList {
 public:
  CopyList(const Layout& layout, const std::vector<MaybeTensor>& tensors, const at::Tensor& buffer)
      : keepalive_(keep_all(tensors, buffer)) {
    const BufferView view = view_of(buffer, "copy list buffer", {});
    HPCOMM_REQUIRE(view.bytes >= layout.bytes(), "copy list: the layout needs ", layout.bytes(),
                   " bytes, the buffer has ", view.bytes);
    const auto found = pointers<void*>(layout, tensors, {}, "copy list");
    for (std::size_t i = 0; i < found.size(); ++i) {
      const Layout::Entry& entry = layout.entries()[i];
      char* const place = static_cast<char*>(view.data) + entry.offset;
      packing_.push_back({found[i], place, entry.count, entry.dtype, entry.wire});
      if (found[i] != nullptr) {
        unpacking_.push_back({place, found[i], entry.count, entry.wire, entry.dtype});
      }
    }
  }
  void pack() const { run_copies_cpu(packing_, nullptr); }
  void unpack() const { run_copies_cpu(unpacking_, nullptr); }

 private:
  Keepalive keepalive_;
  std::vector<CopyItem> packing_;
  std::vector<CopyItem> unpacking_;
};

}  // namespace

void bind_pack(py::module_& module) {
  py::class_<Layout>(module, "Layout")
      .def(py::init(&make_layout), py::arg("tensors"), py::arg("wire") = py::none())
      .def_property_readonly("bytes", &Layout::bytes)
      .def_property_readonly("offsets", [](const Layout& layout) {
        std::vector<std::size_t> offsets;
        for (const Layout::Entry& entry : layout.entries()) {
          offsets.push_back(entry.offset);
        }
        return offsets;
      });
  py::class_<CopyList>(module, "CopyList")
      .def(py::init<const Layout&, const std::vector<MaybeTensor>&, const at::Tensor&>(), py::arg("layout"),
           py::arg("tensors"), py::arg("buffer"))
      .def("pack", &CopyList::pack)
      .def("unpack", &CopyList::unpack);
  module.def("pack", &pack_tensors, py::arg("layout"), py::arg("tensors"), py::arg("buffer"), py::kw_only(),
             py::arg("scale") = py::none(), py::arg("first_bad") = py::none());
  module.def("unpack", &unpack_tensors, py::arg("layout"), py::arg("buffer"), py::arg("tensors"), py::kw_only(),
             py::arg("scale") = py::none());
}

}  // namespace hpcomm
