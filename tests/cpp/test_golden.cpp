// golden.h without Python: files, strides, dtypes and what compare() says. tests/golden runs it against the Python
// side.
#include "torch_fastdet/golden.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <string>

namespace golden = torch_fastdet::golden;

namespace {

class Golden : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("golden_" + std::to_string(getpid()) + "_" +
                                                      ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path folder(const std::string& name) const { return root_ / name; }

  std::filesystem::path root_;
};

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST_F(Golden, WritesElementsInRowMajorOrderWhateverTheStride) {
  const float data[] = {0, 1, 2, 3, 4, 5};
  golden::Writer writer(folder("a"));
  writer.save("columns", golden::view(data, {3, 2}, {1, 3}));
  const auto stages = golden::load(folder("a"));
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].shape, (golden::Dims{3, 2}));
  EXPECT_EQ(stages[0].stride, (golden::Dims{1, 3}));
  const float expected[] = {0, 3, 1, 4, 2, 5};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(stages[0].data<float>()[i], expected[i]) << i;
}

TEST_F(Golden, HeaderIsAlignedAsNumpyWantsIt) {
  const double scalar = 7;
  for (const auto& shape : {golden::Dims{}, golden::Dims{1}, golden::Dims{1, 1, 1, 1, 1}}) {
    golden::save_npy(folder("x.npy"), golden::view(&scalar, shape));
    EXPECT_EQ((std::filesystem::file_size(folder("x.npy")) - 8) % 64, 0u) << golden::format(shape);
    EXPECT_EQ(golden::load_npy(folder("x.npy")).shape, shape);
  }
}

TEST_F(Golden, HalfAndBfloat16AreReadAsNumbers) {
  const uint16_t half[] = {0x3C00, 0xC000, 0x7C00, 0x0001, 0x7E00};  // 1, -2, inf, 2^-24, NaN
  const uint16_t bfloat[] = {0x3F80, 0xC000, 0x7F80, 0x0001, 0x7FC0};
  golden::Writer writer(folder("a"));
  writer.save("half", golden::view(half, golden::DType::kFloat16, {5}));
  writer.save("bfloat", golden::view(bfloat, golden::DType::kBFloat16, {5}));
  const auto stages = golden::load(folder("a"));
  for (const auto& stage : stages) {
    EXPECT_EQ(golden::detail::number(stage, 0), 1.0);
    EXPECT_EQ(golden::detail::number(stage, 1), -2.0);
    EXPECT_TRUE(std::isinf(golden::detail::number(stage, 2)));
    EXPECT_TRUE(std::isnan(golden::detail::number(stage, 4)));
  }
  EXPECT_EQ(golden::detail::number(stages[0], 3), std::ldexp(1.0, -24));
  EXPECT_EQ(stages[1].dtype, golden::DType::kBFloat16);
  EXPECT_TRUE(golden::compare(folder("a"), folder("a")).equal());
}

TEST_F(Golden, EmptyAndScalarTensors) {
  const float data[] = {1};
  golden::Writer writer(folder("a"));
  writer.save("empty", golden::view(data, {0, 7}));
  writer.save("scalar", golden::view(data, {}));
  const auto comparison = golden::compare(folder("a"), folder("a"));
  EXPECT_TRUE(comparison.equal()) << comparison.table();
  EXPECT_EQ(comparison.rows[0].elements, 0);
  EXPECT_EQ(comparison.rows[1].elements, 1);
}

TEST_F(Golden, FirstDifferenceComesFirst) {
  const float data[] = {1, 2, 3, 4, 5, 6}, other[] = {1, 2, 3, 9, 5, 6};
  golden::Writer a(folder("a")), b(folder("b"));
  for (const char* name : {"raw", "decoded", "kept"}) a.save(name, golden::view(data, {2, 3}));
  b.save("raw", golden::view(data, {2, 3}));
  b.save("decoded", golden::view(other, {2, 3}));
  b.save("kept", golden::view(data, {1, 3}));
  const auto comparison = golden::compare(folder("a"), folder("b"));
  ASSERT_FALSE(comparison.equal());
  const golden::Row* row = comparison.first_difference();
  ASSERT_NE(row, nullptr);
  EXPECT_EQ(row->stage, "decoded");
  EXPECT_EQ(row->index, (golden::Dims{1, 0}));
  EXPECT_EQ(row->a, 4);
  EXPECT_EQ(row->b, 9);
  EXPECT_EQ(row->max_difference, 5);
  const std::string table = comparison.table();
  EXPECT_EQ(table.rfind("First difference: stage 2 of 3, decoded: values; at (1,0) A is 4, B is 9", 0), 0u) << table;
  EXPECT_LT(table.find("\n2  decoded"), table.find("\n3  kept"));
  EXPECT_LT(table.find("\n3  kept"), table.find("\n1  raw")) << "stages that are equal come last";
}

