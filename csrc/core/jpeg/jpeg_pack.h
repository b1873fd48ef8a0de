// From a JPEG file to a packed JPEG: takes out stuffed bytes and markers, and reads every code of the scan once, for
// the index and as a judge. Host only.
//
// A file passes if each code exists, no block has more than 64 coefficients, every MCU is there, no restart interval is
// read beyond its end, and restart markers count from 0 to 7. Then what a decoder makes of it depends on no repair.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/jpeg/jpeg_file.h"

namespace torch_fastdet::core {

inline uint32_t jpeg_load32(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) << 24 | static_cast<uint32_t>(p[1]) << 16 | static_cast<uint32_t>(p[2]) << 8 |
         p[3];
}
inline uint64_t jpeg_load64(const uint8_t* p) {
  return static_cast<uint64_t>(jpeg_load32(p)) << 32 | jpeg_load32(p + 4);
}

// A Huffman table for reading without values.
class JpegSkipTable {
 public:
  static constexpr uint32_t kAlone = 127;  // grows() of an entry that says nothing: take one code by itself

  // `several`: an entry stands for as many codes as it has bits for. It then takes far longer to make.
  JpegSkipTable(const JpegHuffman& table, bool is_ac, bool several) : table_(table), bits_(several ? 14 : 12) {
    uint32_t code = 0, row = 0;
    if (is_ac) entries_.assign(size_t{1} << bits_, kAlone << 5);
    for (uint32_t length = 1; length <= 16; ++length) {
      row_[length] = row - code;
      for (uint32_t i = 0; i < table.counts[length - 1]; ++i, ++code, ++row) {
        const uint32_t one = length << 8 | table.symbols[row];
        if (length <= kFirstBits) fill(first_, kFirstBits, code, length, one);
        if (is_ac && !several && length <= bits_) fill(entries_.data(), bits_, code, length, entry_of(one));
      }
      limit_[length] = code << (16 - length);
      code <<= 1;
    }
    if (!is_ac || !several) return;
    for (uint32_t x = 0; x < entries_.size(); ++x) entries_[x] = several_from(x << (16 - bits_));
  }

  // What the next bits() bits are: 5 bits, how many of them are taken; 7 bits, by how much the coefficient's number
  // grows; 1 bit, whether the block ends. AC tables only.
  const uint16_t* entries() const { return entries_.data(); }
  int bits() const { return static_cast<int>(bits_); }

  // The next code's length << 8 | its symbol, from the next 16 bits; 0: no such code.
  uint32_t one(uint32_t next) const {
    if (const uint32_t found = first_[next >> (16 - kFirstBits)]) return found;
    for (uint32_t length = kFirstBits + 1; length <= 16; ++length) {
      if (next < limit_[length]) return length << 8 | table_.symbols[(row_[length] + (next >> (16 - length))) & 255];
    }
    return 0;
  }

 private:
  static constexpr uint32_t kFirstBits = 9;

  static void fill(uint16_t* to, uint32_t bits, uint32_t code, uint32_t length, uint32_t value) {
    std::fill_n(to + (code << (bits - length)), size_t{1} << (bits - length), static_cast<uint16_t>(value));
  }

  static uint32_t entry_of(uint32_t one) {
    const uint32_t run = one >> 4 & 15, size = one & 15;
    const bool ends = !size && run != 15;
    return ((one >> 8) + size) | (ends ? 0 : run + 1) << 5 | uint32_t{ends} << 12;
  }

  uint16_t several_from(uint32_t next) const {
    uint32_t taken = 0, grows = 0, ends = 0;
    while (taken < bits_ && !ends) {
      const uint32_t code = one(next << taken & 0xffff), entry = entry_of(code), length = code >> 8;
      if (!code || taken + length > bits_) break;
      // The first code's value may lie behind these bits.
      if (taken && taken + (entry & 31) > bits_) break;
      if (grows + (entry >> 5 & 127) > 63) break;
      taken += entry & 31, grows += entry >> 5 & 127, ends = entry >> 12;
    }
    return static_cast<uint16_t>(taken ? taken | grows << 5 | ends << 12 : kAlone << 5);
  }

  JpegHuffman table_;
  uint32_t bits_;
  uint16_t first_[1 << kFirstBits]{};
  uint32_t limit_[17]{}, row_[17]{};  // by length; see JpegLookup
  std::vector<uint16_t> entries_;
};

