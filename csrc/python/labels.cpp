// torch_fastdet._C.read_labels reads image and label files in threads, with the GIL released.
#include "python/bind.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <atomic>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/labels/plain_file.h"

namespace py = pybind11;
namespace core = torch_fastdet::core;

namespace {

struct Found {
  core::ImageSize size;
  int64_t count = core::kNotPlain;
  core::Labels labels;
};

std::vector<Found> scan(const std::vector<std::string>& images, const std::vector<std::string>& labels, float classes,
                        int threads) {
  std::vector<Found> found(images.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < images.size();) {
      try {
        found[i].count =
            core::scan_plain(images[i].c_str(), labels[i].c_str(), classes, found[i].size, found[i].labels);
      } catch (const std::bad_alloc&) {  // left to the framework, which reports it
        found[i] = Found{};
      }
    }
  };
  std::vector<std::thread> others;
  try {
    while (static_cast<int>(others.size()) < threads - 1) others.emplace_back(work);
  } catch (const std::system_error&) {  // the system has no more threads
  }
  work();
  for (std::thread& thread : others) thread.join();
  return found;
}

py::tuple read_labels(const std::vector<std::string>& images, const std::vector<std::string>& labels, float classes,
                      int threads) {
  if (images.size() != labels.size()) throw py::value_error("expected as many label files as images");
  std::vector<Found> found;
  {
    const py::gil_scoped_release release;
    found = scan(images, labels, classes, threads);
  }
  const auto files = static_cast<py::ssize_t>(found.size());
  py::ssize_t rows = 0, points = 0;
  for (const Found& each : found) {
    rows += static_cast<py::ssize_t>(each.labels.rows.size());
    points += static_cast<py::ssize_t>(each.labels.points.size() / 2);
  }
  py::array_t<int64_t> table({files, py::ssize_t{3}});
  py::array_t<float> values({rows, py::ssize_t{5}});
  py::array_t<int64_t> lengths(rows);
  py::array_t<float> polygons({points, py::ssize_t{2}});
  int64_t *to = table.mutable_data(), *length = lengths.mutable_data();
  float *out = values.mutable_data(), *point = polygons.mutable_data();
  for (const Found& each : found) {
    *to++ = each.size.height, *to++ = each.size.width, *to++ = each.count;
    for (const core::LabelRow& row : each.labels.rows) out = std::copy(row.begin(), row.end(), out);
    length = std::copy(each.labels.lengths.begin(), each.labels.lengths.end(), length);
    point = std::copy(each.labels.points.begin(), each.labels.points.end(), point);
  }
  return py::make_tuple(table, values, lengths, polygons);
}

}  // namespace

void bind_labels(py::module_& m) {
  m.def(
      "read_labels", read_labels, py::arg("images"), py::arg("labels"), py::arg("classes"), py::arg("threads"),
      "(height, width, rows) of each image, where rows is -1 without a label file and -2 for files that are not proven "
      "plain; the rows of all label files; how many points the polygon of each row has, 0 for a box; and all points.");
}
