// Compute a sampled point: the four pixels around it, their shares, and the gradients of its location and weight.
#pragma once

#include <cmath>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

// Hold the pixel at the top left of a point, and the point's distance from it. Pixels outside count as 0.
template <typename A>
struct DeformableTap {
  int x, y;
  A right, down;

  // Return the share of pixel `corner`: 0 is top left, 1 top right, 2 bottom left, 3 bottom right.
  TORCH_FASTDET_HOST_DEVICE A share(int corner) const {
    return (corner & 1 ? right : 1 - right) * (corner & 2 ? down : 1 - down);
  }
  TORCH_FASTDET_HOST_DEVICE int corner_x(int corner) const { return x + (corner & 1); }
  TORCH_FASTDET_HOST_DEVICE int corner_y(int corner) const { return y + (corner >> 1); }
};

TORCH_FASTDET_HOST_DEVICE bool deformable_inside(int x, int y, int width, int height) {
  return x >= 0 && y >= 0 && x < width && y < height;
}

// Locate the point at x, y, relative to width and height. A location that is NaN or infinite lies outside.
template <typename A>
TORCH_FASTDET_HOST_DEVICE DeformableTap<A> deformable_tap(A x, A y, int width, int height) {
  using std::floor, std::fmax, std::fmin;
  x = fmin(fmax(x * A(width) - A(0.5), A(-2)), A(width) + 1);
  y = fmin(fmax(y * A(height) - A(0.5), A(-2)), A(height) + 1);
  const A left = floor(x), top = floor(y);
  return {static_cast<int>(left), static_cast<int>(top), x - left, y - top};
}

template <typename A>
struct DeformableGradients {
  A weight, x, y;
};

// Compute them from the output gradient's products with each of the four pixels, over all channels or some.
template <typename A>
TORCH_FASTDET_HOST_DEVICE DeformableGradients<A> deformable_gradients(const DeformableTap<A>& tap,
                                                                      const A (&products)[4], A weight, int width,
                                                                      int height) {
  const A top = (1 - tap.right) * products[0] + tap.right * products[1];
  const A bottom = (1 - tap.right) * products[2] + tap.right * products[3];
  const A left = (1 - tap.down) * products[0] + tap.down * products[2];
  const A right = (1 - tap.down) * products[1] + tap.down * products[3];
  return {(1 - tap.down) * top + tap.down * bottom, (right - left) * weight * A(width),
          (bottom - top) * weight * A(height)};
}

}  // namespace torch_fastdet::core
