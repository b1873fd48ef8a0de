// Plan how a 2x nearest upsample walks memory. One plan serves CPU loops and CUDA kernels, forward and backward.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace torch_fastdet::core {

// The small tensor is (N, C, H, W) and the large one (N, C, 2H, 2W); either may be a slice of a bigger buffer. Both are
// walked as extent[0] * extent[1] * extent[2] rows of `inner` neighbours, with strides in elements. For channels_last
// the extents are {N, H, W} and `inner` is C: a small element maps to large + {0, col, row, row + col}. Otherwise they
// are {N, C, H} and W: element w maps to large + 2 * w + {0, 1, row, row + 1}.
struct UpsamplePlan {
  int64_t extent[3];
  int64_t inner;
  int64_t small_stride[3];
  int64_t large_stride[3];  // between the top left corners of the 2x2 squares
  int64_t large_row;        // from an element of the large tensor to the one below it
  int64_t large_col;        // from an element of the large tensor to its right neighbour
  bool channels_last;

  int64_t small_numel() const { return extent[0] * extent[1] * extent[2] * inner; }
};

// Describe a copy in the same way: extent[0] * extent[1] * extent[2] rows of `inner` adjacent elements.
struct CopyPlan {
  int64_t extent[3];
  int64_t inner;
  int64_t src_stride[3];
  int64_t dst_stride[3];

  int64_t numel() const { return extent[0] * extent[1] * extent[2] * inner; }
};

// Return the order of (n, c, h, w) in a walk, innermost last.
inline const int* walk_order(bool channels_last) {
  static constexpr int kOrders[2][4] = {{0, 1, 2, 3}, {0, 2, 3, 1}};
  return kOrders[channels_last];
}

// `size` is the small tensor's; strides are (n, c, h, w). The inner dimension (C or W) has stride or length 1 in both.
inline UpsamplePlan make_upsample_plan(const int64_t size[4], const int64_t small[4], const int64_t large[4],
                                       bool channels_last) {
  UpsamplePlan plan{};
  plan.channels_last = channels_last;
  plan.large_row = large[2];
  plan.large_col = large[3];
  const int* order = walk_order(channels_last);
  for (int i = 0; i < 3; ++i) {
    const int d = order[i];
    plan.extent[i] = size[d];
    plan.small_stride[i] = small[d];
    plan.large_stride[i] = d >= 2 ? 2 * large[d] : large[d];  // h and w step over two elements
  }
  plan.inner = size[order[3]];
  return plan;
}

// `size`, `src` and `dst` are (n, c, h, w) sizes and strides, with the same condition on the inner dimension. Merge
// neighbouring dimensions that are dense in both tensors, to make rows as long and vectors as wide as possible.
inline CopyPlan make_copy_plan(const int64_t size[4], const int64_t src[4], const int64_t dst[4], bool channels_last) {
  const int* order = walk_order(channels_last);
  CopyPlan plan{{1, 1, 1}, size[order[3]], {0, 0, 0}, {0, 0, 0}};
  int next = 2;                                              // slot of the next outer dimension
  int64_t joined_src = plan.inner, joined_dst = plan.inner;  // strides at which that dimension is dense
  for (int i = 2; i >= 0; --i) {
    const int d = order[i];
    if (size[d] == 1) continue;
    if (src[d] == joined_src && dst[d] == joined_dst) {
      if (next == 2) {
        plan.inner *= size[d];
      } else {
        plan.extent[next + 1] *= size[d];
      }
    } else {
      plan.extent[next] = size[d];
      plan.src_stride[next] = src[d];
      plan.dst_stride[next] = dst[d];
      --next;
    }
    joined_src = src[d] * size[d];
    joined_dst = dst[d] * size[d];
  }
  return plan;
}