// Tables by their contents: most files have the standard ones. A table is made for several codes a look-up when it
// comes a second time.
class JpegSkipTables {
 public:
  static std::shared_ptr<const JpegSkipTable> get(const JpegHuffman& table, bool is_ac) {
    static auto* const tables = new JpegSkipTables;  // never destroyed: threads may outlive static objects
    return tables->find(table, is_ac);
  }

 private:
  static constexpr size_t kKept = 64;

  struct Entry {
    std::shared_ptr<const JpegSkipTable> table;
    int uses = 0;
  };

  std::shared_ptr<const JpegSkipTable> find(const JpegHuffman& table, bool is_ac) {
    const std::string key = std::string(is_ac ? "a" : "d") +
                            std::string(reinterpret_cast<const char*>(table.counts), 16) +
                            std::string(reinterpret_cast<const char*>(table.symbols), size_t(table.codes()));
    int uses = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = entries_.find(key);
      if (found != entries_.end()) {
        uses = ++found->second.uses;
        if (uses != 2) return found->second.table;
      }
    }
    auto made = std::make_shared<const JpegSkipTable>(table, is_ac, uses == 2);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() >= kKept) entries_.clear();
    Entry& entry = entries_[key];
    entry.table = made;
    entry.uses = std::max(entry.uses, std::max(uses, 1));
    return made;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, Entry> entries_;
};

// Bits of bytes without stuffing; at least 8 bytes more than are asked for must be readable.
class JpegByteBits {
 public:
  JpegByteBits(const uint8_t* data, int64_t first) : begin_(data), next_(data + first) {}

  // At least 56 bits can be taken after it.
  void fill() {
    buffer_ |= jpeg_load64(next_) >> count_;
    next_ += (63 - count_) >> 3;
    count_ |= 56;
  }
  uint32_t peek(int bits) const { return static_cast<uint32_t>(buffer_ >> (64 - bits)); }
  void take(uint32_t bits) { buffer_ <<= bits, count_ -= bits; }
  int64_t position() const { return (next_ - begin_) * 8 - count_; }

 private:
  const uint8_t* begin_;
  const uint8_t* next_;
  uint64_t buffer_ = 0;
  uint32_t count_ = 0;
};

// A fast hash of memory: not against malice, but against writers that were killed and disks that fail.
inline uint64_t jpeg_checksum(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  uint64_t lanes[4] = {1, 2, 3, 4};
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * 0x9e3779b97f4a7c15u;
    return lane ^ lane >> 29;
  };
  size_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    for (int j = 0; j < 4; ++j) {
      uint64_t word;
      std::memcpy(&word, p + i + 8 * j, 8);
      lanes[j] = mix(lanes[j], word);
    }
  }
  for (; i < bytes; ++i) lanes[0] = mix(lanes[0], p[i]);
  return mix(mix(mix(mix(bytes, lanes[0]), lanes[1]), lanes[2]), lanes[3]);
}

// The bytes that a checksum covers begin here.
constexpr size_t kJpegChecked = offsetof(JpegHeader, width);

// Whether these bytes are what JpegPacker made: for one that was kept in a file.
inline bool is_packed_jpeg(const uint8_t* data, int64_t bytes) {
  JpegHeader header;
  if (bytes < kJpegHeaderBytes) return false;
  std::memcpy(&header, data, sizeof header);
  return jpeg_is_sound(header, bytes) &&
         header.checksum == jpeg_checksum(data + kJpegChecked, header.bytes - kJpegChecked);
}

// What comes before the scan of a packed JPEG: of the same file, it spares the pass over the scan.
struct JpegHead {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

// Makes a packed JPEG of a file.
class JpegPacker {
 public:
  // Null and the packed JPEG, or why the file is refused and an empty one.
  const char* pack(const uint8_t* data, int64_t size, std::vector<uint8_t>& packed, JpegHead head = {}) {
    packed.clear();
    const char* reason = pack_or_refuse(data, size, packed, head);
    if (reason) packed.clear();
    return reason;
  }

 private:
  // More than what a block of codes can take, and the eight bytes that a reader looks ahead.
  static constexpr size_t kAhead = 64 * 31 / 8 + 16;

