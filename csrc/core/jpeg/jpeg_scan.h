// Read the scan of a JPEG file without its values, on the host only, to build the index and to check the file.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
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

// Look up Huffman codes without reading the values.
class JpegSkipTable {
 public:
  static constexpr uint32_t kAlone = 127;  // grows() of an entry without a result: read one code by itself

  // With `several`, an entry covers as many codes as fit in its bits. Building the table then takes far longer.
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

  // An AC entry for the next bits() has 5 bits for the bits taken, 7 for the index step and 1 for the end of the block.
  const uint16_t* entries() const { return entries_.data(); }
  int bits() const { return static_cast<int>(bits_); }

  // Return the next code's length << 8 | its symbol, given the next 16 bits, or 0 if there is no such code.
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
      // The value of the first code may extend past these bits.
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

// Cache tables by content, as most files have the standard ones. A repeated table gets several codes per look-up.
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

// Read bits from bytes without stuffing. At least 8 bytes beyond the requested ones must be readable.
class JpegByteBits {
 public:
  JpegByteBits(const uint8_t* data, int64_t first) : begin_(data), next_(data + first) {}

  // Refill the buffer, so that at least 56 bits can be taken.
  void fill() {
    buffer_ |= jpeg_load64(next_) >> count_;
    next_ += (63 - count_) >> 3;
    count_ |= 56;
  }
  uint32_t peek(int bits) const { return static_cast<uint32_t>(buffer_ >> (64 - bits)); }
  void take(uint32_t bits) { buffer_ <<= bits, count_ -= bits; }
  int64_t position() const { return (next_ - begin_) * 8 - count_; }
  void go_to(int64_t bit) {
    next_ = begin_ + bit / 8, buffer_ = 0, count_ = 0;
    fill();
    take(static_cast<uint32_t>(bit % 8));
  }

 private:
  const uint8_t* begin_;
  const uint8_t* next_;
  uint64_t buffer_ = 0;
  uint32_t count_ = 0;
};

struct JpegMcu {
  uint32_t bit = 0;
  int predictor[3]{};
};

struct JpegScan {
  // At least this many bytes must follow the scan: more than a block of codes can take, plus eight bytes of look-ahead.
  static constexpr size_t kAhead = 64 * 31 / 8 + 16;

  enum class Found { kMcu, kDamage, kEnd };

  struct Block {
    std::shared_ptr<const JpegSkipTable> dc, ac;
    int component = 0;
  };

  const uint8_t* data = nullptr;
  int64_t bytes = 0;
  Block block[kJpegMaxBlocks];  // blocks of an MCU
  int blocks = 0;

  // Read an MCU, which must end before bit `end`. Call `seen` with the component of each block.
  template <class Seen>
  Found skip_mcu(JpegByteBits& bits, int* predictor, int64_t end, const Seen& seen) const {
    for (int i = 0; i < blocks; ++i) {
      const Block& b = block[i];
      if (!skip_block(bits, *b.dc, *b.ac, predictor[b.component])) return Found::kDamage;
      if (bits.position() > end) return Found::kEnd;
      seen(b.component);
    }
    return Found::kMcu;
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
      // The block's end is near or the code is long, so read one code.
      const uint32_t one = ac.one(bits.peek(16)), run = one >> 4 & 15, bits_of_value = one & 15;
      if (!one) return false;
      bits.take((one >> 8) + bits_of_value);
      if (!bits_of_value && run != 15) return true;
      i += run + 1;
      if (i > 64) return false;
      if (i == 64) return true;
    }
  }
};

// Several threads read a scan without restart markers. A reader that starts inside a code soon finds the true codes,
// after 17 blocks on average, because Huffman codes synchronize themselves. Each piece records where it found MCUs. The
// thread that starts at the true beginning uses a piece from the first MCU on which both agree. It never waits: it
// reads pieces that nobody has read yet.
class JpegPieces {
 public:
  // Split a scan with `mcus` MCUs into pieces of `bytes` bytes. The scan is copied, as threads may outlive the call.
  JpegPieces(const JpegScan& scan, int64_t bytes, uint32_t mcus)
      : scan_(scan),
        copy_(scan.data, scan.data + scan.bytes + JpegScan::kAhead),
        pieces_(static_cast<size_t>(ceil_div(scan.bytes, bytes))),
        bits_(bytes * 8),
        most_(4 * size_t{mcus} / pieces_.size() + 4) {
    scan_.data = copy_.data();
  }

