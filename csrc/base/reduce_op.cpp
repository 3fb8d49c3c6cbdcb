// Names of reductions, as Python spells them.
#include "base/reduce_op.h"

namespace hpcomm {

const char* to_string(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "avg";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kBitAnd:
      return "band";
    case ReduceOp::kBitOr:
      return "bor";
    case ReduceOp::kBitXor:
      return "bxor";
  }
  return "unknown";
}

}  // namespace hpcomm