TEST_F(Golden, NamesAWrongStride) {
  float data[24], moved[24];
  for (int i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  // A port that takes channels-last memory (1, 4, 3, 2) for (1, 2, 4, 3).
  int at = 0;
  for (int y = 0; y < 4; ++y) {
    for (int x = 0; x < 3; ++x) {
      for (int c = 0; c < 2; ++c) moved[at++] = data[c * 12 + y * 3 + x];
    }
  }
  golden::Writer a(folder("a")), b(folder("b"));
  a.save("raw", golden::view(data, {1, 2, 4, 3}));
  b.save("raw", golden::view(moved, {1, 2, 4, 3}));
  const auto comparison = golden::compare(folder("a"), folder("b"));
  EXPECT_NE(comparison.rows[0].hint.find("A.permute(0,2,3,1)"), std::string::npos) << comparison.table();
  // The same memory with its true strides holds the same elements: only the stride differs, and may.
  golden::Writer c(folder("c"));
  c.save("raw", golden::view(moved, {1, 2, 4, 3}, {24, 1, 6, 2}));
  EXPECT_EQ(golden::compare(folder("a"), folder("c")).rows[0].differences, std::vector<std::string>{"stride"});
  EXPECT_TRUE(golden::compare(folder("a"), folder("c"), 0, 0, false).equal());
}

TEST_F(Golden, NamesRowsInAnotherOrderAndACutOff) {
  const float data[] = {1, 2, 3, 4, 5, 6}, swapped[] = {3, 4, 1, 2, 5, 6};
  golden::Writer a(folder("a")), b(folder("b"));
  a.save("sorted", golden::view(data, {3, 2}));
  b.save("sorted", golden::view(swapped, {3, 2}));
  a.save("kept", golden::view(data, {3, 2}));
  b.save("kept", golden::view(data, {2, 2}));
  const auto comparison = golden::compare(folder("a"), folder("b"));
  EXPECT_EQ(comparison.rows[0].hint, "the same rows in another order");
  EXPECT_EQ(comparison.rows[1].hint, "A starts with all 2 rows of B, and goes on: another threshold or limit");
}

TEST_F(Golden, TolerancesAndNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float data[] = {1000, nan, 0}, near[] = {1001, nan, 0}, bad[] = {1000, 1, 0};
  golden::Writer a(folder("a")), b(folder("b")), c(folder("c"));
  a.save("x", golden::view(data, {3}));
  b.save("x", golden::view(near, {3}));
  c.save("x", golden::view(bad, {3}));
  EXPECT_FALSE(golden::compare(folder("a"), folder("b")).equal());
  EXPECT_TRUE(golden::compare(folder("a"), folder("b"), 1e-3).equal());
  EXPECT_TRUE(golden::compare(folder("a"), folder("b"), 0, 1).equal());
  EXPECT_FALSE(golden::compare(folder("a"), folder("c"), 1, 1e9).equal()) << "NaN is near no number";
  EXPECT_NE(message([&] { golden::compare(folder("a"), folder("b"), -1); }), "");
}

TEST_F(Golden, LargeIntegersKeepTheirLastBit) {
  const int64_t data[] = {(int64_t{1} << 60) + 1}, other[] = {int64_t{1} << 60};
  golden::Writer a(folder("a")), b(folder("b"));
  a.save("x", golden::view(data, {1}));
  b.save("x", golden::view(other, {1}));
  EXPECT_FALSE(golden::compare(folder("a"), folder("b")).equal());
}

TEST_F(Golden, MissingStagesAndAnotherDtype) {
  const float data[] = {1, 2};
  const int32_t integers[] = {1, 2};
  golden::Writer a(folder("a")), b(folder("b"));
  a.save("raw", golden::view(data, {2}));
  a.save("x", golden::view(data, {2}));
  b.save("x", golden::view(integers, {2}));
  b.save("kept", golden::view(data, {2}));
  const auto rows = golden::compare(folder("a"), folder("b")).rows;
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].differences, std::vector<std::string>{"only in A"});
  EXPECT_EQ(rows[1].differences, std::vector<std::string>{"dtype"});
  EXPECT_EQ(rows[2].differences, std::vector<std::string>{"only in B"});
}

TEST_F(Golden, AWriterStartsAFolderAgain) {
  const float data[] = {1, 2};
  golden::Writer(folder("a")).save("old", golden::view(data, {2}));
  golden::Writer(folder("a")).save("new", golden::view(data, {2}));
  ASSERT_EQ(golden::load(folder("a")).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(folder("a") / "00_old.npy"));
}

TEST_F(Golden, BadInputIsOneSentence) {
  const float data[] = {1, 2};
  golden::Writer writer(folder("a"));
  writer.save("x", golden::view(data, {2}));
  EXPECT_NE(message([&] { writer.save("x", golden::view(data, {2})); }).find("already saved"), std::string::npos);
  EXPECT_NE(message([&] { writer.save("a/b", golden::view(data, {2})); }).find("must be letters"), std::string::npos);
  EXPECT_NE(message([&] { golden::view(data, {2}, {1, 1}); }).find("1 dimensions, but has 2"), std::string::npos);
  EXPECT_NE(message([&] { golden::load(folder("none")); }).find("no stages.tsv"), std::string::npos);
  EXPECT_NE(message([&] { golden::load(folder("a"))[0].data<double>(); }).find("holds float32"), std::string::npos);
  std::ofstream(folder("a") / "00_x.npy", std::ios::binary) << "no numpy";
  EXPECT_NE(message([&] { golden::load(folder("a")); }).find("is not an .npy file"), std::string::npos);
}

}  // namespace
