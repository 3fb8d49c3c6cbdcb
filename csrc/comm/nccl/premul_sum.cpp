// Creation and end of the operator.
#include "comm/nccl/premul_sum.h"

#include <cstdio>

#include "comm/nccl/nccl_types.h"

namespace hpcomm::nccl {

PreMulSum::PreMulSum(Session& session, DType dtype, void* scalar) : session_(session) {
  HPCOMM_REQUIRE(is_floating(dtype), "a pre-multiplied sum of ", to_string(dtype), ": only floats are scaled");
  const ErrorContext what{session.rank, -1, 0, "ncclRedOpCreatePreMulSum"};
  const DataType type = reduced(dtype, ReduceOp::kSum, what).elements.type;
  const Result made = session.nccl.RedOpCreatePreMulSum(&op_, scalar, type, ScalarResidence::kDevice, session.comm);
  if (made != Result::kSuccess) {
    throw Error(ErrorKind::kTransport, str(what.operation, ": ", session.nccl.words(made, session.comm)), what);
  }
}

PreMulSum::~PreMulSum() {
  const Result done = session_.nccl.RedOpDestroy(op_, session_.comm);
  if (done != Result::kSuccess) {
    std::fprintf(stderr, "hpcomm: ncclRedOpDestroy: %s\n", session_.nccl.words(done).c_str());
  }
}

}  // namespace hpcomm::nccl
