// Golden stage tensors in C++: saves, loads and compares the folders of torch_fastdet.golden (Python). Standard library
// only: no Torch, nothing to link. golden_torch.h saves at::Tensor.
//
//   torch_fastdet::golden::Writer writer("port");
//   writer.save("raw.0", torch_fastdet::golden::view(data, {1, 255, 80, 80}));            // row-major
//   writer.save("raw.1", torch_fastdet::golden::view(data, {1, 255, 40, 40}, strides));   // strides in elements
//   auto comparison = torch_fastdet::golden::compare("reference", "port");
//   std::cout << comparison.table(); return comparison.equal() ? 0 : 1;
//
// A folder holds one NN_stage.npy for each stage (elements in row-major order) and stages.tsv: a line for each stage,
// in the order of the pipeline, with name, dtype, shape, stride and file. bfloat16 is widened to float32 in the .npy.
// What cannot be done throws std::runtime_error with a one-line message.
#pragma once

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torch_fastdet::golden {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kInt8, kUInt8, kInt16, kInt32, kInt64, kBool };

struct DTypeTraits {
  DType dtype;
  const char* name;
  const char* npy;  // little-endian, as numpy.lib.format writes it
  size_t size;      // bytes of an element in memory
  size_t npy_size;  // bytes of an element in the file
};

inline const DTypeTraits& traits(DType dtype) {
  static const DTypeTraits all[] = {
      {DType::kFloat16, "float16", "<f2", 2, 2}, {DType::kBFloat16, "bfloat16", "<f4", 2, 4},
      {DType::kFloat32, "float32", "<f4", 4, 4}, {DType::kFloat64, "float64", "<f8", 8, 8},
      {DType::kInt8, "int8", "|i1", 1, 1},       {DType::kUInt8, "uint8", "|u1", 1, 1},
      {DType::kInt16, "int16", "<i2", 2, 2},     {DType::kInt32, "int32", "<i4", 4, 4},
      {DType::kInt64, "int64", "<i8", 8, 8},     {DType::kBool, "bool", "|b1", 1, 1},
  };
  return all[static_cast<size_t>(dtype)];
}

namespace detail {

// The start of a text that may be anything, on one line.
inline std::string quoted(std::string text) {
  text = text.substr(0, 200);
  for (char& c : text) c = std::isprint(static_cast<unsigned char>(c)) || c == '\t' ? c : '?';
  return "'" + text + "'";
}

}  // namespace detail

inline DType dtype_named(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    if (name == traits(static_cast<DType>(i)).name) return static_cast<DType>(i);
  }
  throw std::runtime_error("golden: there is no dtype " + detail::quoted(name));
}

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct DTypeOf<int8_t> {
  static constexpr DType value = DType::kInt8;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kUInt8;
};
template <>
struct DTypeOf<int16_t> {
  static constexpr DType value = DType::kInt16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kInt64;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::kBool;
};

using Dims = std::vector<int64_t>;

inline int64_t element_count(const Dims& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

inline Dims row_major_strides(const Dims& shape) {
  Dims stride(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) stride[dim - 1] = stride[dim] * std::max<int64_t>(shape[dim], 1);
  return stride;
}

// "(1,255,80,80)"
inline std::string format(const Dims& values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? "," : "") + std::to_string(values[i]);
  return text + ")";
}

// A tensor in the caller's memory, on the host. Strides count elements.
struct View {
  const void* data;
  DType dtype;
  Dims shape;
  Dims stride;
};

inline View view(const void* data, DType dtype, Dims shape, Dims stride) {
  if (shape.size() != stride.size()) {
    throw std::runtime_error("golden: stride must have one entry for each of the shape's " +
                             std::to_string(shape.size()) + " dimensions, but has " + std::to_string(stride.size()));
  }
  if (std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; })) {
    throw std::runtime_error("golden: shape must not be negative, but is " + format(shape));
  }
  return {data, dtype, std::move(shape), std::move(stride)};
}

