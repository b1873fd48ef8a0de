// Compute RT-DETR's loss on the CPU; parallel_for(begin, end, grain, f) shares parts of prediction sets.
#pragma once

#include <algorithm>

#include "core/common/storage.h"
#include "core/linear_assignment/linear_assignment_loops.h"
#include "core/rtdetr_loss/rtdetr_loss.h"
#include "core/rtdetr_loss/rtdetr_loss_math.h"

namespace torch_fastdet::core::rtdetr_loops {

template <typename A>
void load_box(const void* boxes, int64_t at, A (&box)[4]) {
  std::copy_n(static_cast<const A*>(boxes) + 4 * at, 4, box);
}

// Assign queries to a set's targets in an image.
template <typename T>
void assign(const RtdetrLossParams& p, int64_t problem, assignment_loops::Search& search) {
  using A = arithmetic_t<T>;
  const int64_t image = problem % p.images, count = p.count(image), queries = p.assigned.queries;
  const A gains[3] = {A(p.costs[0]), A(p.costs[1]), A(p.costs[2])};
  A* const cost = static_cast<A*>(p.cost) + problem * p.most * queries;
  const T* const scores = static_cast<const T*>(p.assigned.scores) + problem * queries * p.classes;
  for (int64_t t = 0; t < count; ++t) {
    A target[4], box[4];
    p.target_box(image, t, target);
    const int32_t label = p.class_of(image, t);
    for (int64_t q = 0; q < queries; ++q) {
      load_box(p.assigned.boxes, problem * queries + q, box);
      const A class_cost = label < 0 ? A(0) : rtdetr_class_cost(to_arithmetic(scores[q * p.classes + label]));
      cost[t * queries + q] = rtdetr_cost(box, class_cost, target, gains);
    }
  }
  LinearAssignmentParams one{};
  one.rows = queries;
  one.columns = p.most;
  one.row_stride = 1;
  one.column_stride = queries;
  int64_t* const rows = p.rows + problem * p.most;
  std::fill_n(rows, p.most, -1);
  const AssignmentSides sides = assignment_sides(one, count);
  search.run(cost, sides);
  for (int64_t i = 0; i < sides.starts; ++i) {
    const int64_t other = search.end_of()[i];
    rows[sides.from_rows ? other : i] = sides.from_rows ? i : other;
  }
}

// Sum a part's class, box and GIoU terms and count its queries with a target; store what the backward pass reads.
template <typename T>
void terms(const RtdetrLossParams& p, const RtdetrPart& part, bool any, arithmetic_t<T> (&sums)[4]) {
  using A = arithmetic_t<T>;
  const int64_t queries = part.sets->queries, count = p.count(part.image);
  const A alpha = A(any ? kRtdetrAlpha : kRtdetrAlphaWithoutTargets);
  int32_t* const owner = p.owner + part.place;
  A* const quality = static_cast<A*>(p.quality) + part.place;
  std::fill_n(owner, part.count, -1);
  if (part.noisy) {
    for (int64_t i = 0; i < part.count; ++i) {
      const int64_t t = p.matches[part.image * queries + part.first + i];
      if (t >= 0 && t < count) owner[i] = static_cast<int32_t>(t);
    }
  } else {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t i = p.rows[part.problem * p.most + t] - part.first;
      if (i >= 0 && i < part.count) owner[i] = static_cast<int32_t>(t);
    }
  }
  for (int64_t i = 0; i < part.count; ++i) {
    const int64_t at = part.problem * queries + part.first + i;
    int32_t label = -1;
    quality[i] = 0;
    if (owner[i] >= 0) {
      A target[4], box[4];
      p.target_box(part.image, owner[i], target);
      load_box(part.sets->boxes, at, box);
      const IouTerms<A> overlap = rtdetr_overlap(box, target);
      quality[i] = overlap.iou;
      label = p.class_of(part.image, owner[i]);
      sums[1] += rtdetr_distance(box, target);
      sums[2] += A(1) - overlap.value;
      sums[3] += 1;
    }
    const T* const scores = static_cast<const T*>(part.sets->scores) + at * p.classes;
    for (int32_t c = 0; c < p.classes; ++c) {
      const A logit = to_arithmetic(scores[c]);
      sums[0] += c == label ? rtdetr_positive(logit, quality[i]) : rtdetr_negative(logit, alpha);
    }
  }
}