// Return the largest power of two, at most `limit`, that divides all of the numbers (all divide 0).
inline int64_t common_power_of_two(int64_t limit, std::initializer_list<int64_t> numbers) {
  for (const int64_t number : numbers) {
    while (limit > 1 && number % limit != 0) limit /= 2;
  }
  return limit;
}

// Count the elements that one access moves. For channels_last, `large` == `small`. Otherwise `small` elements map to 2
// * `small` elements in each of two rows, moved `large` at a time (1 only if not even pairs are aligned).
struct UpsampleVector {
  int small;
  int large;
};

// Return widths that divide all offsets: at most `max_bytes` of the small tensor (at address `small`), 16 of the large.
inline UpsampleVector upsample_vector(const UpsamplePlan& plan, uintptr_t small, uintptr_t large, int itemsize,
                                      int max_bytes) {
  const auto stride = [&plan](const int64_t* strides, int i) { return plan.extent[i] > 1 ? strides[i] : 0; };
  const int64_t* s = plan.small_stride;
  const int64_t* l = plan.large_stride;
  const auto address = [itemsize](uintptr_t value) { return static_cast<int64_t>(value / itemsize); };
  int64_t vector =
      common_power_of_two(max_bytes / itemsize, {plan.inner, address(small), stride(s, 0), stride(s, 1), stride(s, 2)});
  int64_t wanted = vector;
  if (!plan.channels_last) wanted = 2 * vector * itemsize > 16 ? 16 / itemsize : 2 * vector;
  const int64_t got =
      common_power_of_two(wanted, {address(large), plan.large_row, plan.channels_last ? plan.large_col : 0,
                                   stride(l, 0), stride(l, 1), stride(l, 2)});
  if (plan.channels_last) {
    vector = got;
  } else if (got < wanted) {
    vector = got > 1 ? got / 2 : 1;
  }
  return {static_cast<int>(vector), static_cast<int>(got)};
}

// Return the same for a copy, in bytes (at most 16).
inline int copy_access_bytes(const CopyPlan& plan, uintptr_t src, uintptr_t dst, int itemsize) {
  const auto stride = [&plan](const int64_t* strides, int i) { return plan.extent[i] > 1 ? strides[i] : 0; };
  const int64_t* s = plan.src_stride;
  const int64_t* d = plan.dst_stride;
  return itemsize *
         static_cast<int>(common_power_of_two(
             16 / itemsize, {plan.inner, static_cast<int64_t>(src / itemsize), static_cast<int64_t>(dst / itemsize),
                             stride(s, 0), stride(s, 1), stride(s, 2), stride(d, 0), stride(d, 1), stride(d, 2)}));
}

// Cut a four-dimensional index space, outer dimensions first, into blocks of max_count, as kernels count in 32 bits.
struct IndexBlocks {
  int64_t extent[4];
  int64_t block[4];   // size of every block but the last along a dimension
  int64_t blocks[4];  // number of blocks along a dimension

  IndexBlocks(int64_t e0, int64_t e1, int64_t e2, int64_t e3, int64_t max_count) : extent{e0, e1, e2, e3} {
    for (int i = 3; i >= 0; --i) {
      const bool empty = extent[i] == 0;
      block[i] = extent[i] < max_count ? extent[i] : max_count;
      blocks[i] = empty ? 0 : (extent[i] + block[i] - 1) / block[i];
      // Once a dimension is cut, the dimensions outside it get one index a block.
      max_count = empty ? max_count : (blocks[i] > 1 ? 1 : max_count / block[i]);
    }
  }

  int64_t count() const { return blocks[0] * blocks[1] * blocks[2] * blocks[3]; }

  void get(int64_t k, int64_t begin[4], int64_t size[4]) const {
    for (int i = 3; i >= 0; --i) {
      begin[i] = k % blocks[i] * block[i];
      k /= blocks[i];
      const int64_t left = extent[i] - begin[i];
      size[i] = left < block[i] ? left : block[i];
    }
  }
};

}  // namespace torch_fastdet::core
