// torch_fastdet._C: build information, trackers and the scan of labels, none of which needs torch.
#include <pybind11/pybind11.h>

#include "build_config.h"
#include "python/labels.h"
#include "python/trackers.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = TORCH_FASTDET_BUILD_VERSION;
        info["torch"] = TORCH_FASTDET_BUILD_TORCH;
        info["cuda"] = TORCH_FASTDET_BUILD_CUDA;
        info["architectures"] = TORCH_FASTDET_BUILD_ARCHITECTURES;
        info["compiler"] = __VERSION__;
        return info;
      },
      "What this module was compiled with: version, torch, CUDA, architectures and compiler.");
  bind_labels(m);
  bind_trackers(m);
}
