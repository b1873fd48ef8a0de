// Save, load and compare the folders of torch_fastdet.golden with the standard library; golden_torch.h: at::Tensor.
//
//   torch_fastdet::golden::Writer writer("port");
//   writer.save("raw.0", torch_fastdet::golden::view(data, {1, 255, 80, 80}));            // row-major
//   writer.save("raw.1", torch_fastdet::golden::view(data, {1, 255, 40, 40}, strides));   // strides in elements
//   auto comparison = torch_fastdet::golden::compare("reference", "port");
//   std::cout << comparison.table(); return comparison.equal() ? 0 : 1;
//
// A folder holds a little-endian NN_stage.npy for each stage, and stages.txt, which lists them in the pipeline's order.
// A dtype is named as numpy does: "<f4" is float32.
// What cannot be done throws std::runtime_error with a one-line message.
#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch_fastdet::golden {

using Dims = std::vector<int64_t>;

namespace detail {

[[noreturn]] inline void fail(const std::string& message) {
  throw std::runtime_error("golden: " + message);
}

// numpy's name of a C++ type; float16 is uint16_t in memory, and is named by whoever saves it.
template <typename T>
std::string dtype_of() {
  if (std::is_same_v<T, bool>) return "|b1";
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  return std::string(sizeof(T) == 1 ? "|" : "<") + kind + std::to_string(sizeof(T));
}

inline size_t size_of(const std::string& dtype) {
  for (const char* known : {"<f2", "<f4", "<f8", "|i1", "|u1", "<i2", "<i4", "<i8", "|b1"}) {
    if (dtype == known) return static_cast<size_t>(dtype[2] - '0');
  }
  fail("a stage cannot have dtype '" + dtype + "'");
}

inline Dims row_major(const Dims& shape) {
  Dims stride(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) stride[dim - 1] = stride[dim] * shape[dim];
  return stride;
}

inline std::vector<char> gathered(const char* data, const Dims& shape, const Dims& stride, size_t size) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  std::vector<char> bytes(static_cast<size_t>(count) * size);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, offset = 0;
    for (size_t dim = shape.size(); dim-- > 0; rest /= shape[dim]) offset += rest % shape[dim] * stride[dim];
    std::memcpy(bytes.data() + static_cast<size_t>(i) * size, data + offset * static_cast<int64_t>(size), size);
  }
  return bytes;
}

}  // namespace detail

// "(1,255,80,80)"
inline std::string format(const Dims& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return "(" + text + ")";
}

// Points at a tensor in the caller's memory, on the host. Strides count elements.
struct View {
  const void* data;
  std::string dtype;
  Dims shape;
  Dims stride;
};

template <typename T>
View view(const T* data, const Dims& shape, const Dims& stride) {
  return {data, detail::dtype_of<T>(), shape, stride};
}

template <typename T>
View view(const T* data, const Dims& shape) {
  return view(data, shape, detail::row_major(shape));
}

// Holds a loaded tensor, its elements in row-major order.
struct Stage {
  std::string name;
  std::string dtype;
  Dims shape;
  std::vector<char> bytes;

  int64_t elements() const { return static_cast<int64_t>(bytes.size() / detail::size_of(dtype)); }

  template <typename T>
  const T* data() const {
    if (dtype != detail::dtype_of<T>()) {
      detail::fail("stage '" + name + "' holds " + dtype + ", not " + detail::dtype_of<T>());
    }
    return reinterpret_cast<const T*>(bytes.data());
  }
};

// Write a tensor as .npy, which numpy.load reads.
inline void save_npy(const std::filesystem::path& path, const View& tensor) {
  if (tensor.shape.size() != tensor.stride.size()) {
    detail::fail("stride must have one entry for each dimension of shape " + format(tensor.shape) + ", but is " +
                 format(tensor.stride));
  }
  const size_t size = detail::size_of(tensor.dtype);
  std::string shape = format(tensor.shape);
  if (tensor.shape.size() == 1) shape.insert(shape.size() - 1, ",");
  std::string header = "{'descr': '" + tensor.dtype + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.append(63 - (10 + header.size()) % 64, ' ').append("\n");
  const std::string length{static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  const auto bytes = detail::gathered(static_cast<const char*>(tensor.data), tensor.shape, tensor.stride, size);
  std::ofstream file(path, std::ios::binary);
  file << std::string("\x93NUMPY\x01\0", 8) << length << header;
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) detail::fail("cannot write " + path.string());
}

