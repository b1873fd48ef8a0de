// torch.classes.torch_fastdet.NewtonSchulz owns memory for MuSGD's matrices on a GPU, so that calls can be captured.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/custom_class.h>

#include <cstring>
#include <limits>
#include <vector>

#include "core/newton_schulz/newton_schulz_plan.h"
#include "ops/common/launch.h"

namespace torch_fastdet::newton_schulz_cuda {
namespace {

class NewtonSchulz : public torch::CustomClassHolder {
 public:
  // Matrix i is (rows[i], columns[i]), and its result is multiplied by scales[i].
  NewtonSchulz(const std::vector<int64_t>& rows, const std::vector<int64_t>& columns, const std::vector<double>& scales,
               at::Device device) {
    TORCH_CHECK(rows.size() == columns.size() && rows.size() == scales.size(), "NewtonSchulz: rows has ", rows.size(),
                ", columns ", columns.size(), " and scales ", scales.size(),
                " entries, but as many of each are expected");
    TORCH_CHECK(device.is_cuda() && device.has_index(), "NewtonSchulz: device is ", device,
                ", but a GPU with its index is expected");
    const auto* properties = at::cuda::getDeviceProperties(device.index());
    TORCH_CHECK(properties->major >= 8, "NewtonSchulz: the GPU has compute capability ", properties->major, ".",
                properties->minor, ", but 8.0 or newer is expected");
    core::NsPlan plan;
    for (size_t i = 0; i < rows.size(); ++i) {
      constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
      TORCH_CHECK(rows[i] > 0 && columns[i] > 0 && rows[i] < kMost && columns[i] < kMost, "NewtonSchulz: matrix ", i,
                  " is (", rows[i], ", ", columns[i], "), but 1 to ", kMost - 1, " of both are expected");
      plan.add(rows[i], columns[i], scales[i]);
    }
    plan.sort();
    const c10::InferenceMode writable(false);
    const c10::DeviceGuard guard(device);
    check_launch(core::prepare_newton_schulz(), "NewtonSchulz");
    const auto options = at::TensorOptions().device(device);
    source_ = at::zeros({plan.source_elements}, options.dtype(at::kBFloat16));
    result_ = at::empty({plan.source_elements}, options.dtype(at::kFloat));
    for (const core::NsMatrix& matrix : plan.matrices) places_.push_back(matrix.source);
    for (const int64_t elements : {plan.x_elements, plan.x_elements, plan.gram_elements, plan.gram_elements}) {
      workspace_.push_back(at::empty({elements}, options.dtype(at::kBFloat16)));
    }
    workspace_.push_back(at::empty({static_cast<int64_t>(plan.chunks.size())}, options.dtype(at::kFloat)));
    params_.matrices = upload(plan.matrices, device);
    params_.chunks = upload(plan.chunks, device);
    params_.squares = upload(plan.squares, device);
    params_.tiles = upload(plan.tiles, device);
    params_.num_chunks = static_cast<int64_t>(plan.chunks.size());
    params_.num_squares = static_cast<int64_t>(plan.squares.size());
    params_.num_tiles = static_cast<int64_t>(plan.tiles.size());
    params_.source = source_.const_data_ptr();
    params_.result = static_cast<float*>(result_.mutable_data_ptr());
    params_.x[0] = workspace_[0].mutable_data_ptr();
    params_.x[1] = workspace_[1].mutable_data_ptr();
    params_.gram = workspace_[2].mutable_data_ptr();
    params_.polynomial = workspace_[3].mutable_data_ptr();
    params_.squared = static_cast<float*>(workspace_[4].mutable_data_ptr());
  }

  // Return the matrices, one after the other, in bfloat16.
  at::Tensor source() const { return source_; }
  // Return the results, at the same places, in float32.
  at::Tensor result() const { return result_; }
  // Return the index of each matrix's first element in both.
  std::vector<int64_t> places() const { return places_; }

  void run() {
    const c10::DeviceGuard guard(source_.device());
    check_launch(core::launch_newton_schulz(params_, current_stream()), "NewtonSchulz");
  }

 private:
  template <typename T>
  const T* upload(const std::vector<T>& list, at::Device device) {
    const auto bytes = static_cast<int64_t>(list.size() * sizeof(T));
    const at::Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    if (bytes) std::memcpy(host.mutable_data_ptr(), list.data(), bytes);
    lists_.push_back(host.to(device));
    return static_cast<const T*>(lists_.back().const_data_ptr());
  }

  at::Tensor source_, result_;
  std::vector<at::Tensor> workspace_, lists_;
  std::vector<int64_t> places_;
  core::NsParams params_{};
};

TORCH_LIBRARY_FRAGMENT(torch_fastdet, m) {
  m.class_<NewtonSchulz>("NewtonSchulz")
      .def(torch::init<const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<double>&,
                       at::Device>())
      .def("source", &NewtonSchulz::source)
      .def("result", &NewtonSchulz::result)
      .def("places", &NewtonSchulz::places)
      .def("run_", &NewtonSchulz::run);
}

}  // namespace
}  // namespace torch_fastdet::newton_schulz_cuda
