// Image and label files that the frameworks' own checks pass without a word; what is not proven plain is theirs.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace torch_fastdet::core {

class OpenFile {
 public:
  explicit OpenFile(const char* path) : fd_(::open(path, O_RDONLY | O_CLOEXEC)) {
    struct stat status;
    if (fd_ >= 0 && ::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode)) size_ = status.st_size;
  }
  ~OpenFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int64_t size() const { return size_; }  // -1: it is no regular file, or cannot be opened
  bool read(void* to, int64_t begin, int64_t count) const {
    for (char* at = static_cast<char*>(to); count > 0;) {
      const ssize_t got = ::pread(fd_, at, count, begin);
      if (got <= 0) return false;
      at += got, begin += got, count -= got;
    }
    return true;
  }

 private:
  int fd_;
  int64_t size_ = -1;
};

struct ImageSize {
  int32_t width = 0, height = 0;
};

class JpegHeader {
 public:
  explicit JpegHeader(const OpenFile& file) : file_(file) {}

  // Return whether Pillow opens the file as a JPEG of 8 bits and no turn, whose end is there.
  bool is_plain(ImageSize& size) {
    uint8_t end[2];
    if (file_.size() < 4 || !file_.read(end, file_.size() - 2, 2) || end[0] != 0xff || end[1] != 0xd9) return false;
    if (!has(2) || byte(0) != 0xff || byte(1) != 0xd8) return false;
    bool sized = false, described = false;
    for (int64_t at = 2;;) {
      if (!has(at + 4) || byte(at) != 0xff) return false;
      const int marker = byte(at + 1);
      const int64_t length = big(at + 2) - 2, begin = at + 4;
      if (length < 0 || !has(begin + length)) return false;
      const uint8_t* segment = data_.data() + begin;
      switch (marker) {
        case 0xda:
          return sized && size.width > 9 && size.height > 9 && int64_t{size.width} * size.height <= kMostPixels;
        case 0xc0:
        case 0xc1:
        case 0xc2:
          if (sized || length < 6 || segment[0] != 8 || (segment[5] != 1 && segment[5] != 3)) return false;
          if (length != 6 + 3 * segment[5]) return false;
          size = {big(begin + 3), big(begin + 1)};
          sized = true;
          break;
        case 0xdb:
          if (!are_tables(segment, length)) return false;
          break;
        case 0xe1:
          if (starts(segment, length, {"Exif\0\0", 6})) {
            if (described || !is_unturned(segment + 6, length - 6)) return false;
            described = true;
          } else if (std::string_view(reinterpret_cast<const char*>(segment), length).find("Orientation") !=
                     std::string_view::npos) {
            return false;
          }
          break;
        case 0xe0:
          if (length < 14 && starts(segment, length, "JFIF")) return false;
          break;
        case 0xe2:  // several images, or a colour profile
          if (starts(segment, length, "MPF") || (length < 14 && starts(segment, length, "ICC_PROFILE"))) return false;
          break;
        case 0xed:
          if (starts(segment, length, "Photoshop")) return false;
          break;
        case 0xee:
          if (length < 12 && starts(segment, length, "Adobe")) return false;
          break;
        default:
          if (marker != 0xc4 && marker != 0xdd && marker != 0xfe && (marker & 0xf0) != 0xe0) return false;
      }
      at = begin + length;
    }
  }

 private:
  static constexpr int64_t kMostPixels = 80'000'000;  // Pillow warns of more than 89 million

  int byte(int64_t at) const { return data_[at]; }
  int32_t big(int64_t at) const { return data_[at] << 8 | data_[at + 1]; }
  static bool starts(const uint8_t* data, int64_t length, std::string_view text) {
    return length >= static_cast<int64_t>(text.size()) && std::memcmp(data, text.data(), text.size()) == 0;
  }

  bool has(int64_t end) {
    const int64_t here = static_cast<int64_t>(data_.size());
    if (end <= here) return true;
    if (end > file_.size()) return false;
    data_.resize(std::min(file_.size(), std::max<int64_t>(end + 1024, 2048)));
    return file_.read(data_.data() + here, here, static_cast<int64_t>(data_.size()) - here);
  }

  static bool are_tables(const uint8_t* data, int64_t length) {
    int64_t at = 0;
    while (at < length) at += data[at] >> 4 ? 129 : 65;
    return at == length;
  }

  // Exif whose directories are whole, and that does not say how the image is turned, or says that it is not.
  static bool is_unturned(const uint8_t* data, int64_t length) {
    const bool little = starts(data, length, {"II*\0", 4});
    if (length < 8 || (!little && !starts(data, length, {"MM\0*", 4}))) return false;
    return is_directory(data, length, number(data + 4, 4, little), little, true);
  }

