// The parameters that a DistributedDataParallel has wrapped, and what they must stay as.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hpcomm {

class DdpParameters {
 public:
  // `names` are for messages. Throws kInvalidArgument where there are none, or not a name for each.
  DdpParameters(std::vector<at::Tensor> params, std::vector<std::string> names);

  [[nodiscard]] std::size_t size() const noexcept { return all_.size(); }
  [[nodiscard]] const at::Tensor& operator[](std::size_t index) const noexcept { return all_[index]; }
  [[nodiscard]] const std::vector<at::Tensor>& all() const noexcept { return all_; }
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] at::Device device() const { return all_.front().device(); }
  [[nodiscard]] bool has_gradient(std::size_t index) const { return all_[index].grad().defined(); }
  // Elements when it was wrapped.
  [[nodiscard]] std::int64_t numel(std::size_t index) const noexcept { return kinds_[index].numel; }

  // Each of these raises where a parameter is not what it was when it was wrapped.
  void require_unchanged() const;
  void require_size(std::size_t index) const;

 private:
  struct Kind {
    explicit Kind(const at::Tensor& param) : type(param.scalar_type()), device(param.device()), numel(param.numel()) {}
    c10::ScalarType type;
    c10::Device device;
    std::int64_t numel;
  };

  const std::vector<at::Tensor> all_;
  const std::vector<std::string> names_;
  const std::vector<Kind> kinds_;  // of all_ when this was made
};

}  // namespace hpcomm
