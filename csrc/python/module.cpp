// torch_fastdet._C holds build information, the trackers and the scan of labels, none of which needs torch.
#include <pybind11/pybind11.h>

#include "build_config.h"
#include "python/bind.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.def(
      "build_info",
      [] {
        return py::dict(py::arg("version") = TORCH_FASTDET_BUILD_VERSION, py::arg("torch") = TORCH_FASTDET_BUILD_TORCH,
                        py::arg("cuda") = TORCH_FASTDET_BUILD_CUDA,
                        py::arg("architectures") = TORCH_FASTDET_BUILD_ARCHITECTURES,
                        py::arg("compiler") = __VERSION__);
      },
      "What this module was compiled with: version, torch, CUDA, architectures and compiler.");
  bind_labels(m);
  bind_trackers(m);
}
