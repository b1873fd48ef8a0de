// Read the markers of a JPEG file up to its scan, on the host only.
//
// The parser accepts the files that OpenCV decodes without a warning, according to ITU-T T.81, JFIF, Adobe's APP14 and
// EXIF. It refuses all others with a short reason: OpenCV repairs some of them, but its repairs are not documented.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/jpeg/jpeg.h"

namespace torch_fastdet::core {

struct JpegHuffman {
  uint8_t counts[16];  // codes of each length
  uint8_t symbols[256];
  bool defined;

  int codes() const {
    int n = 0;
    for (const uint8_t count : counts) n += count;
    return n;
  }
};

struct JpegFile {
  struct Component {
    int id, h, v, quantizer, dc, ac;
  };
  int width = 0, height = 0, components = 0, orientation = 1;
  JpegColor color = JpegColor::kYcc;
  uint32_t interval = 0;  // MCUs between restarts; 0 if there are none
  Component component[3]{};
  uint16_t quantizers[4][kJpegBlock]{};  // in zigzag order
  bool has_quantizer[4]{};
  JpegHuffman dc[4]{}, ac[4]{};
  const uint8_t* scan = nullptr;
};

// Define T.81's tables K.3 to K.6, which decoders assume if a file has none (frames of Motion JPEG).
inline void define_standard_tables(JpegFile& file) {
  static constexpr uint8_t kDcCounts[2][16] = {{0, 1, 5, 1, 1, 1, 1, 1, 1}, {0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1}};
  static constexpr uint8_t kAcCounts[2][16] = {{0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125},
                                               {0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 119}};
  static constexpr uint8_t kAcSymbols[2][162] = {
      {0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22, 0x71,
       0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72,
       0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x34, 0x35, 0x36, 0x37,
       0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59,
       0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83,
       0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a, 0xa2, 0xa3,
       0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3,
       0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2,
       0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa},
      {0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13, 0x22,
       0x32, 0x81, 0x08, 0x14, 0x42, 0x91, 0xa1, 0xb1, 0xc1, 0x09, 0x23, 0x33, 0x52, 0xf0, 0x15, 0x62, 0x72, 0xd1,
       0x0a, 0x16, 0x24, 0x34, 0xe1, 0x25, 0xf1, 0x17, 0x18, 0x19, 0x1a, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x35, 0x36,
       0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58,
       0x59, 0x5a, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a,
       0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9a,
       0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6, 0xb7, 0xb8, 0xb9, 0xba,
       0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda,
       0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8, 0xe9, 0xea, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa}};
  static constexpr uint8_t kDcSymbols[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const auto define = [](JpegHuffman& table, const uint8_t(&counts)[16], const uint8_t* symbols, size_t size) {
    if (table.defined) return;
    std::memcpy(table.counts, counts, 16);
    std::memcpy(table.symbols, symbols, size);
    table.defined = true;
  };
  for (int i = 0; i < 2; ++i) {
    define(file.dc[i], kDcCounts[i], kDcSymbols, 12);
    define(file.ac[i], kAcCounts[i], kAcSymbols[i], 162);
  }
}

// Read EXIF's orientation from a TIFF header and its first directory.
class ExifReader {
 public:
  ExifReader(const uint8_t* data, int64_t size) : data_(data), size_(size) {}

  // OpenCV treats every byte-order mark other than "II" as "MM".
  bool is_tiff() const { return size_ >= 8 && read16(2) == 42; }

  // Set `orientation` if an entry has a value other than 1. Return false if readers may disagree on the directory.
  bool read(int& orientation) const {
    const int64_t directory = read32(4);
    if (directory + 2 > size_) return false;
    const int entries = read16(directory);
    bool found = false, whole = little() || (data_[0] == 'M' && data_[1] == 'M');
    for (int i = 0; i < entries; ++i) {
      const int64_t entry = directory + 2 + int64_t{12} * i;
      if (entry + 10 > size_) return false;
      if (read16(entry) == 0x0112) {  // OpenCV reads only these ten bytes of the entry
        whole = whole && !found;
        found = true;
        const int value = read16(entry + 8);
        if (value >= 2 && value <= 8) orientation = value;
      }
      if (entry + 12 > size_) return false;
      whole = whole && has_value(entry);
    }
    return whole;
  }

 private:
  bool has_value(int64_t entry) const {
    static constexpr uint8_t kBytes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8};
    const int type = read16(entry + 2);
    if (type < 1 || type > 12) return false;
    const int64_t bytes = int64_t{kBytes[type]} * read32(entry + 4);
    return bytes <= 4 || int64_t{read32(entry + 8)} + bytes <= size_;
  }
  bool little() const { return data_[0] == 'I' && data_[1] == 'I'; }
  int read16(int64_t at) const { return little() ? data_[at] | data_[at + 1] << 8 : data_[at] << 8 | data_[at + 1]; }
  uint32_t read32(int64_t at) const {
    const auto first = static_cast<uint32_t>(read16(at)), second = static_cast<uint32_t>(read16(at + 2));
    return little() ? first | second << 16 : first << 16 | second;
  }

  const uint8_t* data_;
  int64_t size_;
};

class JpegParser {
 public:
  JpegParser(const uint8_t* data, int64_t size) : at_(data), end_(data + size) {}

