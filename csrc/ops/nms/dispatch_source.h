// From the layout and dtype of a CandidateSource to the class that reads it, on the CPU.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "core/nms/candidates.h"

namespace torch_fastdet {

template <template <typename> class Layout, typename F>
void dispatch_stored(core::DType dtype, F&& f) {
  switch (dtype) {
    case core::DType::kFloat16:
      return f(Layout<c10::Half>{});
    case core::DType::kBFloat16:
      return f(Layout<c10::BFloat16>{});
    case core::DType::kFloat32:
      return f(Layout<float>{});
    case core::DType::kFloat64:
      return f(Layout<double>{});
  }
}

template <typename F>
void dispatch_source(const core::CandidateSource& source, F&& f) {
  switch (source.layout) {
    case core::CandidateLayout::kPrediction:
      return dispatch_stored<core::PredictionLayout>(source.dtype, f);
    case core::CandidateLayout::kAnchorHeads:
      return dispatch_stored<core::AnchorHeadLayout>(source.dtype, f);
    case core::CandidateLayout::kAnchorFreeHeads:
      return dispatch_stored<core::AnchorFreeHeadLayout>(source.dtype, f);
  }
}

}  // namespace torch_fastdet