inline View view(const void* data, DType dtype, const Dims& shape) {
  return view(data, dtype, shape, row_major_strides(shape));
}

template <typename T>
View view(const T* data, const Dims& shape) {
  return view(data, DTypeOf<T>::value, shape, row_major_strides(shape));
}

template <typename T>
View view(const T* data, const Dims& shape, const Dims& stride) {
  return view(data, DTypeOf<T>::value, shape, stride);
}

// A loaded tensor: elements in row-major order as the file holds them (float32 for bfloat16), the stride of what was
// saved.
struct Stage {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims stride;
  std::vector<char> bytes;

  int64_t elements() const { return element_count(shape); }

  // The elements, as type T; throws unless that is what the file holds.
  template <typename T>
  const T* data() const {
    if (std::string(traits(DTypeOf<T>::value).npy) != traits(dtype).npy) {
      throw std::runtime_error("golden: stage '" + name + "' holds " + traits(dtype).name + ", not " +
                               traits(DTypeOf<T>::value).name);
    }
    return reinterpret_cast<const T*>(bytes.data());
  }
};

namespace detail {

inline float half_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) {
    value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return bits & 0x8000 ? -value : value;
}

inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <typename T>
T read(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Element `index` of a loaded stage. Doubles hold every dtype but int64 exactly.
inline double number(const Stage& stage, int64_t index) {
  const char* bytes = stage.bytes.data() + index * static_cast<int64_t>(traits(stage.dtype).npy_size);
  switch (stage.dtype) {
    case DType::kFloat16:
      return half_to_float(read<uint16_t>(bytes));
    case DType::kBFloat16:
    case DType::kFloat32:
      return read<float>(bytes);
    case DType::kFloat64:
      return read<double>(bytes);
    case DType::kInt8:
      return read<int8_t>(bytes);
    case DType::kUInt8:
    case DType::kBool:
      return read<uint8_t>(bytes);
    case DType::kInt16:
      return read<int16_t>(bytes);
    case DType::kInt32:
      return read<int32_t>(bytes);
    case DType::kInt64:
      break;
  }
  return static_cast<double>(read<int64_t>(bytes));
}

// The same number; NaN is the same as NaN, and 0 as -0.
inline bool same(const Stage& a, int64_t i, const Stage& b, int64_t j) {
  if (a.dtype == DType::kInt64 && b.dtype == DType::kInt64) {
    return read<int64_t>(a.bytes.data() + 8 * i) == read<int64_t>(b.bytes.data() + 8 * j);
  }
  const double x = number(a, i), y = number(b, j);
  return x == y || (std::isnan(x) && std::isnan(y));
}

// Calls visit(offset) for the elements of a shape in row-major order, offset in elements by these strides.
template <typename F>
void for_each_offset(const Dims& shape, const Dims& stride, F&& visit) {
  if (element_count(shape) == 0) return;
  Dims index(shape.size(), 0);
  int64_t offset = 0;
  for (;;) {
    visit(offset);
    size_t dim = shape.size();
    for (; dim-- > 0;) {
      offset += stride[dim];
      if (++index[dim] < shape[dim]) break;
      offset -= stride[dim] * shape[dim];
      index[dim] = 0;
    }
    if (dim == static_cast<size_t>(-1)) return;
  }
}

inline std::vector<std::string> split(const std::string& line, char separator) {
  std::vector<std::string> fields(1);
  for (char c : line) {
    if (c == separator) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

// "(1,255,80,80)" or, as numpy writes it, "(1, 255, 80, 80)", "(7,)".
inline Dims parse_dims(const std::string& text) {
  Dims values;
  std::string digits;
  const bool other = text.find_first_not_of("0123456789-,() ") != std::string::npos;
  for (char c : text + ",") {
    if (std::isdigit(static_cast<unsigned char>(c)) || c == '-') digits += c;
    if (other || digits.size() > 18 || digits.find('-', 1) != std::string::npos || (c == ',' && digits == "-")) {
      throw std::runtime_error("golden: sizes are expected, but they are " + quoted(text));
    }
    if (c == ',' && !digits.empty()) {
      values.push_back(std::stoll(digits));
      digits.clear();
    }
  }
  return values;
}

constexpr char kHeader[] = "stage\tdtype\tshape\tstride\tfile";
constexpr char kManifest[] = "stages.tsv";

struct Entry {
  std::string name, dtype, shape, stride, file;
};

inline bool is_stage_name(const std::string& name) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.' || c == '-'; };
  return !name.empty() && std::isalnum(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(), allowed);
}

// Whether a writer gives the stage's file this name: NN_stage.npy.
inline bool is_file_of(const std::string& name, const std::string& file) {
  const size_t digits = file.find('_');
  const auto digit = [](unsigned char c) { return std::isdigit(c); };
  return is_stage_name(name) && digits != std::string::npos && digits >= 2 &&
         std::all_of(file.begin(), file.begin() + digits, digit) && file.substr(digits + 1) == name + ".npy";
}

inline std::vector<Entry> read_manifest(const std::filesystem::path& folder) {
  std::ifstream manifest(folder / kManifest);
  if (!manifest) {
    throw std::runtime_error("golden: " + folder.string() + " has no " + kManifest +
                             ": it is not a folder of stage tensors");
  }
  std::string line;
  std::getline(manifest, line);
  if (line != kHeader) {
    throw std::runtime_error("golden: " + (folder / kManifest).string() + " must start with the columns '" + kHeader +
                             "', but starts with " + quoted(line));
  }
  std::vector<Entry> entries;
  while (std::getline(manifest, line)) {
    const std::vector<std::string> fields = split(line, '\t');
    if (fields.size() != 5 || !is_file_of(fields[0], fields[4]) ||
        parse_dims(fields[2]).size() != parse_dims(fields[3]).size()) {
      throw std::runtime_error("golden: " + (folder / kManifest).string() +
                               " must have the 5 columns of a saved stage, but has " + quoted(line));
    }
    entries.push_back({fields[0], fields[1], fields[2], fields[3], fields[4]});
  }
  return entries;
}

// The text after 'key': in the header of an .npy file.
inline std::string header_value(const std::string& header, const std::string& key, const std::string& path) {
  const size_t at = header.find("'" + key + "'");
  const size_t colon = at == std::string::npos ? at : header.find(':', at);
  if (colon == std::string::npos) throw std::runtime_error("golden: the header of " + path + " has no '" + key + "'");
  return header.substr(std::min(header.find_first_not_of(' ', colon + 1), header.size()));
}

}  // namespace detail

// Writes a tensor as .npy, its elements in row-major order: numpy.load reads it.
inline void save_npy(const std::filesystem::path& path, const View& tensor) {
  const DTypeTraits& dtype = traits(tensor.dtype);
  std::string shape = format(tensor.shape);
  if (tensor.shape.size() == 1) shape.insert(shape.size() - 1, ",");
  std::string header = std::string("{'descr': '") + dtype.npy + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.append(63 - (10 + header.size()) % 64, ' ').append("\n");
  std::ofstream file(path, std::ios::binary);
  file.write("\x93NUMPY\x01\x00", 8);
  const char length[] = {static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  file.write(length, 2);
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  std::vector<char> buffer;
  const char* data = static_cast<const char*>(tensor.data);
  detail::for_each_offset(tensor.shape, tensor.stride, [&](int64_t offset) {
    const char* element = data + offset * static_cast<int64_t>(dtype.size);
    if (tensor.dtype == DType::kBFloat16) {
      const float wide = detail::bfloat16_to_float(detail::read<uint16_t>(element));
      buffer.insert(buffer.end(), reinterpret_cast<const char*>(&wide), reinterpret_cast<const char*>(&wide + 1));
    } else {
      buffer.insert(buffer.end(), element, element + dtype.size);
    }
    if (buffer.size() >= (1 << 20)) {
      file.write(buffer.data(), static_cast<std::streamsize>(buffer.size()));
      buffer.clear();
    }
  });
  file.write(buffer.data(), static_cast<std::streamsize>(buffer.size()));
  file.close();
  if (!file) throw std::runtime_error("golden: cannot write " + path.string());
}

// Reads an .npy file of any of our dtypes, in either order; its stride is row-major.
inline Stage load_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("golden: cannot read " + path.string());
  char start[12] = {};
  file.read(start, 10);
  if (std::memcmp(start, "\x93NUMPY", 6) != 0)
    throw std::runtime_error("golden: " + path.string() + " is not an .npy file");
  const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<unsigned char>(start[i])); };
  uint32_t length = byte(8) | byte(9) << 8;
  if (start[6] > 1) {
    file.read(start + 10, 2);
    length |= byte(10) << 16 | byte(11) << 24;
  }
  // The file's own size bounds all memory that is taken.
  const uint64_t file_size = std::filesystem::file_size(path);
  if (length > file_size) throw std::runtime_error("golden: " + path.string() + " ends too early");
  std::string header(length, ' ');
  file.read(header.data(), length);
  Stage stage;
  stage.name = path.stem().string();
  const std::string dtype_text = detail::header_value(header, "descr", path.string());
  const std::string descr = dtype_text.substr(std::min<size_t>(1, dtype_text.size()), 3);
  bool known = false;
  for (int i = 0; i <= static_cast<int>(DType::kBool) && !known; ++i) {
    stage.dtype = static_cast<DType>(i);
    known = stage.dtype != DType::kBFloat16 && descr == traits(stage.dtype).npy;
  }
  if (!known) throw std::runtime_error("golden: " + path.string() + " has the unknown dtype " + detail::quoted(descr));
  const std::string shape = detail::header_value(header, "shape", path.string());
  stage.shape = detail::parse_dims(shape.substr(0, shape.find(')')));
  const size_t size = traits(stage.dtype).npy_size;
  uint64_t count = 1, most = file_size / size;
  for (int64_t extent : stage.shape) {
    const uint64_t of_extent = extent < 0 ? most + 1 : static_cast<uint64_t>(extent);
    count = of_extent && count > (most + 1) / of_extent ? most + 1 : count * of_extent;
  }
  if (count > most) throw std::runtime_error("golden: " + path.string() + " ends too early");
  stage.stride = row_major_strides(stage.shape);
  std::vector<char> bytes(count * size);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("golden: " + path.string() + " ends too early");
  if (detail::header_value(header, "fortran_order", path.string()).rfind("True", 0) == 0) {
    Dims column_major(stage.shape.size(), 1);
    for (size_t dim = 1; dim < column_major.size(); ++dim) {
      column_major[dim] = column_major[dim - 1] * stage.shape[dim - 1];
    }
    detail::for_each_offset(stage.shape, column_major, [&](int64_t offset) {
      const char* element = bytes.data() + static_cast<size_t>(offset) * size;
      stage.bytes.insert(stage.bytes.end(), element, element + size);
    });
  } else {
    stage.bytes = std::move(bytes);
  }
  return stage;
}

