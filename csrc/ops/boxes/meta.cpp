// Shapes and dtypes of bbox_iou and iou_loss.
#include "ops/boxes/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_boxes<torch_fastdet::Meta>(m);
}
