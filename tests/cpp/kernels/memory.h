// Provide device memory for the tests. It is exactly as large as requested, so that AddressSanitizer sees every access
// past it, and full of a pattern, so that a test sees what was written beside a tensor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "core/common/cpu_types.h"
#include "core/common/storage.h"
#include "half.h"

namespace torch_fastdet::core {

inline int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Return the type in which values of this type are computed.
constexpr DType arithmetic_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline double load_as(DType dtype, const void* at) {
  return with_dtype<Halves>(dtype, [&](auto zero) {
    using T = decltype(zero);
    return static_cast<double>(static_cast<arithmetic_t<T>>(*static_cast<const T*>(at)));
  });
}

// Values of half types are rounded once, from float.
inline void store_as(DType dtype, void* at, double value) {
  with_dtype<Halves>(dtype, [&](auto zero) {
    using T = decltype(zero);
    *static_cast<T*>(at) = static_cast<T>(static_cast<arithmetic_t<T>>(value));
  });
}

inline double rounded(DType dtype, double value) {
  double bits = 0;
  store_as(dtype, &bits, value);
  return load_as(dtype, &bits);
}

// Return whether the bits are equal, or both are NaN.
inline bool identical(double a, double b) {
  return a == b ? std::signbit(a) == std::signbit(b) : a != a && b != b;
}

class Memory {
 public:
  explicit Memory(size_t bytes) : size_(bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes)) throw std::bad_alloc();
    bytes_.reset(static_cast<char*>(memory));
    std::memset(data(), 0x5a, bytes);
  }
  char* data() const { return bytes_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<char, decltype(&std::free)> bytes_{nullptr, std::free};
  size_t size_;
};

// A tensor has a type and strides (in elements), and begins `offset` elements into its storage.
class Tensor {
 public:
  Tensor(DType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t offset = 0)
      : dtype(dtype), sizes(std::move(sizes)), strides(std::move(strides)), offset_(offset), memory_(bytes()) {}
  Tensor(DType dtype, std::vector<int64_t> sizes, int64_t offset = 0) : Tensor(dtype, sizes, dense(sizes), offset) {}

  static std::vector<int64_t> dense(const std::vector<int64_t>& sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
    return strides;
  }
  int64_t numel() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }
  // Return the address of an element in logical order.
  void* at(int64_t index) const {
    int64_t place = 0;
    for (size_t i = sizes.size(); i-- > 0;) {
      place += index % sizes[i] * strides[i];
      index /= sizes[i];
    }
    return static_cast<char*>(data()) + place * dtype_bytes(dtype);
  }
  void* data() const { return memory_.data() + offset_ * dtype_bytes(dtype); }
  double get(int64_t index) const { return load_as(dtype, at(index)); }
  void set(int64_t index, double value) { store_as(dtype, at(index), value); }
  std::vector<double> values() const {
    std::vector<double> all(numel());
    for (int64_t i = 0; i < numel(); ++i) all[i] = get(i);
    return all;
  }
  // Return whether no byte outside the elements was written.
  bool surroundings_intact() const {
    std::vector<char> inside(memory_.size(), 0);
    for (int64_t i = 0; i < numel(); ++i) {
      std::memset(inside.data() + (static_cast<char*>(at(i)) - memory_.data()), 1, dtype_bytes(dtype));
    }
    for (size_t i = 0; i < inside.size(); ++i) {
      if (!inside[i] && memory_.data()[i] != 0x5a) return false;
    }
    return true;
  }

  const DType dtype;
  const std::vector<int64_t> sizes, strides;

 private:
  size_t bytes() const {
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
    return (numel() ? offset_ + last + 1 : offset_) * dtype_bytes(dtype);
  }

  int64_t offset_;
  Memory memory_;
};

}  // namespace torch_fastdet::core
