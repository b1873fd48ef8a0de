// Save, load and compare the folders of torch_fastdet.golden with the standard library; golden_torch.h adds at::Tensor.
//
//   torch_fastdet::golden::Writer writer("port");
//   writer.save("raw.0", torch_fastdet::golden::view(data, {1, 255, 80, 80}));            // row-major
//   writer.save("raw.1", torch_fastdet::golden::view(data, {1, 255, 40, 40}, strides));   // strides in elements
//   auto comparison = torch_fastdet::golden::compare("reference", "port");
//   std::cout << comparison.table(); return comparison.equal() ? 0 : 1;
//
// A folder holds a little-endian STAGE.npy for each stage, and stages.txt, which lists the stages in the pipeline's
// order. Dtypes have numpy's names: "<f4" is float32.
// Every failure throws std::runtime_error with a one-line message.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace torch_fastdet::golden {

using Dims = std::vector<int64_t>;

// Format a shape like "(1,255,80,80)".
inline std::string format(const Dims& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return "(" + text + ")";
}

namespace detail {

[[noreturn]] inline void fail(const std::string& message) {
  throw std::runtime_error("golden: " + message);
}

template <typename T>
double number(const char* element) {
  T value;
  std::memcpy(&value, element, sizeof(T));
  return static_cast<double>(value);
}

inline double half(const char* element) {
  const int bits = static_cast<int>(number<uint16_t>(element)), exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = exponent ? std::ldexp(fraction + 1024.0, exponent - 25) : std::ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? std::nan("") : std::numeric_limits<double>::infinity();
  return bits & 0x8000 ? -value : value;
}

struct Dtype {
  size_t size;
  double (*number)(const char* element);  // exact except for int64
};

inline Dtype dtype(const std::string& name) {
  static const std::map<std::string, double (*)(const char*)> kNumbers{{"<f2", half},
                                                                       {"<f4", number<float>},
                                                                       {"<f8", number<double>},
                                                                       {"|i1", number<int8_t>},
                                                                       {"<i2", number<int16_t>},
                                                                       {"<i4", number<int32_t>},
                                                                       {"<i8", number<int64_t>},
                                                                       {"|u1", number<uint8_t>},
                                                                       {"|b1", number<uint8_t>}};
  const auto found = kNumbers.find(name);
  if (found == kNumbers.end()) fail("a stage cannot have dtype '" + name + "'");
  return {static_cast<size_t>(name[2] - '0'), found->second};
}

inline std::string name_of(char kind, size_t size) {
  return (size == 1 ? "|" : "<") + std::string(1, kind) + std::to_string(size);
}

inline Dims row_major(const Dims& shape) {
  Dims stride(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) stride[dim - 1] = stride[dim] * shape[dim];
  return stride;
}

inline const std::string kMagic("\x93NUMPY\x01\0", 8);

}  // namespace detail

// Point at a tensor in the caller's memory, on the host. Strides count elements.
struct View {
  const void* data;
  std::string dtype;
  Dims shape;
  Dims stride;  // empty for row-major
};

// float16 is stored as uint16_t, so name its dtype "<f2" in a View.
template <typename T>
View view(const T* data, const Dims& shape, const Dims& stride = {}) {
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return {data, detail::name_of(std::is_same_v<T, bool> ? 'b' : kind, sizeof(T)), shape, stride};
}

// Hold a loaded tensor with its elements in row-major order.
struct Stage {
  std::string name;
  std::string dtype;
  Dims shape;
  std::vector<char> bytes;
};

// Write a tensor as an .npy file for numpy.load.
inline void save_npy(const std::filesystem::path& path, const View& tensor) {
  const Dims rows = detail::row_major(tensor.shape), &stride = tensor.stride.empty() ? rows : tensor.stride;
  if (stride.size() != rows.size()) {
    detail::fail("shape " + format(tensor.shape) + " cannot have stride " + format(stride));
  }
  const size_t size = detail::dtype(tensor.dtype).size;
  std::string shape = format(tensor.shape);
  if (rows.size() == 1) shape.insert(shape.size() - 1, ",");
  std::string header = "{'descr': '" + tensor.dtype + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.append(63 - (10 + header.size()) % 64, ' ').append("\n");
  const std::string length{static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  std::ofstream file(path, std::ios::binary);
  file << detail::kMagic << length << header;
  int64_t count = 1;
  for (int64_t extent : tensor.shape) count *= extent;
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = 0;
    for (size_t dim = 0; dim < rows.size(); ++dim) at += i / rows[dim] % tensor.shape[dim] * stride[dim];
    file.write(static_cast<const char*>(tensor.data) + at * static_cast<int64_t>(size), static_cast<int>(size));
  }
  file.close();
  if (!file) detail::fail("cannot write " + path.string());
}

// Read a row-major .npy file of one of golden's dtypes.
inline Stage load_npy(const std::filesystem::path& path) {
  static const std::regex kHeader(
      R"(\{'descr': '(...)', 'fortran_order': False, 'shape': \(((\d{1,12}(, ?\d{1,12})*)?,?)\), \} *)");
  const uintmax_t all = std::filesystem::file_size(path);  // throws if there is no such file
  std::ifstream file(path, std::ios::binary);
  std::string header(10, 0), rest;
  file.read(header.data(), 10);
  std::getline(file, rest);
  std::smatch found;
  const bool known = header.compare(0, 8, detail::kMagic) == 0 && rest.size() < 1024;
  if (!known || !std::regex_match(rest, found, kHeader))
    detail::fail(path.string() + " is not an .npy file of a stage");
  Stage stage{path.stem().string(), found[1], {}, {}};
  auto bytes = static_cast<double>(detail::dtype(stage.dtype).size);
  std::istringstream shape(found[2]);
  for (int64_t extent = 0; shape >> extent; shape.ignore()) {
    stage.shape.push_back(extent);
    bytes *= static_cast<double>(extent);
  }
  if (bytes != static_cast<double>(all - rest.size() - 11)) detail::fail(path.string() + " is cut off");
  stage.bytes.resize(static_cast<size_t>(bytes));
  file.read(stage.bytes.data(), static_cast<std::streamsize>(stage.bytes.size()));
  return stage;
}

