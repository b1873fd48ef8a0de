// torch_fastdet._C.read_labels and file_sizes read files in threads, with the GIL released.
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

// Call work(i) for each i below count, in threads.
template <typename Work>
void in_threads(size_t count, int threads, const Work& work) {
  std::atomic<size_t> next{0};
  const auto all = [&] {
    for (size_t i; (i = next++) < count;) work(i);
  };
  std::vector<std::thread> others;
  try {
    while (static_cast<int>(others.size()) < threads - 1) others.emplace_back(all);
  } catch (const std::system_error&) {  // the system has no more threads
  }
  all();
  for (std::thread& thread : others) thread.join();
}

std::vector<Found> scan(const std::vector<std::string>& images, const std::vector<std::string>& labels, float classes,
                        int threads) {
  std::vector<Found> found(images.size());
  in_threads(images.size(), threads, [&](size_t i) {
    try {
      found[i].count = core::scan_plain(images[i].c_str(), labels[i].c_str(), classes, found[i].size, found[i].labels);
    } catch (const std::bad_alloc&) {  // left to the framework, which reports it
      found[i] = Found{};
    }
  });
  return found;
}

py::array_t<int64_t> file_sizes(const std::vector<std::string>& paths, int threads) {
  py::array_t<int64_t> sizes(static_cast<py::ssize_t>(paths.size()));
  int64_t* size = sizes.mutable_data();
  const py::gil_scoped_release release;
  in_threads(paths.size(), threads, [&](size_t i) {
    struct stat status;
    const bool whole = paths[i].find('\0') == std::string::npos;
    size[i] = whole && ::stat(paths[i].c_str(), &status) == 0 ? status.st_size : -1;
  });
  return sizes;
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
  m.def("file_sizes", file_sizes, py::arg("paths"), py::arg("threads"), "The size of each file, -1 if there is none.");
}
