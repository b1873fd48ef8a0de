// Run multi_tensor on CUDA: keep work lists on the device and launch on the current stream.
//
// A plan owns the device-resident work list. It is found by the bytes of the rows it was made from (pointers, types,
// sizes) and by its stream, so that a changed pointer finds or makes another plan, and no plan is stale. Outside a
// capture, plans live in a small least-recently-used cache; a new one costs one copy from pinned memory on the current
// stream. During a capture the graph must not upload anything, so the plan is made on a stream of its own, is complete
// before the kernel is recorded, belongs to that graph alone and is freed with it.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/multi_tensor/multi_tensor_plan.h"
#include "ops/common/launch.h"
#include "ops/multi_tensor/run.h"

namespace torch_fastdet::multi_tensor {
namespace {

constexpr size_t kCachedPlans = 64;
constexpr int64_t kWorkspaceBytes = 64;

using Words = std::vector<uint64_t>;

uint64_t hash(const Words& words) {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (const uint64_t word : words) h = (h ^ word) * 0xff51afd7ed558ccdull, h ^= h >> 29;
  return h;
}

struct WordsHash {
  size_t operator()(const Words& words) const { return hash(words); }
};

// This small map evicts the least recently used entry.
template <typename Value>
class RecentlyUsed {
 public:
  std::shared_ptr<Value> find(const Words& key) {
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->second;
  }
  void insert(const Words& key, std::shared_ptr<Value> value) {
    entries_.emplace_front(key, std::move(value));
    index_[key] = entries_.begin();
    if (entries_.size() > kCachedPlans) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
  }

 private:
  using Entries = std::list<std::pair<Words, std::shared_ptr<Value>>>;
  Entries entries_;
  std::unordered_map<Words, typename Entries::iterator, WordsHash> index_;
};

struct Segments {
  at::Tensor device;
  int64_t count;
};

struct Plan {
  std::shared_ptr<Segments> segments;
  at::Tensor table;  // workspace, rows, layouts
  at::Tensor partials;
  std::vector<at::Tensor> owned;  // other tensors to which a graph's kernels point
  core::MultiTensor view;
};

struct Cache {
  std::mutex mutex;
  RecentlyUsed<Segments> segments;
  RecentlyUsed<Plan> plans;
};

// Plans of destroyed graphs wait here: CUDA's callback, which must not call CUDA, cannot free them. A thread that holds
// the mutex never calls CUDA, so the callback never waits for a thread that waits for CUDA.
struct Retired {
  std::mutex mutex;
  std::vector<std::shared_ptr<Plan>> plans;
};

Cache& cache() {
  static Cache* cache = new Cache;  // outlives the CUDA context's users at exit
  return *cache;
}

Retired& retired() {
  static Retired* retired = new Retired;
  return *retired;
}

void free_retired() {
  std::vector<std::shared_ptr<Plan>> plans;  // freed after the lock is released
  const std::lock_guard<std::mutex> lock(retired().mutex);
  plans.swap(retired().plans);
}

// Return the device's stream for uploads of graphs' work lists. A stream of torch's pool might be the capturing one.
c10::cuda::CUDAStream upload_stream(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::array<cudaStream_t, C10_COMPILE_TIME_MAX_GPUS> streams{};
  const std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& stream = streams.at(device);
  if (!stream) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  return c10::cuda::getStreamFromExternal(stream, device);
}

template <typename T>
void append(Words& words, const std::vector<T>& values) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0, "hashed in words");
  const size_t at = words.size();
  words.resize(at + values.size() * sizeof(T) / sizeof(uint64_t));
  if (!values.empty()) std::memcpy(words.data() + at, values.data(), values.size() * sizeof(T));
}