// Save stages one by one. The folder is complete after each, so a program that dies leaves its earlier stages.
class Writer {
 public:
  // Create the folder, or start it anew.
  explicit Writer(const std::filesystem::path& folder) : folder_(folder) {
    std::filesystem::create_directories(folder);
    index_.open(folder / "stages.txt");
  }

  void save(const std::string& name, const View& tensor) {
    static const std::regex kName("[A-Za-z0-9][A-Za-z0-9_.-]*");
    if (!std::regex_match(name, kName)) {
      detail::fail("a stage's name must be letters, digits, '_', '-' and '.', not '" + name + "'");
    }
    if (!saved_.insert(name).second) detail::fail("stage '" + name + "' is already saved in " + folder_.string());
    save_npy(folder_ / (name + ".npy"), tensor);
    index_ << name << std::endl;
  }

 private:
  std::filesystem::path folder_;
  std::ofstream index_;
  std::set<std::string> saved_;
};

// Return the stages of a folder, in the order in which they were saved.
inline std::vector<Stage> load(const std::filesystem::path& folder) {
  std::ifstream index(folder / "stages.txt");
  std::vector<Stage> stages;
  for (std::string name; std::getline(index, name); stages.back().name = name) {
    stages.push_back(load_npy(folder / (name + ".npy")));
  }
  if (stages.empty()) detail::fail(folder.string() + " has no stages.txt that lists stages");
  return stages;
}

// Hold how one stage compares; `difference` is empty if the two are equal.
struct Row {
  std::string stage;
  std::string difference;
};

struct Comparison {
  std::vector<Row> rows;  // in the order of the pipeline

  bool equal() const {
    return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.difference.empty(); });
  }

  // Return a line on the first difference, whose error later stages inherit, and then a line for each stage, like
  // Python's table.
  std::string table() const {
    std::string head, lines;
    for (const Row& row : rows) {
      const std::string line = row.stage + ": " + (row.difference.empty() ? "equal" : row.difference) + "\n";
      if (head.empty() && !row.difference.empty()) head = "First difference: " + line;
      lines += "  " + std::to_string(&row - rows.data() + 1) + " " + line;
    }
    return (head.empty() ? "Equal: " + std::to_string(rows.size()) + " stages\n" : head) + lines;
  }
};

namespace detail {

inline std::string difference(const Stage& a, const Stage& b, double rtol, double atol) {
  if (a.shape != b.shape || a.dtype != b.dtype) {
    return "A is " + a.dtype + format(a.shape) + ", B is " + b.dtype + format(b.shape);
  }
  const auto [size, number] = dtype(a.dtype);
  size_t differing = 0, first = 0;
  double largest = 0;
  for (size_t at = 0; at < a.bytes.size(); at += size) {
    if (std::memcmp(&a.bytes[at], &b.bytes[at], size) == 0) continue;
    const double x = number(&a.bytes[at]), y = number(&b.bytes[at]), bound = atol + rtol * std::abs(x);
    if (a.dtype[1] == 'f' && (x == y || (std::isnan(x) && std::isnan(y)))) continue;
    if ((rtol > 0 || atol > 0) && std::isfinite(bound) && std::abs(x - y) <= bound) continue;
    if (differing++ == 0) first = at;
    largest = std::max(largest, std::isnan(x - y) ? std::numeric_limits<double>::infinity() : std::abs(x - y));
  }
  if (differing == 0) return "";
  Dims index = row_major(a.shape);
  for (size_t dim = 0; dim < index.size(); ++dim) {
    index[dim] = static_cast<int64_t>(first / size) / index[dim] % a.shape[dim];
  }
  std::ostringstream text;
  text << differing << " of " << a.bytes.size() / size << " elements differ, by at most " << largest << "; at "
       << format(index) << std::setprecision(9) << " A is " << number(&a.bytes[first]) << ", B is "
       << number(&b.bytes[first]);
  return text.str();
}

}  // namespace detail

// Compare folder b with the reference a. Elements are equal if |a - b| <= atol + rtol * |a|, or if both are NaN.
inline Comparison compare(const std::filesystem::path& a, const std::filesystem::path& b, double rtol = 0,
                          double atol = 0) {
  Comparison comparison;
  std::vector<Stage> in_b = load(b);
  for (const Stage& stage : load(a)) {
    const auto is_it = [&](const Stage& other) { return other.name == stage.name; };
    const auto other = std::find_if(in_b.begin(), in_b.end(), is_it);
    const bool lone = other == in_b.end();
    comparison.rows.push_back({stage.name, lone ? "only in A" : detail::difference(stage, *other, rtol, atol)});
    if (!lone) in_b.erase(other);
  }
  for (const Stage& stage : in_b) comparison.rows.push_back({stage.name, "only in B"});
  return comparison;
}

}  // namespace torch_fastdet::golden
