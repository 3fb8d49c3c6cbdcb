// The seam in a build without CUDA.
#include "base/error.h"
#include "torch/device.h"

namespace hpcomm {

bool built_with_cuda() noexcept { return false; }

Device device_of(const c10::Device& device) {
  HPCOMM_REQUIRE(device.is_cpu(), "this copy of hpcomm serves CPU tensors, not ", device.str(),
                 "; build it with USE_CUDA=1 against a torch with CUDA");
  return {};
}

c10::Device torch_device(Device) { return c10::Device(c10::DeviceType::CPU); }

const std::shared_ptr<Stream>& compute_stream(Device) {
  static const std::shared_ptr<Stream> caller = make_caller_stream();
  return caller;
}

std::function<std::shared_ptr<Stream>(const std::string&)> lane_streams(Device) {
  return [](const std::string& lane) { return make_worker_stream("hpcomm:" + lane); };
}

void with_current(Stream&, const std::function<void()>& body) { body(); }

void require_usable(Device device) {
  HPCOMM_REQUIRE(device.type == DeviceType::kCpu,
                 "this copy of hpcomm was built without CUDA; build it with USE_CUDA=1 against a torch with CUDA");
}

}  // namespace hpcomm
