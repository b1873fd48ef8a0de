// Compare newton_schulz.cu with nested loops that round where eager code stores: matrices of all shapes in one call.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/newton_schulz/newton_schulz.h"
#include "core/newton_schulz/newton_schulz_plan.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

constexpr DType kNarrow = DType::kBFloat16;

struct Matrix {
  int64_t rows, columns;
  std::vector<double> values;

  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), values(rows * columns) {}
  double& at(int64_t i, int64_t j) { return values[i * columns + j]; }
  double at(int64_t i, int64_t j) const { return values[i * columns + j]; }
};

Matrix transposed(const Matrix& x) {
  Matrix result(x.columns, x.rows);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.columns; ++j) result.at(j, i) = x.at(i, j);
  }
  return result;
}

// Return alpha x y + beta z, rounded.
Matrix product(double alpha, const Matrix& x, const Matrix& y, double beta, const Matrix* z) {
  Matrix result(x.rows, y.columns);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < y.columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < x.columns; ++k) sum += x.at(i, k) * y.at(k, j);
      result.at(i, j) = rounded(kNarrow, alpha * sum + (z ? beta * z->at(i, j) : 0));
    }
  }
  return result;
}

Matrix orthogonalized(Matrix x, double scale) {
  const bool tall = x.rows > x.columns;
  double sum = 0;
  for (const double value : x.values) sum += value * value;
  const double divisor = rounded(kNarrow, rounded(kNarrow, std::sqrt(sum)) + 1e-7);
  for (double& value : x.values) value = rounded(kNarrow, value / divisor);
  if (tall) x = transposed(x);
  for (int step = 0; step < kNsSteps; ++step) {
    const Matrix a = product(1, x, transposed(x), 0, nullptr);
    const Matrix b = product(kNsC, a, a, kNsB, &a);
    x = product(1, b, x, kNsA, &x);
  }
  if (tall) x = transposed(x);
  for (double& value : x.values) value *= scale;
  return x;
}

class Problem {
 public:
  Problem(const std::vector<std::pair<int64_t, int64_t>>& shapes, Random& random) {
    for (const auto& [rows, columns] : shapes) {
      scales_.push_back(random.chance(50) ? 1.0 : 1.5);
      plan_.add(rows, columns, scales_.back());
      Matrix matrix(rows, columns);
      const double size = std::exp(2 * random.normal());
      for (double& value : matrix.values) value = rounded(kNarrow, size * random.normal());
      if (random.chance(5)) std::fill(matrix.values.begin(), matrix.values.end(), 0.0);
      matrices_.push_back(matrix);
    }
    plan_.sort();
  }

  void run(double garbage) {
    Tensor source(kNarrow, {plan_.source_elements}), result(DType::kFloat32, {plan_.source_elements});
    Tensor x[2] = {{kNarrow, {plan_.x_elements}}, {kNarrow, {plan_.x_elements}}};
    Tensor gram(kNarrow, {plan_.gram_elements}), polynomial(kNarrow, {plan_.gram_elements});
    Tensor squared(DType::kFloat32, {static_cast<int64_t>(plan_.chunks.size())});
    for (Tensor* workspace : {&x[0], &x[1], &gram, &polynomial, &squared}) {
      for (int64_t i = 0; i < workspace->numel(); ++i) workspace->set(i, garbage);
    }
    std::vector<bool> used(plan_.source_elements);
    for (size_t m = 0; m < matrices_.size(); ++m) {
      for (size_t i = 0; i < matrices_[m].values.size(); ++i) {
        source.set(plan_.matrices[m].source + i, matrices_[m].values[i]);
        used[plan_.matrices[m].source + i] = true;
      }
    }
    for (int64_t i = 0; i < result.numel(); ++i) result.set(i, -77);
    NsParams p{};
    p.matrices = plan_.matrices.data();
    p.chunks = plan_.chunks.data();
    p.squares = plan_.squares.data();
    p.tiles = plan_.tiles.data();
    p.num_chunks = static_cast<int64_t>(plan_.chunks.size());
    p.num_squares = static_cast<int64_t>(plan_.squares.size());
    p.num_tiles = static_cast<int64_t>(plan_.tiles.size());
    p.source = source.data();
    p.result = static_cast<float*>(result.data());
    p.x[0] = x[0].data();
    p.x[1] = x[1].data();
    p.gram = gram.data();
    p.polynomial = polynomial.data();
    p.squared = static_cast<float*>(squared.data());
    ASSERT_EQ(prepare_newton_schulz(), cudaSuccess);
    ASSERT_EQ(launch_newton_schulz(p, nullptr), cudaSuccess);
    for (size_t m = 0; m < matrices_.size(); ++m) {
      SCOPED_TRACE("matrix of " + std::to_string(matrices_[m].rows) + " x " + std::to_string(matrices_[m].columns));
      const Matrix want = orthogonalized(matrices_[m], scales_[m]);
      double far = 0, norm = 0;
      for (size_t i = 0; i < want.values.size(); ++i) {
        const double got = result.get(plan_.matrices[m].source + i);
        ASSERT_TRUE(std::isfinite(got));
        far += (got - want.values[i]) * (got - want.values[i]);
        norm += want.values[i] * want.values[i];
      }
      // Sums in another order sometimes round differently, which grows from step to step.
      EXPECT_LE(std::sqrt(far), 0.03 * std::sqrt(norm));
    }
    for (int64_t i = 0; i < result.numel(); ++i) {
      if (!used[i]) {
        ASSERT_EQ(result.get(i), -77);
      }
    }
    EXPECT_TRUE(result.surroundings_intact() && x[0].surroundings_intact() && x[1].surroundings_intact());
    EXPECT_TRUE(gram.surroundings_intact() && polynomial.surroundings_intact() && squared.surroundings_intact());
  }

 private:
  NsPlan plan_;
  std::vector<Matrix> matrices_;
  std::vector<double> scales_;
};

TEST(NewtonSchulzKernels, RandomShapes) {
  for (uint64_t seed = 0; seed < rounds(6) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    std::vector<std::pair<int64_t, int64_t>> shapes;
    for (int64_t count = 1 + random.below(3); count > 0; --count) {
      const int64_t small = 1 + random.below(random.chance(30) ? 140 : 40), large = small + random.below(200);
      shapes.push_back(random.chance(70) ? std::make_pair(small, large) : std::make_pair(large, small));
    }
    // Earlier calls may leave anything in the workspace, even NaN after an overflow.
    Problem(shapes, random).run(random.chance(50) ? NAN : 1.0);
  }
}

// The sums are long, with more stages than shared memory has; a norm has several chunks; tiles are at borders.
TEST(NewtonSchulzKernels, OddShapes) {
  Random random(1);
  emulator::seed(1);
  Problem({{1, 16}, {64, 128}, {65, 129}, {9, 1025}, {129, 64}, {1, 1}, {32, 27}}, random).run(NAN);
}

}  // namespace
}  // namespace torch_fastdet::core
