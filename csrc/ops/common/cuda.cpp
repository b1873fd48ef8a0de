// Torch keeps a cuBLAS workspace for each handle and stream. A product writes to it, and a captured product does so in
// each replay, but clearCublasWorkspaces(), which torch.compile with reduce-overhead calls, frees it for others. So a
// captured graph takes its stream's workspaces out of torch's maps and keeps them.
#include <ATen/cuda/CUDAContextLight.h>

#include <iterator>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_fastdet {
namespace {

using at::cuda::WorkspaceMapWithMutex;
using Nodes = std::vector<decltype(WorkspaceMapWithMutex::map)::node_type>;

struct Workspaces {
  Nodes cublas, cublaslt;
};

void take(WorkspaceMapWithMutex& kept, void* stream, Nodes& nodes) {
  const std::unique_lock lock(kept.mutex);
  for (auto place = kept.map.begin(); place != kept.map.end();) {
    const auto next = std::next(place);
    if (std::get<1>(place->first) == stream) nodes.push_back(kept.map.extract(place));
    place = next;
  }
}

void give_back(WorkspaceMapWithMutex& kept, Nodes& nodes) {
  const std::unique_lock lock(kept.mutex);
  for (auto& node : nodes) kept.map.insert(std::move(node));
}

}  // namespace
}  // namespace torch_fastdet

// Python calls these through ctypes, see torch_fastdet/graphs/capture.py.
extern "C" {

C10_EXPORT void* torch_fastdet_take_workspaces(void* stream) {
  auto* taken = new torch_fastdet::Workspaces;
  torch_fastdet::take(at::cuda::cublas_handle_stream_to_workspace(), stream, taken->cublas);
  torch_fastdet::take(at::cuda::cublaslt_handle_stream_to_workspace(), stream, taken->cublaslt);
  return taken;
}

C10_EXPORT void torch_fastdet_give_workspaces_back(void* taken) {
  auto* workspaces = static_cast<torch_fastdet::Workspaces*>(taken);
  torch_fastdet::give_back(at::cuda::cublas_handle_stream_to_workspace(), workspaces->cublas);
  torch_fastdet::give_back(at::cuda::cublaslt_handle_stream_to_workspace(), workspaces->cublaslt);
  delete workspaces;
}

C10_EXPORT void torch_fastdet_free_workspaces(void* taken) {
  delete static_cast<torch_fastdet::Workspaces*>(taken);
}
}