// Read an .npy file of one of golden's dtypes, its elements in row-major order.
inline Stage load_npy(const std::filesystem::path& path) {
  if (!std::filesystem::is_regular_file(path)) detail::fail("there is no file " + path.string());
  const auto bad = [&](const std::string& why) { detail::fail(path.string() + " is not an .npy file: " + why); };
  std::ifstream file(path, std::ios::binary);
  std::string start(10, 0), header;
  file.read(start.data(), 10);
  if (!file || start.compare(0, 8, std::string("\x93NUMPY\x01\0", 8)) != 0)
    bad("it does not begin as one of version 1");
  const auto byte = [&](int i) { return static_cast<size_t>(static_cast<unsigned char>(start[i])); };
  header.resize(byte(8) + 256 * byte(9));
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  const std::string before = "{'descr': '", between = "', 'fortran_order': False, 'shape': (";
  const size_t at = before.size() + 3 + between.size(), end = std::min(header.find(')'), header.size());
  if (!file || header.compare(0, before.size(), before) != 0 || end < at ||
      header.compare(before.size() + 3, between.size(), between) != 0 || header.compare(end, 4, "), }") != 0) {
    bad("its header is another one");
  }
  Stage stage{path.stem().string(), header.substr(before.size(), 3), {}, {}};
  const size_t size = detail::size_of(stage.dtype);
  // The file's own size bounds all memory that is taken.
  const uint64_t left = std::filesystem::file_size(path) - 10 - header.size();
  uint64_t count = 1;
  std::istringstream shape(header.substr(at, end - at));
  for (std::string extent; std::getline(shape >> std::ws, extent, ',');) {
    if (extent.size() > 12 || extent.find_first_not_of("0123456789") != std::string::npos) bad("its shape is no shape");
    stage.shape.push_back(std::stoll("0" + extent));
    const auto factor = static_cast<uint64_t>(stage.shape.back());
    count = factor && count > left / factor ? left + 1 : count * factor;
  }
  if (count > left / size || count * size != left) bad("its elements are not those of shape " + format(stage.shape));
  stage.bytes.resize(count * size);
  file.read(stage.bytes.data(), static_cast<std::streamsize>(stage.bytes.size()));
  if (!file) bad("it ends too early");
  return stage;
}

namespace detail {

constexpr char kIndex[] = "stages.txt";

struct File {
  std::string stage, name;
};

inline bool is_name(const std::string& text) {
  const auto is_good = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.' || c == '-'; };
  return !text.empty() && std::isalnum(static_cast<unsigned char>(text[0])) &&
         std::all_of(text.begin(), text.end(), is_good);
}

inline bool is_in(const std::vector<File>& files, const std::string& stage) {
  return std::any_of(files.begin(), files.end(), [&](const File& file) { return file.stage == stage; });
}

// Return the files of a folder. No list names a file that a writer does not write.
inline std::vector<File> files(const std::filesystem::path& folder) {
  std::ifstream index(folder / kIndex);
  if (!index) fail(folder.string() + " has no " + kIndex + ": it is not a folder of stage tensors");
  std::vector<File> found;
  for (std::string line; std::getline(index, line);) {
    const size_t digits = line.find_first_not_of("0123456789"), end = line.size() - std::min<size_t>(4, line.size());
    const bool known = digits >= 2 && digits < end && line[digits] == '_' && line.compare(end, 4, ".npy") == 0;
    const std::string name = known ? line.substr(digits + 1, end - digits - 1) : "";
    if (!is_name(name) || is_in(found, name)) {
      fail((folder / kIndex).string() + " line " + std::to_string(found.size() + 1) +
           " must be the NN_stage.npy of another stage");
    }
    found.push_back({name, line});
  }
  return found;
}

inline double half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = exponent ? std::ldexp(fraction + 1024.0, exponent - 25) : std::ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? std::nan("") : std::numeric_limits<double>::infinity();
  return bits & 0x8000 ? -value : value;
}

