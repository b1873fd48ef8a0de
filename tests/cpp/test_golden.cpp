// golden.h without Python: what the types of C++ become, and what compare() says. tests/golden runs it against Python.
#include "torch_fastdet/golden.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <limits>
#include <string>

namespace golden = torch_fastdet::golden;

namespace {

class Golden : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("golden_" + std::to_string(getpid()) + "_" +
                                                      ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path folder(const std::string& name) const { return root_ / name; }

  // What compare() says of one stage that holds these elements.
  template <typename T>
  std::string difference(const std::vector<T>& a, const std::vector<T>& b, double rtol = 0, double atol = 0) {
    golden::Writer(folder("a")).save("x", golden::view(a.data(), {static_cast<int64_t>(a.size())}));
    golden::Writer(folder("b")).save("x", golden::view(b.data(), {static_cast<int64_t>(b.size())}));
    return golden::compare(folder("a"), folder("b"), rtol, atol).rows.at(0).difference;
  }

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

TEST_F(Golden, ElementsAreInRowMajorOrderWhateverTheStride) {
  const float data[] = {0, 1, 2, 3, 4, 5}, expected[] = {0, 3, 1, 4, 2, 5};
  golden::Writer writer(folder("a"));
  writer.save("columns", golden::view(data, {3, 2}, {1, 3}));
  writer.save("empty", golden::view(data, {0, 7}));
  writer.save("scalar", golden::view(data, {}));
  const auto stages = golden::load(folder("a"));
  ASSERT_EQ(stages.size(), 3u);
  EXPECT_EQ(stages[0].shape, (golden::Dims{3, 2}));
  for (int i = 0; i < 6; ++i) EXPECT_EQ(stages[0].data<float>()[i], expected[i]) << i;
  EXPECT_EQ(stages[1].elements(), 0);
  EXPECT_EQ(stages[2].elements(), 1);
  EXPECT_EQ((std::filesystem::file_size(folder("a") / "02_scalar.npy") - 4) % 64, 0u) << "as numpy aligns it";
  EXPECT_TRUE(golden::compare(folder("a"), folder("a")).equal());
}

TEST_F(Golden, HalvesAreReadAsNumbers) {
  const uint16_t a[] = {0x3C00, 0xC000, 0x7C00, 0x0001, 0x7E00}, b[] = {0x3C00, 0xC000, 0x7C00, 0x0003, 0x7E01};
  golden::Writer(folder("a")).save("x", {a, "<f2", {5}, {1}});
  golden::Writer(folder("b")).save("x", {b, "<f2", {5}, {1}});
  EXPECT_EQ(golden::compare(folder("a"), folder("b"))
                .table()
                .find("First difference: x: 1 of 5 elements differ, by at "
                      "most 1.19209e-07; at (3) A is 5.96046448e-08"),
            0u);
}

TEST_F(Golden, TolerancesNaNAndLargeIntegers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(difference<float>({1000, nan, 0}, {1001, nan, -0.F}),
            "1 of 3 elements differ, by at most 1; at (0) A is 1000, B is 1001");
  EXPECT_EQ(difference<float>({1000, nan}, {1001, nan}, 1e-3), "");
  EXPECT_EQ(difference<float>({1000, nan}, {1001, nan}, 0, 1), "");
  EXPECT_NE(difference<float>({nan}, {1}, 1, 1e9), "") << "NaN is near no number";
  EXPECT_NE(difference<int64_t>({(int64_t{1} << 60) + 1}, {int64_t{1} << 60}), "");
}

TEST_F(Golden, TheFirstStageThatDiffersIsNamed) {
  const float data[] = {1, 2, 3, 4, 5, 6}, other[] = {1, 2, 3, 9, 5, 6};
  const int32_t integers[] = {1, 2};
  golden::Writer a(folder("a")), b(folder("b"));
  for (const char* name : {"raw", "decoded", "kept", "lone"}) a.save(name, golden::view(data, {2, 3}));
  b.save("raw", golden::view(data, {2, 3}));
  b.save("decoded", golden::view(other, {2, 3}));
  b.save("kept", golden::view(integers, {2}));
  const auto comparison = golden::compare(folder("a"), folder("b"));
  ASSERT_NE(comparison.first_difference(), nullptr);
  EXPECT_EQ(comparison.first_difference()->difference, "1 of 6 elements differ, by at most 5; at (1,0) A is 4, B is 9");
  EXPECT_EQ(comparison.rows[2].difference, "A is <f4(2,3), B is <i4(2)");
  EXPECT_EQ(comparison.rows[3].difference, "only in A");
}

TEST_F(Golden, AWriterStartsAFolderAgain) {
  const float data[] = {1, 2};
  golden::Writer(folder("a")).save("old", golden::view(data, {2}));
  golden::Writer(folder("a")).save("new", golden::view(data, {2}));
  EXPECT_EQ(golden::load(folder("a")).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(folder("a") / "00_old.npy"));
}

TEST_F(Golden, BadInputIsOneSentence) {
  const float data[] = {1, 2};
  golden::Writer writer(folder("a"));
  writer.save("x", golden::view(data, {2}));
  EXPECT_NE(message([&] { writer.save("x", golden::view(data, {2})); }).find("already saved"), std::string::npos);
  EXPECT_NE(message([&] { writer.save("a/b", golden::view(data, {2})); }).find("must be letters"), std::string::npos);
  EXPECT_NE(message([&] { writer.save("y", golden::view(data, {2}, {1, 1})); }).find("stride must"), std::string::npos);
  EXPECT_NE(message([&] { writer.save("y", {data, "<c8", {1}, {1}}); }).find("dtype '<c8'"), std::string::npos);
  EXPECT_NE(message([&] { golden::load(folder("none")); }).find("no stages.txt"), std::string::npos);
  EXPECT_NE(message([&] { golden::load(folder("a"))[0].data<double>(); }).find("holds <f4"), std::string::npos);
  EXPECT_NE(message([&] { golden::compare(folder("a"), folder("a"), -1); }).find("at least 0"), std::string::npos);
}

}  // namespace