// Saves stages one by one; the folder is complete after each, so a program that dies leaves what it had.
class Writer {
 public:
  // Makes the folder, or empties it of the stages that an earlier writer left there.
  explicit Writer(std::filesystem::path folder) : folder_(std::move(folder)) {
    if (std::filesystem::exists(folder_) && !std::filesystem::is_directory(folder_)) {
      throw std::runtime_error("golden: folder must be a folder for stage tensors, but " + folder_.string() +
                               " is a file");
    }
    std::filesystem::create_directories(folder_);
    if (std::filesystem::exists(folder_ / detail::kManifest)) {
      for (const detail::Entry& entry : detail::read_manifest(folder_)) std::filesystem::remove(folder_ / entry.file);
    }
    std::ofstream(folder_ / detail::kManifest) << detail::kHeader << "\n";
  }

  void save(const std::string& name, const View& tensor) { save(name, tensor, tensor.stride); }

  // For a copy of a tensor that lies elsewhere (on a GPU) with stride `original`.
  void save(const std::string& name, const View& tensor, const Dims& original) {
    if (!detail::is_stage_name(name)) {
      throw std::runtime_error("golden: a stage's name must be letters, digits, '_', '-' and '.', not '" + name + "'");
    }
    if (std::find(names_.begin(), names_.end(), name) != names_.end()) {
      throw std::runtime_error("golden: stage '" + name + "' is already saved in " + folder_.string() +
                               ": each stage is saved once");
    }
    const std::string number = std::to_string(names_.size());
    const std::string file = (number.size() < 2 ? "0" : "") + number + "_" + name + ".npy";
    save_npy(folder_ / file, tensor);
    std::ofstream manifest(folder_ / detail::kManifest, std::ios::app);
    manifest << name << '\t' << traits(tensor.dtype).name << '\t' << format(tensor.shape) << '\t' << format(original)
             << '\t' << file << '\n';
    manifest.close();
    if (!manifest) throw std::runtime_error("golden: cannot write " + (folder_ / detail::kManifest).string());
    names_.push_back(name);
  }

