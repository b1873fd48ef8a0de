// Run linear assignment except the search, which is Backend::run(params, op) of cpu.cpp and cuda.cpp.
#pragma once

#include "core/linear_assignment/linear_assignment.h"
#include "ops/common/backend.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_linear_assignment(const at::Tensor& cost, const at::Tensor& columns) {
  constexpr const char* op = "linear_assignment";
  check_strided(cost, op, "cost");
  check_strided(columns, op, "columns");
  check_float(cost, op, "cost");
  check_same_device(cost, "cost", columns, op, "columns");
  TORCH_CHECK(at::isIntegralType(columns.scalar_type(), /*includeBool=*/false), op, ": columns has dtype ",
              dtype_name(columns.scalar_type()), ", but int64 or another integer is expected");
  TORCH_CHECK(cost.dim() == 3, op, ": cost has shape ", cost.sym_sizes(),
              ", but three dimensions (problems, rows, columns) are expected");
  TORCH_CHECK(columns.dim() == 1, op, ": columns has shape ", columns.sym_sizes(),
              ", but one dimension (problems) is expected");
  TORCH_SYM_CHECK(columns.sym_size(0).sym_eq(cost.sym_size(0)), op, ": columns has shape ", columns.sym_sizes(),
                  ", but one number for each of cost's ", cost.sym_size(0), " problems is expected");
}

// Return float32 or float64 that is contiguous along the longer side: the tensor itself if it is so.
inline at::Tensor assignment_cost(const at::Tensor& cost) {
  const at::ScalarType type = arithmetic_type(cost);
  const bool rows = cost.size(1) > cost.size(2);
  if (cost.scalar_type() == type && cost.stride(rows ? 1 : 2) == 1) return cost;
  const at::Tensor wanted = rows ? cost.transpose(1, 2) : cost;
  const at::Tensor dense = at::empty(wanted.sizes(), cost.options().dtype(type));
  dense.copy_(wanted);
  return rows ? dense.transpose(1, 2) : dense;
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> linear_assignment(const at::Tensor& cost, const at::Tensor& columns) {
  constexpr const char* op = "linear_assignment";
  check_linear_assignment(cost, columns);
  const c10::DeviceGuard guard(cost.device());
  const at::TensorOptions integers = cost.options().dtype(at::kLong);
  at::Tensor rows = at::empty_symint({cost.sym_size(0), cost.sym_size(2)}, integers);
  at::Tensor status = at::empty({core::kAssignmentStatusSize}, integers);
  if constexpr (!Backend::kMeta) {
    const at::Tensor values = assignment_cost(cost), used = columns.to(at::kLong).contiguous();
    core::LinearAssignmentParams params{};
    params.problems = cost.size(0);
    params.rows = cost.size(1);
    params.columns = cost.size(2);
    params.problem_stride = values.stride(0);
    params.row_stride = values.stride(1);
    params.column_stride = values.stride(2);
    params.cost = values.const_data_ptr();
    params.dtype = core_dtype(values.scalar_type());
    params.used_columns = used.const_data_ptr<int64_t>();
    params.period = params.problems;
    params.out = rows.mutable_data_ptr<int64_t>();
    params.status = status.mutable_data_ptr<int64_t>();
    const at::Tensor scratch =
        at::empty({params.problems * Backend::scratch(params.rows, params.columns)}, cost.options().dtype(at::kByte));
    params.scratch = scratch.mutable_data_ptr();
    Backend::run(params, op);
  }
  return {rows, status};
}

template <class Backend>
void register_linear_assignment(torch::Library& m) {
  m.impl("linear_assignment", TORCH_FN(linear_assignment<Backend>));
}

}  // namespace torch_fastdet
