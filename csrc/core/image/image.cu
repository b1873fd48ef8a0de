// Augment, letterbox or resize a batch with one launch each.
#include <cuda_fp16.h>

#include <type_traits>

#include "core/image/augment_math.h"

namespace torch_fastdet::core {

namespace {

// A block fills a tile of the output. A thread owns one column of it and processes every kTileGroups-th row. Lanes of a
// warp are neighbours in a row, so that they read neighbouring source pixels and write whole sectors.
constexpr int kTileWidth = 64;
constexpr int kTileHeight = 32;
constexpr int kThreads = 256;
constexpr int kTileGroups = kThreads / kTileWidth;
// At least this many blocks of augment_kernel share a multiprocessor, which limits a thread to 40 registers. A batch of
// 64 of 640 x 640 takes 0.375 ms on an H200 (mosaic, affine, HSV, flip), 0.42 without the bound, 0.43 to 0.46 in tiles
// of 128 x 32, 32 x 32 or 64 x 16.
constexpr int kAugmentBlocks = 6;

template <typename T>
__device__ __forceinline__ T batch_value(int level, bool reciprocal);
template <>
__device__ __forceinline__ uint8_t batch_value<uint8_t>(int level, bool) {
  return static_cast<uint8_t>(level);
}
template <>
__device__ __forceinline__ __half batch_value<__half>(int level, bool reciprocal) {
  return __float2half_rn(normalised(level, reciprocal));
}
template <>
__device__ __forceinline__ float batch_value<float>(int level, bool reciprocal) {
  return normalised(level, reciprocal);
}

template <typename T, int kChannels>
__device__ __forceinline__ void store_pixel(const BatchOut& out, int64_t n, int y, int x, const Pixel<kChannels>& pixel,
                                            bool keep_bgr) {
  T* data = static_cast<T*>(out.data);
  for (int c = 0; c < kChannels; ++c) {
    const int from = keep_bgr ? c : kChannels - 1 - c;
    data[batch_index(out, n, c, y, x)] = batch_value<T>(pixel.v[from], out.reciprocal);
  }
}

// Hold the coordinates of the tile's columns and rows in a layer's canvas, for fixed-point affine maps, which add them.
struct TileCoordinates {
  int column_x[kTileWidth], column_y[kTileWidth];
  int row_x[kTileHeight], row_y[kTileHeight];
};

struct AugmentTile {
  Layer layer[2];
  TileCoordinates coordinates[2];
  ColorTables colors;
};

template <int kChannels>
__device__ __forceinline__ Pixel<kChannels> sample(const AugmentParams& p, const AugmentTile& tile, int which, int x,
                                                   int y, int column, int row) {
  const Layer& layer = tile.layer[which];
  if (layer.warp == WarpKind::kNone) return load_pixel<kChannels>(canvas_pixel(layer, x, y, kChannels));
  if (p.arithmetic == WarpArithmetic::kFloat) {
    return sample_float<kChannels>(layer, float_line(layer.map, layer.warp, y).at(x));
  }
  if (layer.warp == WarpKind::kPerspective) {
    const int block = perspective_block(p.out.width, p.out.height);
    return sample_fixed<kChannels>(layer, perspective_point(layer.map, x, y, block));
  }
  const TileCoordinates& c = tile.coordinates[which];
  return sample_fixed<kChannels>(layer, {affine_coordinate(c.column_x[column], c.row_x[row]),
                                         affine_coordinate(c.column_y[column], c.row_y[row])});
}

// Read the heads of the layers before the caller's barrier; read_layers_rest() reads the rest after it.
__device__ __forceinline__ void read_layers(const AugmentParams& p, AugmentTile& tile, const int64_t (&index)[2]) {
  if (threadIdx.x < 2) read_layer_head(p, index[threadIdx.x], tile.layer[threadIdx.x]);
}

__device__ __forceinline__ void read_layers_rest(const AugmentParams& p, AugmentTile& tile, const int64_t (&index)[2]) {
  const int which = static_cast<int>(threadIdx.x) / 64, i = static_cast<int>(threadIdx.x) % 64;
  if (which > 1) return;
  Layer& layer = tile.layer[which];
  if (i < layer.count) layer.patch[i] = read_layer_patch(p, index[which], layer, i);
  if (i == 32 && layer.warp != WarpKind::kNone) layer.map = read_layer_map(p, index[which], layer);
}

__device__ __forceinline__ void fill_coordinates(AugmentTile& tile, int which, int x0, int y0) {
  const Layer& layer = tile.layer[which];
  if (layer.warp != WarpKind::kAffine) return;
  TileCoordinates& c = tile.coordinates[which];
  const int i = static_cast<int>(threadIdx.x);
  const double* m = layer.map.m;
  if (i < kTileWidth) {
    c.column_x[i] = affine_column(m[0], x0 + i);
    c.column_y[i] = affine_column(m[3], x0 + i);
  } else if (i < kTileWidth + kTileHeight) {
    const int row = i - kTileWidth;
    c.row_x[row] = affine_row(m[1], m[2], y0 + row);
    c.row_y[row] = affine_row(m[4], m[5], y0 + row);
  }
}

template <typename T, int kChannels>
__global__ void __launch_bounds__(kThreads, kAugmentBlocks) augment_kernel(const __grid_constant__ AugmentParams p) {
  __shared__ AugmentTile tile;
  const int64_t n = blockIdx.z;
  const int64_t* image = p.images + n * kImageColumns;
  const int64_t index[2] = {image[0], image[1]};
  const int flags = static_cast<int>(image[2]);
  const int64_t table = image[3];
  const bool mixed = index[1] >= 0 && p.blend;
  const bool recolored = kChannels == 3 && p.tables && table >= 0 && table < p.table_rows;
  const int x0 = static_cast<int>(blockIdx.x) * kTileWidth, y0 = static_cast<int>(blockIdx.y) * kTileHeight;
  read_layers(p, tile, index);
  if (recolored) fill_color_tables(tile.colors, p.tables + table * 768, static_cast<int>(threadIdx.x));
  __syncthreads();
  read_layers_rest(p, tile, index);
  __syncthreads();
  fill_coordinates(tile, 0, x0, y0);
  if (mixed) fill_coordinates(tile, 1, x0, y0);
  __syncthreads();

  const int column = static_cast<int>(threadIdx.x) % kTileWidth, x = x0 + column;
  if (x >= p.out.width) return;
  const double r = mixed ? p.blend[n] : 0, rest = sub_rn(1., r);
  // OpenCV's vector code converts these columns.
  const int truncated = p.hsv_lanes > 0 ? p.out.width / p.hsv_lanes * p.hsv_lanes : 0;
  const int out_x = flags & kFlipLeftRight ? p.out.width - 1 - x : x;
  for (int row = static_cast<int>(threadIdx.x) / kTileWidth; row < kTileHeight; row += kTileGroups) {
    const int y = y0 + row;
    if (y >= p.out.height) break;
    Pixel<kChannels> pixel = sample<kChannels>(p, tile, 0, x, y, column, row);
    if (mixed) {
      const Pixel<kChannels> second = sample<kChannels>(p, tile, 1, x, y, column, row);
      for (int c = 0; c < kChannels; ++c) pixel.v[c] = mix(pixel.v[c], second.v[c], r, rest);
    }
    if (recolored) pixel = recolor(tile.colors, pixel, x >= truncated);
    store_pixel<T, kChannels>(p.out, n, flags & kFlipUpDown ? p.out.height - 1 - y : y, out_x, pixel, flags & kKeepBgr);
  }
}

template <int kChannels>
__device__ __forceinline__ Pixel<kChannels> resized_pixel(const uint8_t* source, int64_t pitch, const Resize& resize,
                                                          int x, int y) {
  Pixel<kChannels> pixel;
  for (int c = 0; c < kChannels; ++c) {
    pixel.v[c] = resized_level(resize, x, y, [&](int i, int j) {
      return static_cast<int>(source[j * pitch + static_cast<int64_t>(i) * kChannels + c]);
    });
  }
  return pixel;
}

template <typename T, int kChannels>
__global__ void __launch_bounds__(kThreads) letterbox_kernel(const __grid_constant__ LetterboxParams p) {
  __shared__ LetterboxJob job;
  const int64_t n = blockIdx.z;
  if (threadIdx.x == 0) job = read_letterbox_job(p, n);
  __syncthreads();
  const int x = static_cast<int>(blockIdx.x) * kTileWidth + static_cast<int>(threadIdx.x) % kTileWidth;
  const int y0 = static_cast<int>(blockIdx.y) * kTileHeight;
  if (x >= p.out.width) return;
  for (int row = static_cast<int>(threadIdx.x) / kTileWidth; row < kTileHeight; row += kTileGroups) {
    const int y = y0 + row;
    if (y >= p.out.height) break;
    const Pixel<kChannels> pixel =
        job.holds(x, y) ? resized_pixel<kChannels>(job.source, job.pitch, job.resize, x - job.left, y - job.top)
                        : border_pixel<kChannels>();
    store_pixel<T, kChannels>(p.out, n, y, x, pixel, p.keep_bgr);
  }
}

// Only the device knows the sizes, so this many blocks share the tiles of each image.
constexpr int kResizeBlocks = 128;

template <int kChannels>
__global__ void __launch_bounds__(kThreads) resize_kernel(const __grid_constant__ ResizeParams p) {
  __shared__ ResizeJob job;
  if (threadIdx.x == 0) job = read_resize_job(p, blockIdx.y);
  __syncthreads();
  if (!job.source) return;
  const int width = job.resize.x.target, height = job.resize.y.target;
  const int tiles_x = (width + kTileWidth - 1) / kTileWidth;
  const int64_t tiles = static_cast<int64_t>(tiles_x) * ((height + kTileHeight - 1) / kTileHeight);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += kResizeBlocks) {
    const int x = static_cast<int>(tile % tiles_x) * kTileWidth + static_cast<int>(threadIdx.x) % kTileWidth;
    const int y0 = static_cast<int>(tile / tiles_x) * kTileHeight;
    if (x >= width) continue;
    for (int row = static_cast<int>(threadIdx.x) / kTileWidth; row < kTileHeight; row += kTileGroups) {
      const int y = y0 + row;
      if (y >= height) break;
      const Pixel<kChannels> pixel = resized_pixel<kChannels>(job.source, job.pitch, job.resize, x, y);
      uint8_t* out = job.out + (static_cast<int64_t>(y) * width + x) * kChannels;
      for (int c = 0; c < kChannels; ++c) out[c] = static_cast<uint8_t>(pixel.v[c]);
    }
  }
}

// Call f(element of the batch, number of channels) with the types that `out` specifies.
template <typename F>
void with_batch_type(const BatchOut& out, F&& f) {
  const auto with_channels = [&](auto zero) {
    return out.channels == 1 ? f(zero, std::integral_constant<int, 1>()) : f(zero, std::integral_constant<int, 3>());
  };
  if (out.type == PixelType::kUint8) return with_channels(uint8_t{});
  return out.type == PixelType::kFloat16 ? with_channels(__half{}) : with_channels(float{});
}

// A grid has at most 65,535 blocks along z and y, so larger batches take several launches.
constexpr int64_t kMostImages = 65535;

// Call f(params of the part, grid, its first image, element, channels), which launches the kernel, for each part.
template <typename Params, typename F>
cudaError_t launch_parts(const Params& params, F&& f) {
  const BatchOut& out = params.out;
  const int64_t element = out.type == PixelType::kUint8 ? 1 : out.type == PixelType::kFloat16 ? 2 : 4;
  const int64_t bytes = element * out.channels * out.height * out.width;
  if (bytes == 0) return cudaSuccess;
  for (int64_t first = 0; first < out.batch; first += kMostImages) {
    Params p = params;
    p.out.data = static_cast<char*>(out.data) + first * bytes;
    p.out.batch = lesser(kMostImages, out.batch - first);
    const dim3 grid((out.width + kTileWidth - 1) / kTileWidth, (out.height + kTileHeight - 1) / kTileHeight,
                    static_cast<unsigned>(p.out.batch));
    with_batch_type(out, [&](auto zero, auto channels) { f(p, grid, first, zero, channels); });
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_image_augment(const AugmentParams& params, cudaStream_t stream) {
  return launch_parts(params, [&](AugmentParams& p, dim3 grid, int64_t first, auto zero, auto channels) {
    p.images += first * kImageColumns;
    if (p.blend) p.blend += first;
    augment_kernel<decltype(zero), decltype(channels)::value><<<grid, kThreads, 0, stream>>>(p);
  });
}

cudaError_t launch_image_letterbox(const LetterboxParams& params, cudaStream_t stream) {
  return launch_parts(params, [&](LetterboxParams& p, dim3 grid, int64_t first, auto zero, auto channels) {
    p.plan += first * kLetterboxColumns;
    letterbox_kernel<decltype(zero), decltype(channels)::value><<<grid, kThreads, 0, stream>>>(p);
  });
}

cudaError_t launch_image_resize(const ResizeParams& params, cudaStream_t stream) {
  for (int64_t first = 0; first < params.images; first += kMostImages) {
    ResizeParams p = params;
    p.plan += first * kResizeColumns;
    p.images = lesser(kMostImages, params.images - first);
    const dim3 grid(kResizeBlocks, static_cast<unsigned>(p.images));
    p.channels == 1 ? resize_kernel<1><<<grid, kThreads, 0, stream>>>(p)
                    : resize_kernel<3><<<grid, kThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace torch_fastdet::core
