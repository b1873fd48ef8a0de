// Pack a JPEG file, on the host only: remove stuffed bytes and markers, and read every code of the scan once, to build
// the index and to check the file.
//
// A file passes if every code exists, no block has more than 64 coefficients, no MCU is missing, no restart interval is
// read past its end, and restart markers count from 0 to 7. Then its decoded pixels do not depend on any repair.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/jpeg/jpeg_file.h"
#include "core/jpeg/jpeg_scan.h"

namespace torch_fastdet::core {

class JpegPacker {
 public:
  // Ask another thread to run a function, soon or never.
  using Ask = std::function<void(std::function<void()>)>;

  // Segments have 1 << `segment_bits` MCUs. Up to `helpers` threads read a scan without restarts, piece by piece.
  explicit JpegPacker(int segment_bits = kJpegMaxSegmentBits, int helpers = 0, Ask ask = nullptr,
                      int64_t piece_bytes = 4096)
      : segment_bits_(static_cast<uint8_t>(segment_bits)),
        helpers_(helpers),
        ask_(std::move(ask)),
        piece_bytes_(piece_bytes) {}

  // Return null and the packed JPEG, or the reason why the file is refused and an empty result.
  const char* pack(const uint8_t* data, int64_t size, std::vector<uint8_t>& packed) {
    packed.clear();
    const char* reason = pack_or_refuse(data, size, packed);
    if (reason) packed.clear();
    return reason;
  }

  // Return how many MCUs of the last file were read by other threads.
  int64_t helped() const { return helped_; }

 private:
  static constexpr size_t kAhead = JpegScan::kAhead;
  // Limit the MCUs of a scan that several threads read: each takes up to 64 bytes of memory.
  static constexpr uint32_t kMostShared = 1 << 20;

  const char* pack_or_refuse(const uint8_t* data, int64_t size, std::vector<uint8_t>& packed) {
    file_ = JpegFile{};
    if (const char* reason = JpegParser(data, size).parse(file_)) return reason;
    const int64_t rest = data + size - file_.scan;
    if (rest > int64_t{1} << 28) return "too large";
    fill_header();
    // Each block has at least two 1-bit codes. Refuse a header that promises more before allocating memory.
    const int64_t mcus = int64_t{header_.mcu_columns} * header_.mcu_rows;
    if (mcus * header_.mcu_blocks * 2 > rest * 8) return "cut short";
    if (mcus > int64_t{1} << 30) return "too large";
    header_.interval = file_.interval && file_.interval < mcus ? file_.interval : static_cast<uint32_t>(mcus);
    header_.interval_segments = static_cast<uint32_t>(ceil_div(header_.interval, jpeg_segment(header_)));
    const int64_t whole = mcus / header_.interval, left = mcus % header_.interval;
    header_.segments = static_cast<uint32_t>(whole * header_.interval_segments + ceil_div(left, jpeg_segment(header_)));
    const size_t fixed = lay_out();
    packed.resize(fixed + static_cast<size_t>(rest) + kAhead);
    scan_ = packed.data() + header_.scan;
    if (!destuff(data + size)) return kShort;
    std::memset(scan_ + scan_bytes_, 0, kAhead);
    if (const char* reason = index(packed.data())) return reason;
    finish(packed);
    return nullptr;
  }

  void fill_header() {
    JpegHeader& h = header_;
    h = JpegHeader{};
    h.magic = kJpegMagic, h.segment_bits = segment_bits_;
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

  // Set the offsets of the parts, and return the size of everything before the scan.
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

  // Copy the scan and record where restart markers were. The scan ends at the first marker that is not the next of
  // those. Return false if there is none: OpenCV then decodes the file differently from a path and from memory.
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
    const auto note = [&](uint32_t number, const JpegMcu& at) {
      if (number % jpeg_segment(h)) return;
      *starts++ = at.bit;
      for (int i = 0; i < h.components; ++i) *predictors++ = static_cast<int16_t>(at.predictor[i]);
    };
    const uint32_t mcus = jpeg_mcus(h);
    const JpegScan scan = scan_with_tables();
    const std::shared_ptr<JpegPieces> pieces = shared_pieces(scan, mcus);
    const char* reason = read(scan, pieces.get(), note);
    if (pieces) pieces->skip_to(pieces->count());
    return reason;
  }

  // Call note with each MCU's number within its restart interval and its start. Return null or the reason for refusal.
  template <class Note>
  const char* read(const JpegScan& scan, JpegPieces* pieces, const Note& note) {
    const JpegHeader& h = header_;
    const uint32_t mcus = jpeg_mcus(h);
    helped_ = 0;
    size_t restart = 0;
    int64_t begin = 0;
    for (uint32_t mcu = 0; mcu < mcus; mcu += h.interval, ++restart) {
      const bool last = mcus - mcu <= h.interval;
      if (!last && restart >= restarts_.size()) return kDamaged;
      const int64_t end = last ? scan_bytes_ : restarts_[restart];
      JpegByteBits bits(scan_, begin);
      JpegMcu at;
      const uint32_t count = last ? mcus - mcu : h.interval;
      for (uint32_t m = 0; m < count; ++m) {
        at.bit = static_cast<uint32_t>(bits.position());
        note(m, at);
        if (pieces) {
          const uint32_t before = m;
          pieces->follow(at, [&](const JpegMcu& next) {
            if (m + 1 == count) return false;
            at = next;
            note(++m, at);
            return true;
          });
          if (m > before) bits.go_to(at.bit);
          helped_ += m - before;
        }
        const JpegScan::Found found = scan.skip_mcu(bits, at.predictor, end * 8, [](int) {});
        if (found != JpegScan::Found::kMcu) return last && found == JpegScan::Found::kEnd ? kShort : kDamaged;
      }
      // Before a restart there may only be padding to a whole byte.
      if (!last && end * 8 - bits.position() >= 8) return kDamaged;
      begin = end;
      if (last) used_bits_ = bits.position();
    }
    return nullptr;
  }

  JpegScan scan_with_tables() const {
    const JpegHeader& h = header_;
    JpegScan scan;
    scan.data = scan_, scan.bytes = scan_bytes_;
    std::shared_ptr<const JpegSkipTable> tables[kJpegMaxTables];
    for (int i = 0; i < h.tables; ++i) tables[i] = JpegSkipTables::get(*tables_[i], is_ac_[i]);
    for (int i = 0; i < h.components; ++i) {
      for (int j = 0; j < h.component[i].h * h.component[i].v; ++j) {
        scan.block[scan.blocks++] = {tables[h.component[i].dc], tables[h.component[i].ac], i};
      }
    }
    return scan;
  }

  std::shared_ptr<JpegPieces> shared_pieces(const JpegScan& scan, uint32_t mcus) const {
    if (!helpers_ || scan.bytes < 2 * piece_bytes_ || header_.interval != mcus || mcus > kMostShared) return nullptr;
    auto pieces = std::make_shared<JpegPieces>(scan, piece_bytes_, mcus);
    for (int i = 0; i < helpers_; ++i) ask_([pieces] { pieces->help(); });
    return pieces;
  }

  // Cut off the bytes that were not read, and convert the rest to words.
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
  uint8_t segment_bits_;
  int helpers_;
  Ask ask_;
  int64_t piece_bytes_, helped_ = 0;
};

}  // namespace torch_fastdet::core