  size_t count() const { return pieces_.size(); }

  // Read pieces that no thread has started. Any thread may call this. A piece is skipped if memory runs out.
  void help() {
    try {
      for (size_t i; (i = next_.fetch_add(1)) < pieces_.size();) read(i);
    } catch (const std::bad_alloc&) {
    }
  }

  // Do not let other threads start pieces before `piece` any more.
  void skip_to(size_t piece) {
    size_t next = next_.load();
    while (next < piece && !next_.compare_exchange_weak(next, piece)) {
    }
  }

  // Call f with each known MCU that follows `at` in its piece, while f returns true.
  template <class F>
  void follow(JpegMcu at, const F& f) {
    const auto number = static_cast<size_t>(at.bit / bits_);
    if (number >= pieces_.size()) return;
    const Piece& piece = pieces_[number];
    if (!piece.ready.load(std::memory_order_acquire)) return skip_to(number + 1);
    auto known = std::lower_bound(piece.mcus.begin(), piece.mcus.end(), at.bit,
                                  [](const JpegMcu& mcu, uint32_t bit) { return mcu.bit < bit; });
    if (known == piece.mcus.end() || known->bit != at.bit) return;
    int shift[3];
    for (int i = 0; i < 3; ++i) {
      shift[i] = at.predictor[i] - known->predictor[i];
      if (piece.low + shift[i] < INT16_MIN || piece.high + shift[i] > INT16_MAX) return;  // may be damage: read it
    }
    while (++known != piece.mcus.end()) {
      JpegMcu next = *known;
      for (int i = 0; i < 3; ++i) next.predictor[i] += shift[i];
      if (!f(next)) return;
    }
  }

 private:
  // Limit the errors, because invalid bytes take time.
  static constexpr int kMostErrors = 64;

  struct Piece {
    std::vector<JpegMcu> mcus;  // predictors are relative to 0
    int low = 0, high = 0;      // extremes of all predictors after any block
    std::atomic<bool> ready{false};
  };

  // Record MCUs up to the first one that begins in the next piece.
  void read(size_t number) {
    Piece& piece = pieces_[number];
    const int64_t begin = static_cast<int64_t>(number) * bits_;
    JpegByteBits bits(scan_.data, begin / 8);
    JpegMcu at;
    at.bit = static_cast<uint32_t>(begin);
    for (int errors = 0; errors < kMostErrors;) {
      piece.mcus.push_back(at);
      if (at.bit >= begin + bits_ || piece.mcus.size() == most_) break;
      const JpegScan::Found found = scan_.skip_mcu(bits, at.predictor, scan_.bytes * 8, [&](int component) {
        piece.low = std::min(piece.low, at.predictor[component]);
        piece.high = std::max(piece.high, at.predictor[component]);
      });
      if (found == JpegScan::Found::kEnd) break;
      at.bit = static_cast<uint32_t>(bits.position());
      if (found == JpegScan::Found::kMcu) continue;
      // The start was wrong, or the file is damaged; reading from the true start will find damage again.
      ++errors;
      at = JpegMcu{(piece.mcus.back().bit / 8 + 1) * 8, {}};
      bits.go_to(at.bit);
      piece.mcus.clear();
      piece.low = piece.high = 0;
    }
    piece.ready.store(true, std::memory_order_release);
  }

  JpegScan scan_;
  std::vector<uint8_t> copy_;
  std::vector<Piece> pieces_;
  int64_t bits_;  // bits per piece
  size_t most_;   // MCUs that a piece records, limited to save memory
  std::atomic<size_t> next_{1};
};

}  // namespace torch_fastdet::core
