// What a family's run.h knows of the backend that it is instantiated for.
#pragma once

namespace torch_fastdet {

// Base of a family's Cpu and Cuda, which add run(params, op).
struct OnDevice {
  static constexpr bool kMeta = false;
};

// Shapes and dtypes only, of sizes that may be symbolic: nothing to run.
struct Meta {
  static constexpr bool kMeta = true;
};

}  // namespace torch_fastdet
