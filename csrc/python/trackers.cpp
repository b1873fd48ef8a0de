// torch_fastdet._C.Tracker wraps the trackers of csrc/core/track for NumPy arrays. It releases the GIL for each frame.
#include "python/bind.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <optional>

#include "core/track/mutual.h"
#include "core/track/observation.h"
#include "core/track/occlusion.h"
#include "core/track/tracker.h"

namespace py = pybind11;
namespace core = torch_fastdet::core;
using core::Tracker;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;
constexpr Tracker::List kLists[] = {Tracker::kTrackedList, Tracker::kLostList, Tracker::kRemovedList};

py::array_t<float> update(Tracker& tracker, const Floats& rows, double high, double low, double new_track,
                          int64_t buffer, double match_limit, bool fuse_score, const std::optional<Doubles>& motion,
                          bool rotated, const std::optional<Floats>& recovered, const std::optional<Floats>& looks,
                          double near) {
  if (rows.ndim() != 2 || rows.shape(1) < 6 + rotated)
    throw py::value_error("expected detections of shape (N, 6 or more; rotated: 7), rows of box ... score class");
  if (motion && (motion->ndim() != 2 || motion->shape(0) != 2 || motion->shape(1) != 4))
    throw py::value_error("expected a camera motion of shape (2, 4): rotation, translation, (scale, angle)");
  if (recovered && (recovered->ndim() != 2 || recovered->shape(1) != 6 + rotated))
    throw py::value_error("expected recovered detections of shape (N, 6; rotated: 7), rows of x y w h ... score class");
  const int64_t live = tracker.size(Tracker::kTrackedList) + tracker.size(Tracker::kLostList);
  if (looks && (looks->ndim() != 2 || looks->shape(0) != live || looks->shape(1) != rows.shape(0)))
    throw py::value_error("expected looks of shape (tracked and lost tracks, detections)");
  core::CameraMotion camera{};
  if (motion)
    for (int i = 0; i < 2; i++) {
      for (int j = 0; j < 2; j++) camera.rotation[i][j] = motion->at(i, j);
      camera.translation[i] = motion->at(i, 2);
      (i ? camera.angle : camera.scale) = motion->at(i, 3);
    }
  const core::FrameDetections detections{rows.data(), rows.shape(0), rows.shape(1), rotated};
  core::FrameDetections again{};
  if (recovered) again = {recovered->data(), recovered->shape(0), recovered->shape(1), rotated, true};
  core::Appearances seen{};
  if (looks) seen = {looks->data(), looks->shape(1), static_cast<float>(near)};
  const core::TrackOptions options{
      match_limit, static_cast<float>(high), static_cast<float>(low), static_cast<float>(new_track), buffer,
      fuse_score};
  int64_t count;
  {
    py::gil_scoped_release release;
    tracker.update(detections, options, motion ? &camera : nullptr, again, seen);
    count = tracker.confirmed_count();
  }
  if (!count) return py::array_t<float>(0);
  py::array_t<float> out({count, tracker.output_columns()});
  tracker.write(out.mutable_data());
  return out;
}

bool is_finite(const Floats& rows) {
  const float* value = rows.data();
  int odd = 0;
  for (py::ssize_t i = 0; i < rows.size(); i++) {
    int32_t bits;
    std::memcpy(&bits, value + i, sizeof(bits));
    odd |= (bits & 0x7f800000) == 0x7f800000;
  }
  return !odd;
}

py::array_t<double> save(const Tracker& tracker, int list) {
  py::array_t<double> rows({tracker.size(kLists[list]), tracker.columns()});
  tracker.save(kLists[list], rows.mutable_data());
  return rows;
}

void load(Tracker& tracker, const std::array<std::optional<Doubles>, 3>& lists, int64_t frame, int64_t last_id) {
  const double* rows[3] = {};
  int64_t count[3] = {};
  for (int k = 0; k < 3; k++) {
    if (!lists[k]) continue;
    if (lists[k]->ndim() != 2 || lists[k]->shape(1) != tracker.columns())
      throw py::value_error("expected lists of tracks as save() returns them");
    rows[k] = lists[k]->data(), count[k] = lists[k]->shape(0);
  }
  tracker.load(rows, count, frame, last_id);
}

// Call solve(costs, limit), which returns the column of each row.
void break_ties_by(Tracker& tracker, const py::function& solve) {
  tracker.break_ties_by([solve](const std::vector<float>& costs, int rows, double limit) {
    py::gil_scoped_acquire acquire;
    const Floats matrix({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(costs.size()) / rows}, costs.data());
    auto found = solve(matrix, limit).cast<std::vector<int>>();
    if (found.size() != static_cast<size_t>(rows)) throw py::value_error("expected a column for each row");
    return found;
  });
}

}  // namespace

void bind_trackers(py::module_& m) {
  m.def("is_finite", is_finite, py::arg("values"));
  py::class_<Tracker>(m, "Tracker", "The core of torch_fastdet.trackers, which documents it.")
      .def(py::init<bool>(), py::arg("xywh"))
      .def("update", update, py::arg("detections"), py::arg("high"), py::arg("low"), py::arg("new_track"),
           py::arg("buffer"), py::arg("match_limit"), py::arg("fuse_score"), py::arg("motion"), py::arg("rotated"),
           py::arg("recovered") = py::none(), py::arg("looks") = py::none(), py::arg("near") = 0.)
      .def("save", save, py::arg("list"))
      .def("load", load, py::arg("lists"), py::arg("frame"), py::arg("last_id"))
      .def("reset", &Tracker::reset)
      .def("break_ties_by", break_ties_by, py::arg("solve"))
      .def_property_readonly("frame", &Tracker::frame)
      .def_property_readonly("removed_now", &Tracker::removed_now)
      .def_property_readonly("columns", &Tracker::columns)
      .def_property_readonly("last_id", &Tracker::last_id);
  py::class_<core::ObservationTracker, Tracker>(m, "ObservationTracker")
      .def(py::init([](int64_t span, float inertia, bool low) {
             return new core::ObservationTracker({span, inertia, low});
           }),
           py::arg("span"), py::arg("inertia"), py::arg("low"));
  py::class_<core::OcclusionTracker, Tracker>(m, "OcclusionTracker")
      .def(py::init([](int64_t velocity_back, int64_t position_back, double enlarge, double dampen, int64_t grace,
                       float cover, int64_t window, double suppress) {
             return new core::OcclusionTracker(
                 {velocity_back, position_back, enlarge, dampen, grace, cover, window, suppress});
           }),
           py::arg("velocity_back"), py::arg("position_back"), py::arg("enlarge"), py::arg("dampen"), py::arg("grace"),
           py::arg("cover"), py::arg("window"), py::arg("suppress"));
  py::class_<core::MutualTracker, Tracker>(m, "MutualTracker")
      .def(py::init([](float low_price, float recovered_price, double step, float score_weight, double angle_weight,
                       double lost_limit, float apart, int64_t confirmed_from, float overlap_weight) {
             return new core::MutualTracker({low_price, recovered_price, step, score_weight, angle_weight, lost_limit,
                                             apart, confirmed_from, overlap_weight});
           }),
           py::arg("low_price"), py::arg("recovered_price"), py::arg("step"), py::arg("score_weight"),
           py::arg("angle_weight"), py::arg("lost_limit"), py::arg("apart"), py::arg("confirmed_from"),
           py::arg("overlap_weight") = 1.f);
}