 private:
  std::filesystem::path folder_;
  std::vector<std::string> names_;
};

// The stages of a folder, in the order they were saved.
inline std::vector<Stage> load(const std::filesystem::path& folder) {
  std::vector<Stage> stages;
  for (const detail::Entry& entry : detail::read_manifest(folder)) {
    Stage stage = load_npy(folder / entry.file);
    const DType dtype = dtype_named(entry.dtype);
    if (std::string(traits(dtype).npy) != traits(stage.dtype).npy || detail::parse_dims(entry.shape) != stage.shape) {
      throw std::runtime_error("golden: " + (folder / entry.file).string() + " holds " + traits(stage.dtype).name +
                               " " + format(stage.shape) + ", but " + detail::kManifest + " says " + entry.dtype + " " +
                               entry.shape + " for stage '" + entry.name + "'");
    }
    stage.name = entry.name;
    stage.dtype = dtype;
    stage.stride = detail::parse_dims(entry.stride);
    stages.push_back(std::move(stage));
  }
  return stages;
}

// How one stage compares; `differences` is empty where the two are equal.
struct Row {
  size_t number = 0;
  std::string stage;
  std::vector<std::string> differences;  // "shape", "stride", "dtype", "values", "only in A", "only in B"
  std::string shape, stride, dtype;      // "x", or "x | y" where they differ
  int64_t elements = 0, differing = 0;
  double max_difference = 0;  // infinite for NaN against a number
  Dims index;                 // of the first that differs, in row-major order
  double a = 0, b = 0;        // its values
  std::string hint;           // an error that would explain the difference

