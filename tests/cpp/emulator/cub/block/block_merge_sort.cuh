// This is cub::BlockMergeSort for the emulator. It sorts a block's keys, in a blocked arrangement of kItems per thread,
// in place. It is not stable, which Sort() does not promise.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cub {

template <typename Key, int kThreads, int kItems>
class BlockMergeSort {
 public:
  // The storage is as large as cub's own: all keys and one more.
  struct TempStorage {
    Key keys[kThreads * kItems + 1];
  };

  explicit BlockMergeSort(TempStorage& storage) : keys_(storage.keys) {}

  template <typename Compare>
  void Sort(Key (&mine)[kItems], Compare compare) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = 0; i < kItems; ++i) keys_[thread * kItems + i] = mine[i];
    __syncthreads();
    if (thread == 0) std::sort(keys_, keys_ + kThreads * kItems, compare);
    __syncthreads();
    for (int i = 0; i < kItems; ++i) mine[i] = keys_[thread * kItems + i];
  }

 private:
  Key* keys_;
};

}  // namespace cub
