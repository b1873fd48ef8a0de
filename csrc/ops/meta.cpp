// Register the shapes, dtypes and memory formats of every operator: each family's run.h with nothing to run.
#include "ops/bn_act/run.h"
#include "ops/boxes/run.h"
#include "ops/deformable_attention/run.h"
#include "ops/image/run.h"
#include "ops/jpeg/run.h"
#include "ops/linear_assignment/run.h"
#include "ops/masks/run.h"
#include "ops/metrics/run.h"
#include "ops/multi_tensor/run.h"
#include "ops/nms/run.h"
#include "ops/pool/run.h"
#include "ops/rtdetr_loss/run.h"
#include "ops/slices/run.h"
#include "ops/softmax/run.h"
#include "ops/space_to_depth/run.h"
#include "ops/stem_conv/run.h"
#include "ops/upsample/run.h"
#include "ops/v8_loss/run.h"
#include "ops/yolov5_loss/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  using torch_fastdet::Meta;
  torch_fastdet::register_bn_act<Meta>(m);
  torch_fastdet::register_boxes<Meta>(m);
  torch_fastdet::register_deformable_attention<Meta>(m);
  torch_fastdet::register_image<Meta>(m);
  torch_fastdet::register_jpeg<Meta>(m);
  torch_fastdet::register_linear_assignment<Meta>(m);
  torch_fastdet::register_masks<Meta>(m);
  torch_fastdet::register_metrics<Meta>(m);
  torch_fastdet::multi_tensor::register_multi_tensor<Meta>(m);
  torch_fastdet::register_nms<Meta>(m);
  torch_fastdet::register_pool<Meta>(m);
  torch_fastdet::register_rtdetr_loss<Meta>(m);
  torch_fastdet::register_slices<Meta>(m);
  torch_fastdet::register_softmax<Meta>(m);
  torch_fastdet::register_space_to_depth<Meta>(m);
  torch_fastdet::register_stem_conv<Meta>(m);
  torch_fastdet::register_upsample<Meta>(m);
  torch_fastdet::register_v8_loss<Meta>(m);
  torch_fastdet::register_yolov5_loss<Meta>(m);
}
