// Check the image operators' tables on the CPU, row by row. The GPU ignores rows that fail here.
#pragma once

#include <c10/util/Exception.h>

#include "core/image/image_tables.h"

namespace torch_fastdet {

inline void check_image(const core::Storages& storages, const int64_t* row, int64_t pitch, int64_t row_bytes,
                        const char* op, const char* table, int64_t index) {
  TORCH_CHECK(row[0] >= 0 && row[0] < storages.count, op, ": ", table, "[", index, "] names storage ", row[0],
              ", but storages has ", storages.count);
  TORCH_CHECK(core::image_bytes(storages, row[0], row[1], row[2], row_bytes, pitch), op, ": ", table, "[", index,
              "] is an image of ", row[2], " rows of ", row_bytes, " bytes, ", pitch, " apart, at offset ", row[1],
              ", which does not lie within the ", storages.size[row[0]], " bytes of storages[", row[0], "]");
}

// Return the bytes of a row of pixels, or 0 if the table's width is invalid.
inline int64_t row_bytes(int64_t width, int64_t channels) {
  return width > 0 && width <= core::kMaxSide ? width * channels : 0;
}

inline void check_target(int64_t height, int64_t width, const char* op, int64_t index) {
  TORCH_CHECK(core::is_side(height) && core::is_side(width), op, ": plan[", index, "] asks for ", height, " x ", width,
              " pixels, but sides from 1 to ", core::kMaxSide, " are expected");
}

inline void check_interpolation(int64_t interpolation, const char* op, int64_t index) {
  TORCH_CHECK(interpolation == 0 || interpolation == 1, op, ": plan[", index, "] has interpolation ", interpolation,
              ", but 0 (linear) or 1 (area) is expected");
}

inline void check_layer(const core::AugmentParams& p, int64_t index, const char* op) {
  const int64_t* row = p.layers + index * core::kLayerColumns;
  TORCH_CHECK(row[1] >= 0 && row[1] <= core::kMaxPlacements && row[0] >= 0 && row[0] <= p.placement_rows - row[1], op,
              ": layers[", index, "] has ", row[1], " placements from ", row[0], " on, but at most ",
              core::kMaxPlacements, " of ", p.placement_rows, " are expected");
  TORCH_CHECK(row[2] >= 0 && row[3] >= 0 && row[2] <= core::kMaxCanvas && row[3] <= core::kMaxCanvas, op, ": layers[",
              index, "] has a canvas of ", row[2], " x ", row[3], " pixels, but sides up to ", core::kMaxCanvas,
              " are expected");
  TORCH_CHECK(row[4] >= 0 && row[4] <= 2, op, ": layers[", index, "] has warp ", row[4],
              ", but 0 (none), 1 (affine) or 2 (perspective) is expected");
  TORCH_CHECK(row[5] == -1 || (row[5] >= 0 && row[5] <= p.mask_bytes && row[2] * row[3] <= p.mask_bytes - row[5]), op,
              ": layers[", index, "] has a mask of ", row[2] * row[3], " bytes at ", row[5], ", but masks has ",
              p.mask_bytes);
}

inline void check_rows(const core::AugmentParams& p, const char* op) {
  for (int64_t i = 0; i < p.placement_rows; ++i) {
    const int64_t* row = p.placements + i * core::kPlacementColumns;
    const int64_t bytes = row_bytes(row[3], p.out.channels);
    check_image(p.storages, row, bytes, bytes, op, "placements", i);
    for (int column = 4; column < core::kPlacementColumns; ++column) {
      TORCH_CHECK(row[column] >= -core::kMaxSide && row[column] <= core::kMaxSide, op, ": placements[", i, "][", column,
                  "] is ", row[column], ", but at most ", core::kMaxSide, " either way is expected");
    }
  }
  for (int64_t i = 0; i < p.layer_rows; ++i) check_layer(p, i, op);
  for (int64_t i = 0; i < p.out.batch; ++i) {
    const int64_t* row = p.images + i * core::kImageColumns;
    TORCH_CHECK(row[0] >= 0 && row[0] < p.layer_rows, op, ": images[", i, "] names layer ", row[0], ", but layers has ",
                p.layer_rows, " rows");
    TORCH_CHECK(row[1] >= -1 && row[1] < p.layer_rows, op, ": images[", i, "] names second layer ", row[1],
                ", but layers has ", p.layer_rows, " rows");
    TORCH_CHECK(row[1] < 0 || p.blend, op, ": images[", i, "] has a second layer, but there is no blend");
    TORCH_CHECK(row[3] >= -1 && row[3] < p.table_rows, op, ": images[", i, "] names row ", row[3],
                " of tables, but there are ", p.table_rows);
  }
}

inline void check_rows(const core::LetterboxParams& p, const char* op) {
  for (int64_t i = 0; i < p.out.batch; ++i) {
    const int64_t* row = p.plan + i * core::kLetterboxColumns;
    check_image(p.storages, row, row[4], row_bytes(row[3], p.out.channels), op, "plan", i);
    check_target(row[5], row[6], op, i);
    check_interpolation(row[9], op, i);
    TORCH_CHECK(std::abs(row[7]) <= core::kMaxSide && std::abs(row[8]) <= core::kMaxSide, op, ": plan[", i,
                "] has top ", row[7], " and left ", row[8], ", but at most ", core::kMaxSide,
                " either way is expected");
  }
}

inline void check_rows(const core::ResizeParams& p, const char* op) {
  for (int64_t i = 0; i < p.images; ++i) {
    const int64_t* row = p.plan + i * core::kResizeColumns;
    const int64_t bytes = row_bytes(row[3], p.channels);
    check_image(p.storages, row, bytes, bytes, op, "plan", i);
    check_target(row[5], row[6], op, i);
    check_interpolation(row[7], op, i);
    TORCH_CHECK(row[4] >= 0 && row[4] <= p.out_bytes && row[5] <= (p.out_bytes - row[4]) / (row[6] * p.channels), op,
                ": plan[", i, "] writes ", row[5] * row[6] * p.channels, " bytes at ", row[4], ", but out has ",
                p.out_bytes);
  }
}

inline void check_piece(const core::Storages& storages, const int64_t* row, int64_t out_bytes, const char* op,
                        int64_t index) {
  TORCH_CHECK(row[0] >= 0 && row[0] < storages.count, op, ": pieces[", index, "] names storage ", row[0],
              ", but storages has ", storages.count);
  const int64_t size = storages.size[row[0]];
  TORCH_CHECK(row[1] >= 0 && row[1] <= size && row[2] >= 0 && row[2] <= size - row[1], op, ": pieces[", index, "] is ",
              row[2], " bytes at ", row[1], ", which do not lie within the ", size, " bytes of storages[", row[0], "]");
  TORCH_CHECK(row[3] >= 0 && row[3] <= out_bytes && row[2] <= out_bytes - row[3], op, ": pieces[", index, "] writes ",
              row[2], " bytes at ", row[3], ", but out has ", out_bytes);
}

}  // namespace torch_fastdet
