// The table of dtypes and reductions.
#include "comm/nccl/nccl_types.h"

namespace hpcomm::nccl {

namespace {

[[noreturn]] void refuse(const ErrorContext& what, DType dtype, ReduceOp op, const char* instead) {
  throw Error(ErrorKind::kInvalidArgument,
              str(what.operation, ": NCCL has no reduction ", to_string(op), " of ", to_string(dtype), "; ", instead),
              what);
}

// Of bytes that are 0 or 1.
RedOp of_bools(ReduceOp op, const ErrorContext& what) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return RedOp::kMax;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return RedOp::kMin;
    case ReduceOp::kAverage:
    case ReduceOp::kBitXor:
      refuse(what, DType::kBool, op, "use uint8");
  }
  return RedOp::kMax;
}

RedOp of_numbers(DType dtype, ReduceOp op, const ErrorContext& what) {
  const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  switch (op) {
    case ReduceOp::kSum:
      return RedOp::kSum;
    case ReduceOp::kAverage:
      return RedOp::kAvg;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if (complex) {
        refuse(what, dtype, op, "gather the values and reduce them locally");
      }
      return op == ReduceOp::kProduct ? RedOp::kProd : op == ReduceOp::kMin ? RedOp::kMin : RedOp::kMax;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      refuse(what, dtype, op, "gather the values and reduce them locally");
  }
  return RedOp::kSum;
}

}  // namespace

Elements copied(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return {DataType::kUInt8, 1};
    case DType::kInt8:
      return {DataType::kInt8, 1};
    case DType::kInt16:
      return {DataType::kUInt8, 2};
    case DType::kInt32:
      return {DataType::kInt32, 1};
    case DType::kInt64:
      return {DataType::kInt64, 1};
    case DType::kFloat16:
      return {DataType::kFloat16, 1};
    case DType::kBFloat16:
      return {DataType::kBFloat16, 1};
    case DType::kFloat32:
      return {DataType::kFloat32, 1};
    case DType::kFloat64:
      return {DataType::kFloat64, 1};
    case DType::kComplex64:
      return {DataType::kFloat32, 2};
    case DType::kComplex128:
      return {DataType::kFloat64, 2};
    case DType::kFloat8E4M3FN:  // NCCL has them, on devices that do; a copy needs none of that
    case DType::kFloat8E5M2:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex32:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      return {DataType::kUInt8, size_of(dtype)};
  }
  return {};
}

Reduction reduced(DType dtype, ReduceOp op, const ErrorContext& what) {
  switch (dtype) {
    case DType::kBool:
      return {copied(dtype), of_bools(op, what)};
    case DType::kInt16:
      refuse(what, dtype, op, "use int32");
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex32:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E8M0FNU:
      refuse(what, dtype, op, "gather the values and reduce them locally");
    case DType::kFloat8E4M3FN:
      return {{DataType::kFloat8E4M3, 1}, of_numbers(dtype, op, what)};
    case DType::kFloat8E5M2:
      return {{DataType::kFloat8E5M2, 1}, of_numbers(dtype, op, what)};
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kComplex64:
    case DType::kComplex128:
      return {copied(dtype), of_numbers(dtype, op, what)};
  }
  return {};
}

}  // namespace hpcomm::nccl
