// PreMulSum: NCCL's reduction that scales each rank's input on the way, by a factor that lies in device memory.
#pragma once

#include "base/dtype.h"
#include "comm/nccl/nccl_session.h"

namespace hpcomm::nccl {

// Exists around the calls that use it: NCCL reads `scalar` (one element of `dtype`, on the device, device address) when
// the operation runs, so that memory stays until then; the operator itself may go once the calls were made. The
// session's `api` is held by the caller, as for the calls. Throws kInvalidArgument for dtypes that are no floats,
// kTransport.
class PreMulSum {
 public:
  PreMulSum(Session& session, DType dtype, void* scalar);
  ~PreMulSum();
  PreMulSum(const PreMulSum&) = delete;
  PreMulSum& operator=(const PreMulSum&) = delete;

  [[nodiscard]] RedOp op() const noexcept { return op_; }

 private:
  Session& session_;
  RedOp op_ = RedOp::kSum;
};

}  // namespace hpcomm::nccl