  bool equal() const { return differences.empty(); }
};

struct Comparison {
  std::vector<Row> rows;  // in the order of the pipeline

  bool equal() const {
    return std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.equal(); });
  }

  // The first stage of the pipeline that differs, or null: what comes after it inherits its error.
  const Row* first_difference() const {
    const auto found = std::find_if(rows.begin(), rows.end(), [](const Row& row) { return !row.equal(); });
    return found == rows.end() ? nullptr : &*found;
  }

  // A line on the first difference, then the stages that differ, then those that are equal.
  std::string table() const;
};

namespace detail {

inline std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

inline std::string pair(const std::string& a, const std::string& b) {
  return a == b ? a : a + " | " + b;
}

inline std::string general(double value, int digits) {
  std::ostringstream text;
  text.precision(digits);
  text << value;
  return text.str();
}

// Strides of the dimensions in which the layout shows.
inline Dims strides_that_matter(const Stage& stage) {
  Dims strides;
  for (size_t dim = 0; dim < stage.shape.size() && stage.elements() > 0; ++dim) {
    if (stage.shape[dim] > 1) strides.push_back(stage.stride[dim]);
  }
  return strides;
}

// Names a permutation, an order of rows, or a cut-off that would explain the difference; "" if none does.
inline std::string hint(const Stage& a, const Stage& b) {
  const size_t dims = a.shape.size();
  if (a.elements() == b.elements() && a.elements() > 1 && dims <= 5) {
    Dims order(dims);
    std::iota(order.begin(), order.end(), 0);
    do {
      Dims shape, stride;
      for (int64_t dim : order) {
        shape.push_back(a.shape[dim]);
        stride.push_back(row_major_strides(a.shape)[dim]);
      }
      int64_t at = 0;
      bool equal = true;
      for_each_offset(shape, stride, [&](int64_t offset) { equal = equal && same(a, offset, b, at++); });
      if (equal && std::is_sorted(order.begin(), order.end())) {
        return "the same elements in the same order, under another shape";
      }
      if (equal) return "B's elements are in the order of A.permute" + format(order) + ": a wrong stride or layout";
    } while (std::next_permutation(order.begin(), order.end()));
  }
  if (dims != 2 || b.shape.size() != 2 || a.shape[1] != b.shape[1]) return "";
  const int64_t columns = a.shape[1], rows = std::min(a.shape[0], b.shape[0]);
  if (a.shape[0] != b.shape[0]) {
    for (int64_t i = 0; i < rows * columns; ++i) {
      if (!same(a, i, b, i)) return "";
    }
    const bool a_is_longer = a.shape[0] > b.shape[0];
    return std::string(a_is_longer ? "A" : "B") + " starts with all " + std::to_string(rows) + " rows of " +
           (a_is_longer ? "B" : "A") + ", and goes on: another threshold or limit";
  }
  const auto sorted = [columns](const Stage& stage) {
    std::vector<std::vector<double>> table(static_cast<size_t>(stage.shape[0]));
    for (int64_t i = 0; i < stage.elements(); ++i) table[i / columns].push_back(number(stage, i));
    std::sort(table.begin(), table.end());
    return table;
  };
  return sorted(a) == sorted(b) ? "the same rows in another order" : "";
}

inline Row compare(const Stage& a, const Stage& b, double rtol, double atol, bool stride) {
  Row row;
  row.shape = pair(format(a.shape), format(b.shape));
  row.stride = pair(format(a.stride), format(b.stride));
  row.dtype = pair(traits(a.dtype).name, traits(b.dtype).name);
  if (a.shape != b.shape) {
    row.differences.push_back("shape");
  } else if (stride && strides_that_matter(a) != strides_that_matter(b)) {
    row.differences.push_back("stride");
  }
  if (a.dtype != b.dtype) row.differences.push_back("dtype");
  if (a.shape == b.shape) {
    row.elements = a.elements();
    int64_t first = -1;
    for (int64_t i = 0; i < row.elements; ++i) {
      if (same(a, i, b, i)) continue;
      const double x = number(a, i), y = number(b, i);
      double gap = std::abs(x - y);
      if (std::isnan(gap)) gap = std::numeric_limits<double>::infinity();
      const double bound = atol + rtol * std::abs(x);
      if ((rtol != 0 || atol != 0) && gap <= (std::isfinite(bound) ? bound : 0)) continue;
      if (first < 0) first = i;
      ++row.differing;
      row.max_difference = std::max(row.max_difference, gap);
    }
    if (first >= 0) {
      row.differences.push_back("values");
      row.a = number(a, first);
      row.b = number(b, first);
      for (int64_t step : row_major_strides(a.shape)) {
        row.index.push_back(first / step);
        first %= step;
      }
    }
  }
  if (row.differing || a.shape != b.shape) row.hint = hint(a, b);
  return row;
}

}  // namespace detail