  // Return null, or the reason why the file is refused.
  const char* parse(JpegFile& file) {
    if (end_ - at_ < 4 || at_[0] != 0xff || at_[1] != 0xd8 || at_[2] != 0xff) return "no JPEG";
    at_ += 2;
    for (;;) {
      if (end_ - at_ < 2) return kCut;
      if (*at_ != 0xff) return kDamaged;
      while (at_ < end_ && *at_ == 0xff) ++at_;  // fill bytes
      if (at_ == end_) return kCut;
      const int marker = *at_++;
      if (marker == 0xd9) return kCut;
      if (marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8) || marker == 0) return kDamaged;
      if (end_ - at_ < 2) return kCut;
      const int64_t length = at_[0] << 8 | at_[1];
      if (length < 2) return kDamaged;
      if (length > end_ - at_) return kCut;
      const uint8_t* body = at_ + 2;
      at_ += length;
      if (marker == 0xda) return finish(file, body);
      if (const char* reason = segment(file, marker, body, length - 2)) return reason;
    }
  }

 private:
  static constexpr const char* kCut = "cut short";
  static constexpr const char* kDamaged = "damaged";

  const char* segment(JpegFile& file, int marker, const uint8_t* body, int64_t size) {
    switch (marker) {
      case 0xc0:
      case 0xc1:
        return frame(file, body, size);
      case 0xc2:
        return "progressive";
      case 0xc9:
      case 0xca:
      case 0xcb:
      case 0xcc:  // arithmetic coding tables: libjpeg checks them even in files that do not need them
      case 0xcd:
      case 0xce:
      case 0xcf:
        return "arithmetic coding";
      case 0xc3:
      case 0xc5:
      case 0xc6:
      case 0xc7:
      case 0xc8:
        return "lossless or hierarchical";
      case 0xc4:
        return huffman_tables(file, body, size);
      case 0xdb:
        return quantizers(file, body, size);
      case 0xdc:
        return "its height comes after the scan";
      case 0xdd:
        if (size != 2) return kDamaged;
        file.interval = static_cast<uint32_t>(body[0] << 8 | body[1]);
        return nullptr;
      case 0xe0:
        jfif_ = jfif_ || (size >= 14 && !std::memcmp(body, "JFIF", 5));
        return nullptr;
      case 0xe1:
        return exif(file, body, size);
      case 0xee:
        if (size >= 12 && !std::memcmp(body, "Adobe", 5)) adobe_ = body[11];
        return nullptr;
      default:
        return (marker >= 0xe0 && marker <= 0xef) || marker == 0xfe ? nullptr : "an unknown marker";
    }
  }

  // OpenCV reads only the first APP1.
  const char* exif(JpegFile& file, const uint8_t* body, int64_t size) {
    const ExifReader reader(body + 6, size - 6);
    int orientation = 1;
    if (size > 6 && reader.is_tiff()) {
      const bool whole = reader.read(orientation) && !std::memcmp(body, "Exif\0\0", 6);
      if (orientation != 1 && (!whole || app1_)) return "damaged EXIF";
    }
    if (!app1_) file.orientation = orientation;
    app1_ = true;
    return nullptr;
  }

  const char* quantizers(JpegFile& file, const uint8_t* body, int64_t size) {
    while (size > 0) {
      const int wide = *body >> 4, id = *body & 15, bytes = kJpegBlock * (1 + wide);
      if (wide > 1 || id > 3 || size < 1 + bytes) return kDamaged;
      ++body;
      for (int i = 0; i < kJpegBlock; ++i) {
        file.quantizers[id][i] = static_cast<uint16_t>(wide ? body[2 * i] << 8 | body[2 * i + 1] : body[i]);
      }
      file.has_quantizer[id] = true;
      body += bytes, size -= 1 + bytes;
    }
    return nullptr;
  }