  const char* pack_or_refuse(const uint8_t* data, int64_t size, std::vector<uint8_t>& packed, JpegHead head) {
    file_ = JpegFile{};
    if (const char* reason = JpegParser(data, size).parse(file_)) return reason;
    const int64_t rest = data + size - file_.scan;
    if (rest > int64_t{1} << 28) return "too large";
    fill_header();
    // Each block has at least two codes of one bit: what a header promises is no reason to allocate.
    const int64_t mcus = int64_t{header_.mcu_columns} * header_.mcu_rows;
    if (mcus * header_.mcu_blocks * 2 > rest * 8) return "cut short";
    if (mcus > int64_t{1} << 30) return "too large";
    header_.interval = file_.interval && file_.interval < mcus ? file_.interval : static_cast<uint32_t>(mcus);
    header_.interval_segments = static_cast<uint32_t>(ceil_div(header_.interval, kJpegSegment));
    const int64_t whole = mcus / header_.interval, left = mcus % header_.interval;
    header_.segments = static_cast<uint32_t>(whole * header_.interval_segments + ceil_div(left, kJpegSegment));
    const size_t fixed = lay_out();
    const auto read = [&] {
      packed.resize(fixed + static_cast<size_t>(rest) + kAhead);
      scan_ = packed.data() + header_.scan;
      if (!destuff(data + size)) return false;
      std::memset(scan_ + scan_bytes_, 0, kAhead);
      return true;
    };
    if (!read()) return kShort;
    if (head.bytes == header_.scan) {
      if (is_made_with(head, packed)) return nullptr;
      packed.clear();  // what lies between the parts is zero
      read();
    }
    if (const char* reason = index(packed.data())) return reason;
    finish(packed);
    return nullptr;
  }

  void fill_header() {
    JpegHeader& h = header_;
    h = JpegHeader{};
    h.magic = kJpegMagic;
    h.width = static_cast<uint16_t>(file_.width), h.height = static_cast<uint16_t>(file_.height);
    h.orientation = static_cast<uint8_t>(file_.orientation);
    h.components = static_cast<uint8_t>(file_.components), h.color = file_.color;
    for (int i = 0; i < file_.components; ++i) {
      h.h = std::max<uint8_t>(h.h, static_cast<uint8_t>(file_.component[i].h));
      h.v = std::max<uint8_t>(h.v, static_cast<uint8_t>(file_.component[i].v));
      h.mcu_blocks = static_cast<uint8_t>(h.mcu_blocks + file_.component[i].h * file_.component[i].v);
    }
    h.mcu_columns = static_cast<uint32_t>(ceil_div(h.width, 8 * h.h));
    h.mcu_rows = static_cast<uint32_t>(ceil_div(h.height, 8 * h.v));
    for (int i = 0; i < file_.components; ++i) {
      JpegComponent& c = h.component[i];
      c.h = static_cast<uint8_t>(file_.component[i].h), c.v = static_cast<uint8_t>(file_.component[i].v);
      c.ratio_x = h.h / c.h, c.ratio_y = h.v / c.v;
      c.width = static_cast<uint16_t>(ceil_div(h.width * c.h, h.h));
      c.height = static_cast<uint16_t>(ceil_div(h.height * c.v, h.v));
      const bool filters = c.width > 2;
      c.upsampling = c.ratio_x == 2 && c.ratio_y == 1 && filters   ? JpegUpsampling::kColumns
                     : c.ratio_x == 2 && c.ratio_y == 2 && filters ? JpegUpsampling::kBoth
                     : c.ratio_x == 1 && c.ratio_y == 2            ? JpegUpsampling::kRows
                                                                   : JpegUpsampling::kBox;
    }
  }