template <typename T>
T element(const Stage& stage, int64_t index) {
  T value;
  std::memcpy(&value, stage.bytes.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

// Doubles hold every dtype but int64 exactly.
inline double number(const Stage& stage, int64_t i) {
  if (stage.dtype == "<f2") return half(element<uint16_t>(stage, i));
  if (stage.dtype == "<f4") return element<float>(stage, i);
  if (stage.dtype == "<f8") return element<double>(stage, i);
  if (stage.dtype == "|i1") return element<int8_t>(stage, i);
  if (stage.dtype == "<i2") return element<int16_t>(stage, i);
  if (stage.dtype == "<i4") return element<int32_t>(stage, i);
  if (stage.dtype == "<i8") return static_cast<double>(element<int64_t>(stage, i));
  return element<uint8_t>(stage, i);
}

}  // namespace detail

// Saves stages one by one. The folder is complete after each, so a program that dies leaves what it had.
class Writer {
 public:
  // Make the folder, or empty it of the stages that an earlier writer left there.
  explicit Writer(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
    if (std::filesystem::exists(folder_ / detail::kIndex)) {
      for (const detail::File& file : detail::files(folder_)) std::filesystem::remove(folder_ / file.name);
    }
    std::ofstream(folder_ / detail::kIndex);
  }

  void save(const std::string& name, const View& tensor) {
    if (!detail::is_name(name)) {
      detail::fail("a stage's name must be letters, digits, '_', '-' and '.', not '" + name + "'");
    }
    const auto saved = detail::files(folder_);
    if (detail::is_in(saved, name)) {
      detail::fail("stage '" + name + "' is already saved in " + folder_.string() + ": each stage is saved once");
    }
    const std::string file = (saved.size() < 10 ? "0" : "") + std::to_string(saved.size()) + "_" + name + ".npy";
    save_npy(folder_ / file, tensor);
    std::ofstream index(folder_ / detail::kIndex, std::ios::app);
    index << file << "\n";
    index.close();
    if (!index) detail::fail("cannot write " + (folder_ / detail::kIndex).string());
  }

 private:
  std::filesystem::path folder_;
};

// Return the stages of a folder, in the order in which they were saved.
inline std::vector<Stage> load(const std::filesystem::path& folder) {
  std::vector<Stage> stages;
  for (const detail::File& file : detail::files(folder)) {
    stages.push_back(load_npy(folder / file.name));
    stages.back().name = file.stage;
  }
  return stages;
}

// Holds how one stage compares; `difference` is empty where the two are equal.
struct Row {
  std::string stage;
  std::string difference;
};

struct Comparison {
  std::vector<Row> rows;  // in the order of the pipeline

  // Return the first stage that differs, or null: what comes after it inherits its error.
  const Row* first_difference() const {
    const auto differs = [](const Row& row) { return !row.difference.empty(); };
    const auto found = std::find_if(rows.begin(), rows.end(), differs);
    return found == rows.end() ? nullptr : &*found;
  }

  bool equal() const { return first_difference() == nullptr; }

  // Return a line on the first difference, then a line for each stage, as Python does.
  std::string table() const {
    const auto line = [](const Row& row) {
      return row.stage + ": " + (row.difference.empty() ? "equal" : row.difference) + "\n";
    };
    const Row* first = first_difference();
    std::string text =
        first ? "First difference: " + line(*first) : "Equal: " + std::to_string(rows.size()) + " stages\n";
    for (size_t i = 0; i < rows.size(); ++i) text += "  " + std::to_string(i + 1) + " " + line(rows[i]);
    return text;
  }
};

namespace detail {

inline std::string difference(const Stage& a, const Stage& b, double rtol, double atol) {
  std::ostringstream text;
  if (a.shape != b.shape || a.dtype != b.dtype) {
    return "A is " + a.dtype + format(a.shape) + ", B is " + b.dtype + format(b.shape);
  }
  int64_t differing = 0, first = 0;
  double largest = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    const double x = number(a, i), y = number(b, i), bound = atol + rtol * std::abs(x);
    double gap = std::abs(x - y);
    const bool same = a.dtype == "<i8" ? element<int64_t>(a, i) == element<int64_t>(b, i) : x == y;
    if (same || (std::isnan(x) && std::isnan(y)) || ((rtol > 0 || atol > 0) && std::isfinite(bound) && gap <= bound)) {
      continue;
    }
    if (std::isnan(gap)) gap = std::numeric_limits<double>::infinity();
    if (differing++ == 0) first = i;
    largest = std::max(largest, gap);
  }
  if (differing == 0) return "";
  Dims index;
  int64_t rest = first;
  for (int64_t step : row_major(a.shape)) {
    index.push_back(rest / step);
    rest %= step;
  }
  text << differing << " of " << a.elements() << " elements differ, by at most " << std::setprecision(6) << largest
       << "; at " << format(index) << " A is " << std::setprecision(9) << number(a, first) << ", B is "
       << number(b, first);
  return text.str();
}

}  // namespace detail

// Compare folder b with the reference a: elements are equal where |a - b| <= atol + rtol * |a|, NaN where both are.
inline Comparison compare(const std::filesystem::path& a, const std::filesystem::path& b, double rtol = 0,
                          double atol = 0) {
  if (!(rtol >= 0) || !(atol >= 0)) detail::fail("rtol and atol must be numbers of at least 0");
  const std::vector<Stage> in_a = load(a), in_b = load(b);
  const auto find = [](const std::vector<Stage>& stages, const std::string& name) {
    return std::find_if(stages.begin(), stages.end(), [&](const Stage& stage) { return stage.name == name; });
  };
  Comparison comparison;
  for (const Stage& stage : in_a) {
    const auto other = find(in_b, stage.name);
    comparison.rows.push_back(
        {stage.name, other == in_b.end() ? "only in A" : detail::difference(stage, *other, rtol, atol)});
  }
  for (const Stage& stage : in_b) {
    if (find(in_a, stage.name) == in_a.end()) comparison.rows.push_back({stage.name, "only in B"});
  }
  if (comparison.rows.empty()) {
    detail::fail("there is nothing to compare: " + a.string() + " and " + b.string() + " hold no stages");
  }
  return comparison;
}

}  // namespace torch_fastdet::golden
