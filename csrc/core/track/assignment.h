// Solve sparse linear assignment with a cost limit: find the pairs of least sum of (cost - limit), like dense lapjv.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace torch_fastdet::core {

// Call begin(), edge() by rows, then solve(). A row may stay unmatched at weight 0; searches stay in their component.
class SparseAssignment {
 public:
  void begin(int rows, int columns, int edges) {
    columns_ = columns;
    used_ = 0;
    start_.assign(rows + 1, 0);
    if (static_cast<int>(column_.size()) <= edges) column_.resize(2 * edges + 1), weight_.resize(2 * edges + 1);
  }

  // A pair above the limit is never optimal. NaN or infinity is no pair. A pair at the limit counts as one to match.
  void edge(int row, int column, double weight) {
    const int keep = (weight <= 0) & (weight >= std::numeric_limits<double>::lowest());
    column_[used_] = column, weight_[used_] = weight;
    used_ += keep, start_[row + 1] += keep;
  }

  void solve() {
    const int rows = static_cast<int>(start_.size()) - 1;
    for (int i = 0; i < rows; i++) start_[i + 1] += start_[i];
    row_of_.assign(columns_, -1), column_of_.assign(rows, -1);
    row_price_.assign(rows, 0.0), column_price_.assign(columns_, 0.0);
    pending_.clear(), doubtful_.clear();
    for (int i = 0; i < rows; i++) {  // every row takes its best column if that is free
      int best = -1;
      double least = std::numeric_limits<double>::min(), second = least;
      for (int e = start_[i]; e < start_[i + 1]; e++) {
        second = std::min(second, std::max(least, weight_[e]));
        if (weight_[e] < least) least = weight_[e], best = column_[e];
      }
      if (best < 0) continue;
      row_price_[i] = least;
      if (second - least < 2 * kSlack) doubtful_.push_back(i);
      if (row_of_[best] < 0)
        row_of_[best] = i, column_of_[i] = best;
      else
        pending_.push_back(i);
    }
    if (pending_.empty()) return;
    distance_.resize(columns_), from_.resize(columns_), mark_.assign(columns_, kNew);
    for (int i : pending_) augment(i);
  }

  int column_of(int row) const { return column_of_[row]; }
  void set(int row, int column) { column_of_[row] = column; }

  // Return whether another assignment is equally good, up to rounding. Then pairs without slack form a cycle through
  // rows and an additional node, which stands for everything unmatched.
  bool tied() {
    const int rows = static_cast<int>(column_of_.size());
    std::sort(doubtful_.begin(), doubtful_.end());
    doubtful_.erase(std::unique(doubtful_.begin(), doubtful_.end()), doubtful_.end());
    arcs_.clear();
    for (int i : doubtful_) visit_tight(i, [&](int next) { arcs_.push_back({i, next}); });
    if (arcs_.empty()) return false;
    leaving_.assign(rows + 1, 0);
    for (const Arc& arc : arcs_) leaving_[arc.from]++;
    for (size_t before = 0; before != arcs_.size();) {  // remove arcs to nodes that no arc leaves
      before = arcs_.size();
      leaving_[rows] = std::any_of(arcs_.begin(), arcs_.end(), [&](const Arc& arc) { return may_lose(arc.from); });
      arcs_.erase(std::remove_if(arcs_.begin(), arcs_.end(),
                                 [&](const Arc& arc) { return !leaving_[arc.to] && leaving_[arc.from]--; }),
                  arcs_.end());
    }
    return !arcs_.empty();
  }

 private:
  static constexpr double kSlack = 1e-12;
  enum Mark : uint8_t { kNew, kReached, kScanned };
  int columns_ = 0, used_ = 0;
  struct Arc {
    int from, to;
  };
  std::vector<int> start_, column_, row_of_, column_of_, from_, pending_, reached_, leaving_;
  std::vector<int> doubtful_;  // rows that may have more than one tight pair
  std::vector<Arc> arcs_;
  std::vector<double> weight_, row_price_, column_price_, distance_;
  std::vector<uint8_t> mark_;

  bool may_lose(int row) const { return column_of_[row] < 0 || column_price_[column_of_[row]] >= -kSlack; }

  // Visit the rows whose column `row` could take at no cost. The number of rows stands for the additional node.
  template <class Visit>
  void visit_tight(int row, const Visit& visit) const {
    const int rows = static_cast<int>(column_of_.size());
    if (column_of_[row] >= 0 && row_price_[row] >= -kSlack) visit(rows);
    for (int e = start_[row]; e < start_[row + 1]; e++) {
      const int j = column_[e];
      if (j == column_of_[row] || weight_[e] - row_price_[row] - column_price_[j] > kSlack) continue;
      visit(row_of_[j] < 0 ? rows : row_of_[j]);
    }
  }

  // Find the shortest augmenting path (Dijkstra) from an unmatched row to a free column or to a row to unmatch.
  void augment(int first) {
    reached_.clear();
    int row = first, free_row = -1, free_column = -1;
    double length = 0, leave = std::numeric_limits<double>::infinity();
    for (;;) {
      if (length - row_price_[row] < leave) leave = length - row_price_[row], free_row = row;
      for (int e = start_[row]; e < start_[row + 1]; e++) {
        const int j = column_[e];
        if (mark_[j] == kScanned) continue;
        const double d = length + ((weight_[e] - row_price_[row]) - column_price_[j]);
        if (mark_[j] == kNew)
          mark_[j] = kReached, reached_.push_back(j);
        else if (d >= distance_[j])
          continue;
        distance_[j] = d, from_[j] = row;
      }
      int next = -1;
      double least = std::numeric_limits<double>::infinity();
      for (int j : reached_) {
        if (mark_[j] != kReached) continue;
        if (distance_[j] < least || (distance_[j] == least && row_of_[j] < 0)) least = distance_[j], next = j;
      }
      length = std::min(least, leave);
      if (leave < least) break;
      if (row_of_[next] < 0) {
        free_column = next;
        break;
      }
      mark_[next] = kScanned;
      row = row_of_[next];
    }
    row_price_[first] += length;
    doubtful_.push_back(first);
    for (int j : reached_) {
      if (mark_[j] == kScanned) {
        row_price_[row_of_[j]] += length - distance_[j], column_price_[j] -= length - distance_[j];
        doubtful_.push_back(row_of_[j]);
      }
      mark_[j] = kNew;
    }
    int column = free_column;
    if (column < 0) {
      if (free_row == first) return;
      column = column_of_[free_row], column_of_[free_row] = -1;
    }
    for (;;) {  // flip the path
      const int r = from_[column];
      row_of_[column] = r;
      std::swap(column_of_[r], column);
      if (r == first) return;
    }
  }
};

}  // namespace torch_fastdet::core