at::Tensor device_bytes(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

// If `now`, the bytes are on the device when this returns, and no stream waits for the copy.
at::Tensor upload(const void* data, int64_t bytes, at::Device device, bool now) {
  at::Tensor on_device = device_bytes(bytes, device);
  if (bytes == 0) return on_device;
  if (now) {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cudaMemcpyAsync(on_device.mutable_data_ptr(), data, bytes, cudaMemcpyHostToDevice, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return on_device;
  }
  at::Tensor pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(pinned.mutable_data_ptr(), data, bytes);
  return on_device.copy_(pinned, /*non_blocking=*/true);
}

std::shared_ptr<Segments> make_segments(const List& list, bool now) {
  std::vector<int64_t> numels;
  numels.reserve(list.rows.size());
  for (const core::Row& row : list.rows) numels.push_back(row.numel);
  const std::vector<core::Segment> segments = core::plan_segments(numels);
  auto result = std::make_shared<Segments>();
  result->count = static_cast<int64_t>(segments.size());
  result->device = upload(segments.data(), result->count * sizeof(core::Segment), list.device, now);
  return result;
}

std::shared_ptr<Plan> make_plan(const List& list, std::shared_ptr<Segments> segments, bool now) {
  static_assert(sizeof(core::Workspace) <= kWorkspaceBytes, "the workspace heads the table");
  const int64_t rows = list.rows.size() * sizeof(core::Row);
  const int64_t layouts = list.layouts.size() * sizeof(core::Layout);
  std::vector<char> bytes(kWorkspaceBytes + rows + layouts, 0);
  if (rows) std::memcpy(bytes.data() + kWorkspaceBytes, list.rows.data(), rows);
  if (layouts) std::memcpy(bytes.data() + kWorkspaceBytes + rows, list.layouts.data(), layouts);
  auto plan = std::make_shared<Plan>();
  plan->table = upload(bytes.data(), bytes.size(), list.device, now);
  plan->partials = device_bytes(core::kMaxBlocks * sizeof(double), list.device);
  char* table = static_cast<char*>(plan->table.mutable_data_ptr());
  core::MultiTensor& view = plan->view;
  view.workspace = list.workspace ? list.workspace : reinterpret_cast<core::Workspace*>(table);
  view.rows = reinterpret_cast<const core::Row*>(table + kWorkspaceBytes);
  view.layouts = reinterpret_cast<const core::Layout*>(table + kWorkspaceBytes + rows);
  view.segments = static_cast<const core::Segment*>(segments->device.const_data_ptr());
  view.num_rows = static_cast<int64_t>(list.rows.size());
  view.num_segments = segments->count;
  view.partials = static_cast<double*>(plan->partials.mutable_data_ptr());
  view.float32_only = list.float32_only;
  view.multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  plan->segments = std::move(segments);
  return plan;
}

std::shared_ptr<Plan> cached_plan(const List& list, c10::cuda::CUDAStream stream) {
  Words key = {static_cast<uint64_t>(stream.id()), static_cast<uint64_t>(stream.device_index())};
  Words sizes = key;
  key.push_back(reinterpret_cast<uint64_t>(list.workspace));
  append(key, list.rows);
  append(key, list.layouts);
  free_retired();
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (auto plan = c.plans.find(key)) return plan;
  for (const core::Row& row : list.rows) sizes.push_back(static_cast<uint64_t>(row.numel));
  auto segments = c.segments.find(sizes);
  if (!segments) {
    segments = make_segments(list, false);
    c.segments.insert(sizes, segments);
  }
  auto plan = make_plan(list, std::move(segments), false);
  c.plans.insert(key, plan);
  return plan;
}

// CUDA calls this when the graph and all its executables are gone. It must not call any CUDA function itself.
void CUDART_CB retire(void* owned) {
  std::unique_ptr<std::shared_ptr<Plan>> plan(static_cast<std::shared_ptr<Plan>*>(owned));
  const std::lock_guard<std::mutex> lock(retired().mutex);
  retired().plans.push_back(std::move(*plan));
}

std::shared_ptr<Plan> captured_plan(const List& list, c10::cuda::CUDAStream capturing) {
  // Relaxed mode permits calls other than kernel launches during the capture.
  c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  free_retired();
  std::shared_ptr<Plan> plan;
  {
    // Memory of a stream that is not captured comes from the ordinary pool, not from the graph's.
    c10::cuda::CUDAStreamGuard guard(upload_stream(capturing.device_index()));
    plan = make_plan(list, make_segments(list, true), true);
    plan->owned = list.owned_by_graph;
  }
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(capturing, &status, nullptr, &graph, nullptr, nullptr, nullptr));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(capturing, &status, nullptr, &graph, nullptr, nullptr));
#endif
  cudaUserObject_t object = nullptr;
  C10_CUDA_CHECK(
      cudaUserObjectCreate(&object, new std::shared_ptr<Plan>(plan), retire, 1, cudaUserObjectNoDestructorSync));
  C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
  return plan;
}

}  // namespace

bool is_capturing(const List& list) {
  if (!list.device.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(list.device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void run_cuda(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
              c10::ArrayRef<core::Group> groups) {
  const char* op = "multi_tensor";
  const c10::cuda::CUDAGuard guard(list.device);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const bool capturing = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  std::shared_ptr<const Plan> plan;
  if (capturing) {
    plan = captured_plan(list, stream);
  } else {
    if (!list.plan || list.plan_stream != static_cast<int64_t>(stream.id())) {
      list.plan = cached_plan(list, stream);
      list.plan_stream = static_cast<int64_t>(stream.id());
    }
    plan = std::static_pointer_cast<const Plan>(list.plan);
  }
  if (reduce) {
    core::ReduceParams params = *reduce;
    params.list = plan->view;
    check_launch(core::multi_tensor_reduce(params, stream), op);
  }
  if (!update) return;
  core::UpdateParams params = *update;
  params.list = plan->view;
  const int64_t count = static_cast<int64_t>(groups.size());
  int64_t first = 0;
  do {
    const int64_t now = std::min<int64_t>(count - first, core::kMaxGroups);
    params.first_group = static_cast<int32_t>(first);
    params.num_groups = static_cast<int32_t>(now);
    for (int64_t i = 0; i < now; ++i) params.groups[i] = groups[first + i];
    first += now;
    params.write_counter = update->write_counter && first >= count;
    check_launch(core::multi_tensor_update(params, stream), op);
  } while (first < count);
}

}  // namespace torch_fastdet::multi_tensor