  // Where the parts are; the size of what comes before the scan.
  size_t lay_out() {
    JpegHeader& h = header_;
    size_t at = kJpegHeaderBytes;
    const auto part = [&](size_t bytes) {
      const size_t begin = at;
      at += (bytes + kJpegAlignment - 1) / kJpegAlignment * kJpegAlignment;
      return static_cast<uint32_t>(begin);
    };
    h.quantizers = part(size_t{2} * kJpegBlock * h.components);
    for (const bool is_ac : {false, true}) {
      for (int i = 0; i < h.components; ++i) {
        const auto table_of = [&](int j) { return is_ac ? file_.component[j].ac : file_.component[j].dc; };
        const auto row_of = [&](int j) -> uint8_t& { return is_ac ? h.component[j].ac : h.component[j].dc; };
        int same = 0;
        while (table_of(same) != table_of(i)) ++same;
        if (same < i) {
          row_of(i) = row_of(same);
        } else {
          const JpegHuffman* const of_kind = is_ac ? file_.ac : file_.dc;
          const JpegHuffman& table = of_kind[table_of(i)];
          tables_[h.tables] = &table, is_ac_[h.tables] = is_ac;
          row_of(i) = h.tables;
          h.table[h.tables++] = part(16 + size_t(table.codes()));
        }
      }
    }
    h.starts = part(size_t{4} * h.segments);
    h.predictors = part(size_t{2} * h.segments * h.components);
    h.scan = static_cast<uint32_t>(at);
    return at;
  }

  // Copies the scan, and notes where restart markers were. It ends at the first marker that is not the next of those.
  // False where there is none: what OpenCV makes of such a file depends on whether it reads from a path or from memory.
  bool destuff(const uint8_t* end) {
    restarts_.clear();
    const uint8_t* from = file_.scan;
    uint8_t* to = scan_;
    const uint32_t wanted = ceil_div(jpeg_mcus(header_), header_.interval) - 1;
    while (from < end) {
      const auto* stop = static_cast<const uint8_t*>(std::memchr(from, 0xff, static_cast<size_t>(end - from)));
      const size_t count = static_cast<size_t>((stop ? stop : end) - from);
      std::memcpy(to, from, count);
      to += count;
      if (!stop) return false;
      const uint8_t* code = stop + 1;
      if (code < end && *code == 0) {
        *to++ = 0xff;
        from = code + 1;
        continue;
      }
      while (code < end && *code == 0xff) ++code;  // fill bytes
      if (code == end) return false;
      scan_bytes_ = to - scan_;
      if (restarts_.size() == wanted || *code != 0xd0 + restarts_.size() % 8) return true;
      restarts_.push_back(to - scan_);
      from = code + 1;
    }
    return false;
  }

  const char* index(uint8_t* packed) {
    const JpegHeader& h = header_;
    auto* starts = reinterpret_cast<uint32_t*>(packed + h.starts);
    auto* predictors = reinterpret_cast<int16_t*>(packed + h.predictors);
    std::shared_ptr<const JpegSkipTable> tables[kJpegMaxTables];
    for (int i = 0; i < h.tables; ++i) tables[i] = JpegSkipTables::get(*tables_[i], is_ac_[i]);
    struct Block {
      const JpegSkipTable* dc;
      const JpegSkipTable* ac;
      int component;
    } blocks[kJpegMaxBlocks];
    int count = 0;
    for (int i = 0; i < h.components; ++i) {
      for (int j = 0; j < h.component[i].h * h.component[i].v; ++j) {
        blocks[count++] = {tables[h.component[i].dc].get(), tables[h.component[i].ac].get(), i};
      }
    }
    const uint32_t mcus = jpeg_mcus(h);
    size_t restart = 0;
    int64_t begin = 0;
    for (uint32_t mcu = 0; mcu < mcus; mcu += h.interval, ++restart) {
      const bool last = mcus - mcu <= h.interval;
      if (!last && restart >= restarts_.size()) return kDamaged;
      const int64_t end = last ? scan_bytes_ : restarts_[restart];
      JpegByteBits bits(scan_, begin);
      int predictor[3] = {0, 0, 0};
      const uint32_t stop = last ? mcus : mcu + h.interval;
      for (uint32_t m = mcu; m < stop; ++m) {
        if ((m - mcu) % kJpegSegment == 0) {
          *starts++ = static_cast<uint32_t>(bits.position());
          for (int i = 0; i < h.components; ++i) *predictors++ = static_cast<int16_t>(predictor[i]);
        }
        for (int b = 0; b < count; ++b) {
          const Block& block = blocks[b];
          if (!skip_block(bits, *block.dc, *block.ac, predictor[block.component])) return kDamaged;
          if (bits.position() > end * 8) return last ? kShort : kDamaged;
        }
      }
      // Padding to a byte, and no more, before a restart.
      if (!last && end * 8 - bits.position() >= 8) return kDamaged;
      begin = end;
      if (last) used_bits_ = bits.position();
    }
    return nullptr;
  }

