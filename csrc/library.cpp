// This is the contract: every operator's schema. Kernels register in ops/<family>/.
#include <torch/library.h>

TORCH_LIBRARY(torch_fastdet, m) {
  // Layers: the cat form concatenates upsample_nearest2x(x) and skip along the channels.
  m.def("upsample_nearest2x(Tensor x) -> Tensor");
  m.def("upsample_nearest2x_backward(Tensor grad_output) -> Tensor");
  m.def("upsample_nearest2x_cat(Tensor x, Tensor skip) -> Tensor");

  // Turn 2x2 squares of pixels into channels (channels_last), zero-padded; border adds a first row and column of zeros.
  m.def("space_to_depth(Tensor x, int channels, bool border=False, ScalarType? dtype=None) -> Tensor");
  m.def(
      "space_to_depth_backward(Tensor grad_output, int channels, bool border=False, ScalarType? dtype=None) -> Tensor");

  // Convolve such squares with stride 1: 3x3 with a padding of 1, or 2x2 without. Squares have no gradient.
  m.def("stem_conv2d(Tensor squares, Tensor weight) -> Tensor");
  m.def("stem_conv2d_backward(Tensor grad_output, Tensor squares, int kernel_size) -> Tensor");

  // Pool the maximum with stride 1, without padding. indices are for the backward pass.
  m.def("max_pool(Tensor x, int kernel_size) -> (Tensor y, Tensor indices)");
  m.def("max_pool_backward(Tensor grad_y, Tensor indices, int kernel_size) -> Tensor");
  // Concatenate x and successive poolings of it, each of stride 1 and x's size. indices are for the backward pass.
  m.def("max_pools_cat(Tensor x, int kernel_size=5, int pools=3) -> (Tensor y, Tensor indices)");
  // Do the same without a gradient; the first channels of y are x.
  m.def("max_pools_(Tensor(a!) y, int kernel_size=5, int pools=3) -> ()");
  m.def("max_pools_cat_backward(Tensor grad_y, Tensor indices, int kernel_size=5, int pools=3) -> Tensor");

  // Apply BatchNorm2d in training and then the activation. mean and invstd are for the backward pass.
  m.def(
      "bn_act(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean=None, Tensor(b!)? running_var=None, "
      "Tensor(c!)? num_batches_tracked=None, float momentum=0.1, float eps=1e-05, str activation='silu', "
      "float slope=0.01, Tensor? residual=None) -> (Tensor y, Tensor mean, Tensor invstd)");
  // Compute cat([residual + act(batch_norm(x[0])), act(batch_norm(x[1])), ...], 1). Lists of statistics may be empty.
  m.def(
      "bn_act_cat(Tensor[] x, Tensor[] weight, Tensor[] bias, Tensor(a!)[] running_mean, Tensor(b!)[] running_var, "
      "Tensor(c!)[] num_batches_tracked, float momentum=0.1, float eps=1e-05, str activation='silu', "
      "float slope=0.01, Tensor? residual=None) -> (Tensor y, Tensor mean, Tensor invstd)");
  m.def(
      "bn_act_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
      "str activation, float slope) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  // Apply several norms to neighbouring channels of x and write to existing tensors. nn/joint.py has the autograd.
  m.def(
      "bn_act_parts(Tensor x, Tensor(a!)[] y, Tensor[] weight, Tensor[] bias, Tensor(b!)[] running_mean, "
      "Tensor(c!)[] running_var, Tensor(d!)[] num_batches_tracked, float momentum=0.1, float eps=1e-05, "
      "str activation='silu', float slope=0.01, Tensor? residual=None) -> (Tensor mean, Tensor invstd)");
  m.def(
      "bn_act_parts_backward(Tensor[] grad_y, Tensor x, Tensor[] weight, Tensor[] bias, Tensor mean, Tensor invstd, "
      "str activation, float slope) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  // Set y = residual + act(batch_norm(x) or x * weight + bias). y and last, a copy of the last channels, may be x.
  m.def(
      "bias_act(Tensor x, Tensor(a!) y, Tensor? weight, Tensor? bias, Tensor? mean=None, Tensor? variance=None, "
      "float eps=1e-05, str activation='silu', float slope=0.01, Tensor? residual=None, Tensor(b!)? last=None) -> ()");

  // Set out = x[0] + x[1] + ..., rounded after each addition, or copy x[0]. Tensors may be slices along the channels.
  m.def("sum_slices(Tensor[] x, Tensor(a!) out) -> ()");

  // Return x, channels_last and padded with zero channels, and each channel's sum, for a biased convolution's backward.
  m.def("pad_and_sum(Tensor x, int channels) -> (Tensor out, Tensor sums)");

  // Sum x (..., width) over all dimensions but the last, which gives the gradient of a linear layer's bias.
  m.def("sum_rows(Tensor x) -> Tensor");

  // Return the gradient of x in y = softmax(x, -1), of shape (N, rows, columns); grad_y may have any strides.
  m.def("softmax_backward(Tensor grad_y, Tensor y) -> Tensor");

  // Apply multi-scale deformable attention. shapes lists height and width of each level.
  m.def("deformable_attention(Tensor value, SymInt[] shapes, Tensor locations, Tensor weights) -> Tensor");
  m.def(
      "deformable_attention_backward(Tensor grad_output, Tensor value, SymInt[] shapes, Tensor locations, "
      "Tensor weights) -> (Tensor, Tensor, Tensor)");

  // Solve rectangular assignment problems. status reports those that cannot be solved.
  m.def("linear_assignment(Tensor cost, Tensor columns) -> (Tensor rows, Tensor status)");

  // Compute intersection over union of box pairs, and its loss.
  m.def(
      "bbox_iou(Tensor box1, Tensor box2, bool xywh=True, bool GIoU=False, bool DIoU=False, bool CIoU=False, "
      "float eps=1e-07) -> Tensor");
  m.def(
      "bbox_iou_backward(Tensor grad, Tensor box1, Tensor box2, str kind, bool xywh, float eps, bool[2] output_mask) "
      "-> (Tensor, Tensor)");
  m.def(
      "iou_loss(Tensor box1, Tensor box2, str kind='ciou', bool xywh=True, str reduction='mean', float eps=1e-07) "
      "-> Tensor");
  m.def(
      "iou_loss_backward(Tensor grad, Tensor box1, Tensor box2, str kind, bool xywh, str reduction, float eps, "
      "bool[2] output_mask) -> (Tensor, Tensor)");

  // Post-processing: letterboxes is (images, 6); per_class "offset" or "exact"; rotated "none", "fast" or "greedy".
  m.def("yolov5_decode(Tensor[] heads, Tensor anchors, float[] strides, int nm=0) -> Tensor");
  m.def(
      "non_max_suppression_padded(Tensor prediction, float conf_thres=0.25, float iou_thres=0.45, int[]? classes=None, "
      "bool agnostic=False, bool multi_label=False, int max_det=300, int nm=0, Tensor? labels=None, "
      "Tensor? letterboxes=None, str per_class=\"offset\", int max_nms=30000, float max_wh=7680.) "
      "-> (Tensor detections, Tensor counts)");
  m.def(
      "ultralytics_non_max_suppression_padded(Tensor prediction, float conf_thres=0.25, float iou_thres=0.45, "
      "int[]? classes=None, bool agnostic=False, bool multi_label=False, int max_det=300, int nc=0, "
      "Tensor? letterboxes=None, str per_class=\"offset\", int max_nms=30000, float max_wh=7680., "
      "str rotated=\"none\") "
      "-> (Tensor detections, Tensor counts, Tensor indices)");
  m.def(
      "yolov5_postprocess(Tensor[] heads, Tensor anchors, float[] strides, float conf_thres=0.25, "
      "float iou_thres=0.45, int[]? classes=None, bool agnostic=False, bool multi_label=False, int max_det=300, "
      "int nm=0, Tensor? letterboxes=None, str per_class=\"offset\", int max_nms=30000, float max_wh=7680.) "
      "-> (Tensor detections, Tensor counts)");
  m.def(
      "ultralytics_postprocess(Tensor[] boxes, Tensor[] scores, Tensor[] extra, float[] strides, "
      "float conf_thres=0.25, float iou_thres=0.45, int[]? classes=None, bool agnostic=False, bool multi_label=False, "
      "int max_det=300, Tensor? letterboxes=None, str per_class=\"offset\", int max_nms=30000, float max_wh=7680., "
      "str rotated=\"none\", str extra_kind=\"raw\") "
      "-> (Tensor detections, Tensor counts, Tensor indices)");
  m.def(
      "filter_detections(Tensor prediction, float conf_thres=0.25, int[]? classes=None, int max_det=300, "
      "Tensor? sizes=None, bool finite=False) -> (Tensor detections, Tensor counts, Tensor indices)");
  m.def("scale_boxes(Tensor boxes, Tensor letterboxes, bool xywh=False) -> Tensor");

  // Compute masks in a window (top, left, bottom, right) of enlarged prototypes. box_scale (x, y) precedes the crop.
  m.def(
      "instance_masks(Tensor protos, Tensor coefficients, Tensor boxes, SymInt[2] size, *, SymInt[4]? window=None, "
      "int factor=1, float[2] box_scale=[1., 1.], bool sigmoid=False, bool crop_first=False, bool packed=False, "
      "ScalarType? dtype=None) -> Tensor");
  m.def("crop_mask(Tensor masks, Tensor boxes) -> Tensor");
  m.def("crop_mask_(Tensor(a!) masks, Tensor boxes) -> ()");

  // Validation matches detections with labels. rule is "best" (YOLOv5) or "greedy" (Ultralytics).
  m.def(
      "match_detections(Tensor detections, Tensor labels, Tensor iouv, Tensor? counts=None, str rule=\"best\", "
      "Tensor? iou=None) -> Tensor");
  m.def(
      "confusion_matrix_(Tensor(a!) matrix, Tensor detections, Tensor labels, Tensor? counts=None, float conf=0.25, "
      "float iou_thres=0.45, str rule=\"best\", Tensor? iou=None) -> ()");

  // Compute YOLOv5's loss. cls_gain is not cls, since torch.compile passes keywords to a class method with its own cls.
  m.def(
      "yolov5_loss(Tensor[] heads, Tensor targets, Tensor anchors, Tensor balance, Tensor? num_targets=None, *, "
      "float box_gain=0.05, float obj_gain=1.0, float cls_gain=0.5, float cls_pw=1.0, float obj_pw=1.0, "
      "float label_smoothing=0.0, float fl_gamma=0.0, float anchor_t=4.0, float gr=1.0, bool sort_obj_iou=False) "
      "-> (Tensor loss, Tensor items, Tensor levels, Tensor owner, Tensor match_cell, Tensor match_values, "
      "Tensor object_gradient)");
  m.def(
      "yolov5_loss_backward(Tensor grad_loss, Tensor[] heads, Tensor targets, Tensor levels, Tensor owner, "
      "Tensor match_cell, Tensor match_values, Tensor object_gradient, *, float cls_pw=1.0, "
      "float label_smoothing=0.0, float fl_gamma=0.0) -> Tensor[]");

  // Run OpenCV's image operations on batches: packed uint8 HWC in 1-D storages, plans as tables (core/image/image.h).
  m.def(
      "image_augment(Tensor[] storages, Tensor placements, Tensor layers, Tensor matrices, Tensor images, "
      "Tensor? blend, Tensor? tables, Tensor? masks, SymInt[2] size, *, int channels=3, ScalarType? dtype=None, "
      "bool channels_last=False, str warp='fixed', int hsv_lanes=32) -> Tensor");
  m.def(
      "image_augment_(Tensor(a!) out, Tensor[] storages, Tensor placements, Tensor layers, Tensor matrices, "
      "Tensor images, Tensor? blend, Tensor? tables, Tensor? masks, *, str warp='fixed', int hsv_lanes=32) -> ()");
  m.def(
      "image_letterbox(Tensor[] storages, Tensor plan, SymInt[2] size, *, int channels=3, ScalarType? dtype=None, "
      "bool channels_last=False, bool bgr=False) -> Tensor");
  m.def("image_letterbox_(Tensor(a!) out, Tensor[] storages, Tensor plan, *, bool bgr=False) -> ()");
  m.def("image_resize_(Tensor(a!) out, Tensor[] storages, Tensor plan, *, int channels=3) -> ()");
  m.def("image_gather_(Tensor(a!) out, Tensor[] storages, Tensor pieces) -> ()");

  // Decode JPEG files to OpenCV's pixels. jpeg_pack and jpeg_plan index a file on the host (layout: core/jpeg/jpeg.h).
  m.def(
      "jpeg_pack(Tensor[] files, bool pin_memory=False, int segment=4) -> (Tensor storage, "
      "Tensor images, str[] refusals)");
  m.def("jpeg_plan(Tensor headers, Tensor asked) -> (Tensor plan, int[] sizes)");
  m.def("jpeg_decode_(Tensor(a!) out, Tensor storage, Tensor plan, int[3] sizes) -> ()");

  // Compute Ultralytics' detection loss. heads: one tensor a level, or boxes and scores of all levels, whose heights
  // and widths are `sizes`. settings (9): box, cls and dfl gain, weight, alpha, beta, eps, least side and short side.
  m.def(
      "v8_loss(Tensor[] heads, Tensor targets, Tensor settings, float[] strides, SymInt[] sizes, "
      "Tensor? num_targets=None, Tensor? class_weights=None, *, int reg_max=16, int topk=10, int topk2=10) "
      "-> (Tensor loss, Tensor items, Tensor scales, Tensor slot_anchor, Tensor slot_row, Tensor slot_score, "
      "Tensor status)");
  m.def(
      "v8_loss_backward(Tensor grad_loss, Tensor[] heads, Tensor targets, Tensor scales, Tensor slot_anchor, "
      "Tensor slot_row, Tensor slot_score, float[] strides, SymInt[] sizes, Tensor? class_weights=None, *, "
      "int reg_max=16) -> Tensor[]");
  // Compute v8_loss with an assignment that also compares masks (bs or n, h, w). Its backward is v8_loss_backward.
  m.def(
      "v8_masked_loss(Tensor[] heads, Tensor coefficients, Tensor protos, Tensor masks, Tensor targets, "
      "Tensor settings, float[] strides, SymInt[] sizes, Tensor? num_targets=None, Tensor? class_weights=None, *, "
      "int reg_max=16, int topk=10, int topk2=10, bool overlap=True) -> (Tensor loss, Tensor items, Tensor scales, "
      "Tensor slot_anchor, Tensor slot_row, Tensor slot_score, Tensor status)");
  // Compute the segmentation loss's mask part for the slots that v8_loss returned. image_size: height, width in pixels.
  m.def(
      "v8_mask_loss(Tensor coefficients, Tensor protos, Tensor masks, Tensor targets, Tensor settings, "
      "Tensor slot_anchor, Tensor slot_row, SymInt[] image_size, Tensor? num_targets=None, bool overlap=True) "
      "-> (Tensor loss, Tensor item, Tensor scale, Tensor positives, Tensor first_positive, Tensor unit_gradients)");
  // Compute the same for YOLOv5's matches, which may share an anchor. sizes: height, width of each level.
  m.def(
      "yolov5_mask_loss(Tensor coefficients, Tensor protos, Tensor masks, Tensor targets, Tensor match_cell, "
      "SymInt[] sizes, Tensor? num_targets=None, *, float box_gain=0.05, bool overlap=True) "
      "-> (Tensor loss, Tensor item, Tensor scale, Tensor positives, Tensor first_positive, Tensor unit_gradients)");
  m.def(
      "v8_mask_loss_backward(Tensor grad_loss, Tensor coefficients, Tensor protos, Tensor masks, Tensor scale, "
      "Tensor positives, Tensor first_positive, Tensor unit_gradients, bool overlap=True, bool shared=False, "
      "bool[2] output_mask=[True, True]) -> (Tensor, Tensor)");
  // Compute the pose loss's keypoint parts for these slots. gains (2): pose, kobj; sizes: height, width of each level.
  m.def(
      "v8_keypoint_loss(Tensor predictions, Tensor labels, Tensor sigmas, Tensor targets, Tensor slot_anchor, "
      "Tensor slot_row, Tensor gains, Tensor settings, float[] strides, SymInt[] sizes, bool centered=False) "
      "-> (Tensor loss, Tensor items, Tensor scales)");
  m.def(
      "v8_keypoint_loss_backward(Tensor grad_loss, Tensor predictions, Tensor labels, Tensor sigmas, Tensor targets, "
      "Tensor slot_anchor, Tensor slot_row, Tensor scales, float[] strides, SymInt[] sizes, bool centered=False) "
      "-> Tensor");
  // Compute v8_loss with an assignment that compares keypoints, which are centered. Its backward is v8_loss_backward.
  m.def(
      "v8_posed_loss(Tensor[] heads, Tensor predictions, Tensor labels, Tensor sigmas, Tensor targets, "
      "Tensor settings, float[] strides, SymInt[] sizes, Tensor? num_targets=None, Tensor? class_weights=None, *, "
      "int reg_max=16, int topk=10, int topk2=10) -> (Tensor loss, Tensor items, Tensor scales, Tensor slot_anchor, "
      "Tensor slot_row, Tensor slot_score, Tensor status)");
  // Compute the loss of oriented boxes. The seventh column of targets is the angle, the tenth of settings its gain.
  m.def(
      "v8_obb_loss(Tensor boxes, Tensor scores, Tensor angles, Tensor targets, Tensor settings, float[] strides, "
      "SymInt[] sizes, Tensor? num_targets=None, Tensor? class_weights=None, *, int reg_max=16, int topk=10, "
      "int topk2=10) -> (Tensor loss, Tensor items, Tensor scales, Tensor slot_anchor, Tensor slot_row, "
      "Tensor slot_score, Tensor status)");
  m.def(
      "v8_obb_loss_backward(Tensor grad_loss, Tensor boxes, Tensor scores, Tensor angles, Tensor targets, "
      "Tensor scales, Tensor slot_anchor, Tensor slot_row, Tensor slot_score, float[] strides, SymInt[] sizes, "
      "Tensor? class_weights=None, *, int reg_max=16) -> (Tensor, Tensor, Tensor)");

  // Compute RT-DETR's loss. targets (images, most, 5): class, x, y, width, height.
  m.def(
      "rtdetr_loss(Tensor boxes, Tensor scores, Tensor targets, Tensor counts, Tensor? dn_boxes=None, "
      "Tensor? dn_scores=None, Tensor? dn_matches=None, *, float class_gain=1., float box_gain=5., "
      "float giou_gain=2., float class_cost=2., float box_cost=5., float giou_cost=2.) -> (Tensor loss, Tensor terms, "
      "Tensor status, Tensor owner, Tensor quality, Tensor scales)");
  m.def(
      "rtdetr_loss_backward(Tensor grad_loss, Tensor boxes, Tensor scores, Tensor targets, Tensor counts, Tensor "
      "owner, "
      "Tensor quality, Tensor scales, Tensor? dn_boxes=None, Tensor? dn_scores=None) "
      "-> (Tensor, Tensor, Tensor, Tensor)");

  // Update lists of tensors in place, in one launch (clip: two). .tensor takes device tensors, which also fit `float`.
  m.def("multi_tensor_ema_.tensor(Tensor(a!)[] averages, Tensor[] values, Tensor decay) -> ()");
  m.def("multi_tensor_ema_(Tensor(a!)[] averages, Tensor[] values, float decay) -> ()");
  m.def(
      "multi_tensor_sgd_.tensor(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, Tensor lr, "
      "Tensor momentum, float dampening=0., float weight_decay=0., bool nesterov=False, bool maximize=False, "
      "bool is_first_step=False, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
  m.def(
      "multi_tensor_sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, float lr, "
      "float momentum=0., float dampening=0., float weight_decay=0., bool nesterov=False, bool maximize=False, "
      "bool is_first_step=False, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
  m.def("multi_tensor_unscale_(Tensor(a!)[] grads, Tensor scale, Tensor(b!) found_inf) -> ()");
  m.def("multi_tensor_norm(Tensor[] tensors) -> Tensor");
  m.def("multi_tensor_clip_grad_norm_(Tensor(a!)[] grads, float max_norm) -> Tensor");
}