  const char* huffman_tables(JpegFile& file, const uint8_t* body, int64_t size) {
    while (size > 0) {
      if (size < 17) return kDamaged;
      const int kind = *body >> 4, id = *body & 15;
      if (kind > 1 || id > 3) return kDamaged;
      JpegHuffman table{};
      std::memcpy(table.counts, body + 1, 16);
      const int codes = table.codes();
      if (codes > 256 || size < 17 + codes) return kDamaged;
      std::memcpy(table.symbols, body + 17, static_cast<size_t>(codes));
      table.defined = true;
      int64_t code = 0;
      for (int length = 1; length <= 16; ++length) {
        code += table.counts[length - 1];
        if (code > int64_t{1} << length) return kDamaged;
        code *= 2;
      }
      for (int i = 0; kind == 0 && i < codes; ++i) {
        if (table.symbols[i] > 15) return kDamaged;
      }
      JpegHuffman* const of_kind = kind ? file.ac : file.dc;
      of_kind[id] = table;
      body += 17 + codes, size -= 17 + codes;
    }
    return nullptr;
  }

  const char* frame(JpegFile& file, const uint8_t* body, int64_t size) {
    if (file.components || size < 6) return kDamaged;
    if (body[0] != 8) return "12 bits a sample";
    file.height = body[1] << 8 | body[2], file.width = body[3] << 8 | body[4];
    const int components = body[5];
    if (size != 6 + 3 * components) return kDamaged;
    if (file.height == 0 || file.width == 0) return "no size";
    if (file.height > kJpegMaxSide || file.width > kJpegMaxSide || int64_t{file.height} * file.width > kJpegMaxPixels) {
      return "too large";
    }
    if (components == 4) return "four components";
    if (components != 1 && components != 3) return "its number of components";
    file.components = components;
    for (int i = 0; i < components; ++i) {
      const uint8_t* c = body + 6 + 3 * i;
      file.component[i] = {c[0], c[1] >> 4, c[1] & 15, c[2], 0, 0};
      const JpegFile::Component& mine = file.component[i];
      if (mine.h < 1 || mine.h > 4 || mine.v < 1 || mine.v > 4 || mine.quantizer > 3) return kDamaged;
      for (int j = 0; j < i; ++j) {
        if (file.component[j].id == mine.id) return kDamaged;
      }
    }
    return nullptr;
  }

  // Read the header of the scan, and check that everything it refers to is defined.
  const char* finish(JpegFile& file, const uint8_t* body) {
    if (!file.components) return kDamaged;
    const int64_t size = at_ - body;
    if (size < 1 || size != 4 + 2 * body[0]) return kDamaged;
    if (body[0] != file.components) return "several scans";
    define_standard_tables(file);
    int blocks = 0, h = 1, v = 1;
    for (int i = 0; i < file.components; ++i) {
      JpegFile::Component& c = file.component[i];
      if (body[1 + 2 * i] != c.id) return kDamaged;
      c.dc = body[2 + 2 * i] >> 4, c.ac = body[2 + 2 * i] & 15;
      if (c.dc > 3 || c.ac > 3 || !file.dc[c.dc].defined || !file.ac[c.ac].defined) return "a table is missing";
      if (!file.has_quantizer[c.quantizer]) return "a table is missing";
      if (file.components == 1) c.h = c.v = 1;  // their only block is the MCU
      blocks += c.h * c.v, h = std::max(h, c.h), v = std::max(v, c.v);
    }
    const uint8_t* rest = body + 1 + 2 * file.components;
    if (rest[0] != 0 || rest[1] != 63 || rest[2] != 0) return kDamaged;
    if (blocks > kJpegMaxBlocks) return kDamaged;
    for (int i = 0; i < file.components; ++i) {
      if (h % file.component[i].h || v % file.component[i].v) return "fractional sampling";
    }
    file.color = file.components == 1 ? JpegColor::kGrey : is_rgb(file) ? JpegColor::kRgb : JpegColor::kYcc;
    file.scan = at_;
    return nullptr;
  }

  bool is_rgb(const JpegFile& file) const {
    if (jfif_) return false;
    if (adobe_ >= 0) return adobe_ == 0;
    return file.component[0].id == 'R' && file.component[1].id == 'G' && file.component[2].id == 'B';
  }

  const uint8_t* at_;
  const uint8_t* end_;
  bool jfif_ = false, app1_ = false;
  int adobe_ = -1;  // transform of the last APP14 marker
};

}  // namespace torch_fastdet::core
