// Sort each image's keys into runs of one tile, and merge the runs if a later block cannot merge them all.
#include <cub/block/block_merge_sort.cuh>

#include "core/nms/nms_device.cuh"

namespace torch_fastdet::core {

namespace {

constexpr int kSortThreads = 512;

struct Less {
  template <typename Key>
  __device__ __forceinline__ bool operator()(const Key& a, const Key& b) const {
    return a < b;
  }
};

template <typename Key, int kItems>
__device__ __forceinline__ void sort_tile(Key* keys, int count, unsigned char* shared) {
  using Sort = cub::BlockMergeSort<Key, kSortThreads, kItems>;
  Key mine[kItems];
  const int first = threadIdx.x * kItems;
#pragma unroll
  for (int i = 0; i < kItems; ++i) mine[i] = first + i < count ? keys[first + i] : ~Key(0);
  Sort(*reinterpret_cast<typename Sort::TempStorage*>(shared)).Sort(mine, Less{});
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i < count) keys[first + i] = mine[i];
  }
}

template <typename A>
__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ NmsKernel p) {
  using Key = key_of<A>;
  constexpr int kTile = Keys<A>::kTile, kItems = kTile / kSortThreads;
  __shared__ alignas(
      16) unsigned char shared[sizeof(typename cub::BlockMergeSort<Key, kSortThreads, kItems>::TempStorage)];
  const int64_t image = blockIdx.y;
  const int64_t total = p.buffered(image), start = static_cast<int64_t>(blockIdx.x) * kTile;
  if (start >= total || (p.sorts_small && total <= kSelfSorted)) return;
  Key* keys = p.at<Key>(p.keys) + image * p.capacity + start;
  const int count = total - start < kTile ? static_cast<int>(total - start) : kTile;
  if (count <= kSortThreads) {
    sort_tile<Key, 1>(keys, count, shared);
  } else if (count <= kSortThreads * (kItems / 2)) {
    sort_tile<Key, kItems / 2>(keys, count, shared);
  } else {
    sort_tile<Key, kItems>(keys, count, shared);
  }
}

// Merge neighbouring runs of `length` keys. Each key finds its place in the other run of its pair.
template <typename Key>
__global__ void __launch_bounds__(256)
    merge_kernel(const __grid_constant__ NmsKernel p, const Key* from, Key* to, int64_t length) {
  const int64_t image = blockIdx.y;
  const int64_t total = p.buffered(image);
  from += image * p.capacity;
  to += image * p.capacity;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t pair = i / (2 * length) * (2 * length), middle = pair + length;
    const bool second = i >= middle;
    int64_t low = second ? pair : (middle < total ? middle : total);
    int64_t high = second ? middle : (middle + length < total ? middle + length : total);
    const int64_t sibling = low;
    const Key key = from[i];
    while (low < high) {
      const int64_t half = (low + high) / 2;
      if (from[half] < key) {
        low = half + 1;
      } else {
        high = half;
      }
    }
    to[(second ? i - length : i) + (low - sibling)] = key;
  }
}

template <typename A>
cudaError_t launch(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  using Key = key_of<A>;
  const dim3 tiles(static_cast<unsigned>(plan.runs), static_cast<unsigned>(plan.images));
  sort_kernel<A><<<tiles, kSortThreads, 0, stream>>>(kernel);
  Key* from = reinterpret_cast<Key*>(kernel.workspace + plan.keys);
  Key* to = reinterpret_cast<Key*>(kernel.workspace + plan.other_keys);
  int64_t length = plan.tile;
  for (int64_t pass = 0; pass < plan.merges; ++pass, length *= 2) {
    const int64_t blocks = ceil_div(plan.capacity, 1024);
    merge_kernel<Key><<<dim3(static_cast<unsigned>(blocks), tiles.y), 256, 0, stream>>>(kernel, from, to, length);
    Key* swap = from;
    from = to;
    to = swap;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sort(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  return kernel.source.dtype == DType::kFloat64 ? launch<double>(kernel, plan, stream)
                                                : launch<float>(kernel, plan, stream);
}

}  // namespace torch_fastdet::core