// Compares folder b with folder a, the reference. Elements are equal where |a - b| <= atol + rtol * |a|, by default
// only where they are the same number; NaN equals NaN. Shape and dtype must be the same, and stride too (of dimensions
// longer than 1) unless `stride` is false.
inline Comparison compare(const std::filesystem::path& a, const std::filesystem::path& b, double rtol = 0,
                          double atol = 0, bool stride = true) {
  if (!(rtol >= 0) || !(atol >= 0)) throw std::runtime_error("golden: rtol and atol must be numbers of at least 0");
  const std::vector<Stage> stages_a = load(a), stages_b = load(b);
  const auto find = [](const std::vector<Stage>& stages, const std::string& name) {
    return std::find_if(stages.begin(), stages.end(), [&](const Stage& stage) { return stage.name == name; });
  };
  const auto lone = [](const Stage& stage, bool in_a) {
    Row row;
    row.differences.push_back(in_a ? "only in A" : "only in B");
    const auto beside = [in_a](const std::string& text) { return in_a ? text + " | none" : "none | " + text; };
    row.shape = beside(format(stage.shape));
    row.stride = beside(format(stage.stride));
    row.dtype = beside(traits(stage.dtype).name);
    return row;
  };
  Comparison comparison;
  const auto add = [&](Row row, const std::string& name) {
    row.number = comparison.rows.size() + 1;
    row.stage = name;
    comparison.rows.push_back(std::move(row));
  };
  for (const Stage& stage : stages_a) {
    const auto other = find(stages_b, stage.name);
    add(other == stages_b.end() ? lone(stage, true) : detail::compare(stage, *other, rtol, atol, stride), stage.name);
  }
  for (const Stage& stage : stages_b) {
    if (find(stages_a, stage.name) == stages_a.end()) add(lone(stage, false), stage.name);
  }
  if (comparison.rows.empty()) {
    throw std::runtime_error("golden: there is nothing to compare: " + a.string() + " and " + b.string() +
                             " hold no stages");
  }
  return comparison;
}

