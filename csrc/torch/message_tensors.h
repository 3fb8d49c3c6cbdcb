// MessageTensors: the tensors of a message over the buffers that it came in, made before or after those are known.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "engine/edge.h"

namespace hpcomm {

class MessageTensors {
 public:
  // Of any message of this schema: tensors without memory, which nobody may read before set_memory().
  MessageTensors(KnownPtr known, Device device);
  // Gives them the buffers of `message`, which has the schema that they were made for. Needs no GIL. One storage per
  // buffer: the slot is used again when the last of its tensors is gone.
  void set_memory(const Incoming& message);

  [[nodiscard]] const KnownPtr& known() const noexcept { return known_; }
  [[nodiscard]] std::vector<at::Tensor> take() noexcept { return std::move(tensors_); }

 private:
  [[nodiscard]] at::TensorOptions options(const TensorSchema& schema) const;
  [[nodiscard]] c10::Storage storage(std::size_t bytes) const;
  [[nodiscard]] at::Tensor view(const c10::Storage& memory, const TensorSchema& schema, std::size_t offset) const;

  KnownPtr known_;
  c10::Device device_;
  // Empty where the schema has no such part.
  c10::Storage packed_;
  c10::Storage direct_;
  c10::Storage cast_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace hpcomm