template <typename T, typename ParallelFor>
void forward(const RtdetrLossParams& p, const ParallelFor& parallel_for) {
  using A = arithmetic_t<T>;
  bool any = false;
  for (int64_t image = 0; image < p.images; ++image) any = any || p.count(image) > 0;
  parallel_for(0, p.assigned.sets * p.images, 1, [&](int64_t begin, int64_t end) {
    LinearAssignmentParams size{};
    size.rows = p.assigned.queries;
    size.columns = p.most;
    assignment_loops::Search search(size);
    for (int64_t problem = begin; problem < end; ++problem) assign<T>(p, problem, search);
  });
  A* const partials = static_cast<A*>(p.partials);
  parallel_for(0, p.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      A sums[4] = {};
      terms<T>(p, rtdetr_part(p, block), any, sums);
      std::copy_n(sums, 4, partials + 4 * block);
    }
  });
  A loss = 0;
  int64_t block = 0;
  for (int64_t set = 0; set < p.sets(); ++set) {
    const RtdetrSets& sets = set < p.assigned.sets ? p.assigned : p.noisy;
    A sums[4] = {};
    for (const int64_t last = block + p.images * sets.chunks(); block < last; ++block) {
      for (int i = 0; i < 4; ++i) sums[i] += partials[4 * block + i];
    }
    A* const scales = static_cast<A*>(p.scales) + 4 * set;
    for (int i = 0; i < 3; ++i) {
      scales[i] = A(p.gains[i]) / std::max(sums[3], A(1));
      loss += static_cast<A*>(p.terms)[3 * set + i] = scales[i] * sums[i];
    }
    scales[3] = A(any ? kRtdetrAlpha : kRtdetrAlphaWithoutTargets);
  }
  *static_cast<A*>(p.loss) = loss;
}

template <typename T, typename ParallelFor>
void backward(const RtdetrLossParams& p, const ParallelFor& parallel_for) {
  using A = arithmetic_t<T>;
  const A grad = *static_cast<const A*>(p.grad_loss);
  parallel_for(0, p.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const RtdetrPart part = rtdetr_part(p, block);
      const A* const scales = static_cast<const A*>(p.scales) + 4 * part.set;
      for (int64_t i = 0; i < part.count; ++i) {
        const int64_t at = part.problem * part.sets->queries + part.first + i;
        const int32_t owner = p.owner_of(part.place + i);
        const A quality = static_cast<const A*>(p.quality)[part.place + i];
        A by_box[4] = {};
        if (owner >= 0) {
          A target[4], box[4];
          p.target_box(part.image, owner, target);
          load_box(part.sets->boxes, at, box);
          rtdetr_box_gradient(box, target, grad * scales[1], grad * scales[2], by_box);
        }
        std::copy_n(by_box, 4, static_cast<A*>(part.sets->grad_boxes) + 4 * at);
        const int32_t label = owner < 0 ? -1 : p.class_of(part.image, owner);
        const T* const scores = static_cast<const T*>(part.sets->scores) + at * p.classes;
        T* const out = static_cast<T*>(part.sets->grad_scores) + at * p.classes;
        for (int32_t c = 0; c < p.classes; ++c) {
          const A logit = to_arithmetic(scores[c]);
          out[c] = from_arithmetic<T>(
              grad * scales[0] *
              (c == label ? rtdetr_positive_gradient(logit, quality) : rtdetr_negative_gradient(logit, scales[3])));
        }
      }
    }
  });
}

}  // namespace torch_fastdet::core::rtdetr_loops