  static int64_t number(const uint8_t* data, int bytes, bool little) {
    int64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= int64_t{data[i]} << 8 * (little ? i : bytes - 1 - i);
    return value;
  }

  static bool is_directory(const uint8_t* data, int64_t length, int64_t begin, bool little, bool first) {
    constexpr int kBytes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8};
    if (begin < 8 || begin + 2 > length) return false;
    const int64_t entries = number(data + begin, 2, little);
    if (begin + 2 + entries * 12 + 4 > length) return false;
    for (int64_t i = 0; i < entries; i++) {
      const uint8_t* entry = data + begin + 2 + i * 12;
      const int64_t tag = number(entry, 2, little), type = number(entry + 2, 2, little);
      const int64_t count = number(entry + 4, 4, little), offset = number(entry + 8, 4, little);
      if (type < 1 || type > 12) return false;
      if (count * kBytes[type] > 4 && offset + count * kBytes[type] > length) return false;
      if (tag == 0x112 && (!first || type != 3 || count != 1 || number(entry + 8, 2, little) != 1)) return false;
      const bool nested = tag == 0x8769 || tag == 0x8825;
      if (nested && (!first || type != 4 || count != 1 || !is_directory(data, length, offset, little, false)))
        return false;
    }
    return true;
  }

  const OpenFile& file_;
  std::vector<uint8_t> data_;
};

using LabelRow = std::array<float, 5>;  // class, and x, y, width and height as shares of the image

struct Labels {
  std::vector<LabelRow> rows;
  std::vector<int64_t> lengths;  // points of each row's polygon, 0 where the file has a box
  std::vector<float> points;     // x and y of all polygons
};

inline LabelRow around(float kind, const float* points, size_t count) {
  float left = points[0], top = points[1], right = left, bottom = top;
  for (size_t i = 1; i < count; i++) {
    left = std::min(left, points[2 * i]), right = std::max(right, points[2 * i]);
    top = std::min(top, points[2 * i + 1]), bottom = std::max(bottom, points[2 * i + 1]);
  }
  return {kind, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top};
}

// Read a label file of boxes or of polygons, all in range, with classes below `classes`, and no box twice.
inline bool read_plain_labels(std::string_view text, float classes, Labels& labels) {
  const auto ends_line = [](char c) { return c == '\n' || c == '\r'; };
  const auto is_space = [&](char c) { return c == ' ' || c == '\t'; };
  std::vector<float> line;
  for (size_t at = 0; at < text.size();) {
    if (ends_line(text[at])) {
      at++;
      continue;
    }
    line.clear();
    while (at < text.size() && !ends_line(text[at])) {
      if (is_space(text[at])) {
        at++;
        continue;
      }
      if (text[at] < '0' || text[at] > '9') return false;
      double value;  // as Python reads it, and NumPy rounds that
      const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), value);
      at = end - text.data();
      if (error != std::errc() || (at < text.size() && !is_space(text[at]) && !ends_line(text[at]))) return false;
      line.push_back(static_cast<float>(value));
    }
    if (line.size() < 5 || *std::max_element(line.begin() + 1, line.end()) > 1) return false;
    const float kind = line[0];
    if (kind >= classes || kind != static_cast<float>(static_cast<int64_t>(kind))) return false;
    const size_t count = line.size() == 5 ? 0 : line.size() / 2;
    if (line.size() % 2 == 0 || (!labels.lengths.empty() && !labels.lengths[0] != !count)) return false;
    labels.rows.push_back(count ? around(kind, &line[1], count) : LabelRow{kind, line[1], line[2], line[3], line[4]});
    labels.lengths.push_back(static_cast<int64_t>(count));
    if (count) labels.points.insert(labels.points.end(), line.begin() + 1, line.end());
  }
  std::vector<LabelRow> sorted = labels.rows;
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

// The rows of an image's label file, kMissing where there is none, or kNotPlain.
constexpr int64_t kMissing = -1, kNotPlain = -2;

inline int64_t scan_plain(const char* image, const char* label_file, float classes, ImageSize& size, Labels& labels) {
  constexpr int64_t kMostBytes = 1 << 24;
  const OpenFile encoded(image);
  if (!JpegHeader(encoded).is_plain(size)) return kNotPlain;
  struct stat status;
  if (::stat(label_file, &status) != 0) return errno == ENOENT ? kMissing : kNotPlain;
  const OpenFile file(label_file);
  if (file.size() < 0 || file.size() > kMostBytes) return kNotPlain;
  std::string text(file.size(), '\0');
  if (!file.read(text.data(), 0, file.size()) || !read_plain_labels(text, classes, labels)) {
    labels = {};
    return kNotPlain;
  }
  return static_cast<int64_t>(labels.rows.size());
}

}  // namespace torch_fastdet::core
