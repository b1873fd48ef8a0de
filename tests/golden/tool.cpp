// What test_golden.py drives: "copy A B" loads the stages of A and saves them as B, "compare A B" prints the table.
#include <cstring>
#include <iostream>

#include "torch_fastdet/golden.h"

namespace golden = torch_fastdet::golden;

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  try {
    if (std::strcmp(argv[1], "compare") == 0) {
      const golden::Comparison comparison = golden::compare(argv[2], argv[3]);
      std::cout << comparison.table();
      return comparison.equal() ? 0 : 1;
    }
    golden::Writer writer(argv[3]);
    for (const golden::Stage& stage : golden::load(argv[2])) {
      writer.save(stage.name, {stage.bytes.data(), stage.dtype, stage.shape, {}});
    }
  } catch (const std::runtime_error& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
  return 0;
}