  // Whether the index of `head` is this file's: then the packed JPEG is made with it.
  bool is_made_with(const JpegHead& head, std::vector<uint8_t>& packed) {
    JpegHeader made{};
    std::memcpy(&made, head.data, sizeof made);
    std::memcpy(packed.data() + header_.starts, head.data + header_.starts, header_.scan - header_.starts);
    used_bits_ = scan_bytes_ * 8;
    finish(packed);
    return header_.checksum == made.checksum;
  }

  static bool skip_block(JpegByteBits& bits, const JpegSkipTable& dc, const JpegSkipTable& ac, int& predictor) {
    bits.fill();
    const uint32_t code = dc.one(bits.peek(16)), length = code >> 8, size = code & 255;
    if (!code) return false;
    bits.take(length);
    if (size) {
      const auto value = static_cast<int>(bits.peek(static_cast<int>(size)));
      predictor += value >> (size - 1) ? value : value - (1 << size) + 1;
      bits.take(size);
      if (predictor != static_cast<int16_t>(predictor)) return false;
    }
    const int lookup = ac.bits();
    const uint16_t* entries = ac.entries();
    uint32_t i = 1;
    for (;;) {
      bits.fill();
      const uint32_t entry = entries[bits.peek(lookup)], grown = i + (entry >> 5 & 127);
      if (grown <= 63) {
        bits.take(entry & 31);
        i = grown;
        if (entry >> 12) return true;
        continue;
      }
      // The block's end is near, or the code is long: one code.
      const uint32_t one = ac.one(bits.peek(16)), run = one >> 4 & 15, bits_of_value = one & 15;
      if (!one) return false;
      bits.take((one >> 8) + bits_of_value);
      if (!bits_of_value && run != 15) return true;
      i += run + 1;
      if (i > 64) return false;
      if (i == 64) return true;
    }
  }

  // Cuts off what was not read, turns bytes into words, and signs.
  void finish(std::vector<uint8_t>& packed) {
    JpegHeader& h = header_;
    const size_t words = static_cast<size_t>(ceil_div(used_bits_, 32)) + 2;
    h.scan_words = static_cast<uint32_t>((words + 3) / 4 * 4);
    const size_t bytes = h.scan + size_t{4} * h.scan_words;
    packed.resize(std::max(bytes, packed.size()));
    const auto used = static_cast<size_t>(ceil_div(used_bits_, 8));
    std::fill(packed.begin() + static_cast<int64_t>(h.scan + used), packed.end(), uint8_t{0});
    packed.resize(bytes);
    uint8_t* scan = packed.data() + h.scan;
    for (uint32_t i = 0; i < h.scan_words; ++i) {
      const uint32_t word = jpeg_load32(scan + size_t{4} * i);
      std::memcpy(scan + size_t{4} * i, &word, 4);
    }
    for (int i = 0; i < h.components; ++i) {
      std::memcpy(packed.data() + h.quantizers + i * 2 * kJpegBlock, file_.quantizers[file_.component[i].quantizer],
                  2 * kJpegBlock);
    }
    for (int i = 0; i < h.tables; ++i) {
      std::memcpy(packed.data() + h.table[i], tables_[i]->counts, 16);
      std::memcpy(packed.data() + h.table[i] + 16, tables_[i]->symbols, static_cast<size_t>(tables_[i]->codes()));
    }
    h.bytes = static_cast<uint32_t>(bytes);
    std::memcpy(packed.data(), &h, sizeof h);
    h.checksum = jpeg_checksum(packed.data() + kJpegChecked, bytes - kJpegChecked);
    std::memcpy(packed.data(), &h, sizeof h);
  }

  static constexpr const char* kShort = "cut short";
  static constexpr const char* kDamaged = "damaged";

  JpegFile file_;
  JpegHeader header_{};
  const JpegHuffman* tables_[kJpegMaxTables]{};
  bool is_ac_[kJpegMaxTables]{};
  uint8_t* scan_ = nullptr;
  int64_t scan_bytes_ = 0, used_bits_ = 0;
  std::vector<int64_t> restarts_;
};

}  // namespace torch_fastdet::core
