// Shapes and dtypes of yolov5_loss and its backward.
#include "ops/yolov5_loss/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_yolov5_loss<torch_fastdet::Meta>(m);
}