inline std::string Comparison::table() const {
  std::string text;
  if (const Row* row = first_difference()) {
    text = "First difference: stage " + std::to_string(row->number) + " of " + std::to_string(rows.size()) + ", " +
           row->stage + ": " + detail::joined(row->differences);
    if (row->differing) {
      text += "; at " + format(row->index) + " A is " + detail::general(row->a, 9) + ", B is " +
              detail::general(row->b, 9) + " (" + std::to_string(row->differing) + " of " +
              std::to_string(row->elements) + " elements differ, by at most " +
              detail::general(row->max_difference, 6) + ")";
    }
    text += (row->hint.empty() ? "" : "; " + row->hint) + ".\n";
  } else {
    text = rows.size() > 1 ? "Equal: all " + std::to_string(rows.size()) + " stages.\n" : "Equal: the only stage.\n";
  }
  std::vector<std::vector<std::string>> lines{
      {"#", "stage", "result", "shape", "stride", "dtype", "differing", "max |A-B|", "first at", "A", "B", "hint"}};
  for (const bool equal : {false, true}) {
    for (const Row& row : rows) {
      if (row.equal() != equal) continue;
      const bool values = row.differing > 0;
      lines.push_back({std::to_string(row.number), row.stage, equal ? "equal" : detail::joined(row.differences),
                       row.shape, row.stride, row.dtype,
                       std::to_string(row.differing) + "/" + std::to_string(row.elements),
                       detail::general(row.max_difference, 6), values ? format(row.index) : "",
                       values ? detail::general(row.a, 9) : "", values ? detail::general(row.b, 9) : "", row.hint});
    }
  }
  std::vector<size_t> widths(lines[0].size(), 0);
  for (const auto& line : lines) {
    for (size_t column = 0; column < line.size(); ++column)
      widths[column] = std::max(widths[column], line[column].size());
  }
  for (const auto& line : lines) {
    std::string padded;
    for (size_t column = 0; column < line.size(); ++column) {
      padded += line[column] + std::string(widths[column] - line[column].size() + 2, ' ');
    }
    text += padded.substr(0, padded.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace torch_fastdet::golden
