// Run a detector that contains torch_fastdet's operators on an image tensor and print the detections.
//
//   detect detector.ts image.npy [--golden FOLDER] [--cuda]   TorchScript
//   detect detector.pt2 image.npy                             AOTInductor package, on the device it was made for
//
// The detector's forward(image) returns detections (images, max_det, 6 + extra), whose rows begin with x1, y1, x2, y2,
// confidence and class, and their counts (images,), like torch_fastdet.postprocess. `python -m examples.export` makes
// both. The image is (3, height, width) or (images, 3, height, width), uint8 or float, saved by numpy.save. With
// --golden the program saves the detector's method stages(image), a Dict[str, Tensor], for `python -m
// torch_fastdet.golden compare`.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "torch_fastdet/golden_torch.h"

namespace golden = torch_fastdet::golden;

namespace {

// Load the file's image as a float batch. uint8 is scaled to 0..1, as in YOLOv5.
torch::Tensor load_image(const std::string& path) {
  golden::Stage stage = golden::load_npy(path);
  const torch::ScalarType type = stage.dtype == "|u1"   ? torch::kByte
                                 : stage.dtype == "<f4" ? torch::kFloat
                                 : stage.dtype == "<f2" ? torch::kHalf
                                                        : torch::ScalarType::Undefined;
  if (type == torch::ScalarType::Undefined) {
    throw std::runtime_error("image must be uint8, float16 or float32, not " + stage.dtype);
  }
  torch::Tensor image = torch::from_blob(stage.bytes.data(), stage.shape, type).to(torch::kFloat, false, true);
  if (type == torch::kByte) image.div_(255);
  if (image.dim() == 3) image = image.unsqueeze(0);
  if (image.dim() != 4 || image.size(1) != 3) {
    throw std::runtime_error("image must be (3, height, width) or (images, 3, height, width), not " +
                             golden::format(stage.shape));
  }
  return image;
}

void print(const torch::Tensor& detections, const torch::Tensor& counts) {
  for (int64_t image = 0; image < detections.size(0); ++image) {
    const int64_t count = counts[image].item<int64_t>();
    std::printf("image %lld: %lld detections\n", static_cast<long long>(image), static_cast<long long>(count));
    const torch::Tensor rows = detections[image].to(torch::kFloat).contiguous();
    for (int64_t i = 0; i < count; ++i) {
      const float* row = rows.const_data_ptr<float>() + i * rows.size(1);
      std::printf("  class %2d  confidence %.4f  box %8.2f %8.2f %8.2f %8.2f\n", static_cast<int>(row[5]), row[4],
                  row[0], row[1], row[2], row[3]);
    }
  }
}

bool is_package(const std::string& path) {
  return path.size() > 4 && path.compare(path.size() - 4, 4, ".pt2") == 0;
}

// Run a package compiled ahead of time. It takes images of the size that it was made with.
void run_package(const std::string& path, const torch::Tensor& image) {
  torch::inductor::AOTIModelPackageLoader detector(path);
  const std::vector<torch::Tensor> outputs = detector.run({image});
  print(outputs.at(0).cpu(), outputs.at(1).cpu());
}

int run(int argc, char** argv) {
  std::string folder;
  torch::Device device(torch::kCPU);
  for (int i = 3; i < argc; ++i) {
    if (std::strcmp(argv[i], "--golden") == 0 && i + 1 < argc) {
      folder = argv[++i];
    } else if (std::strcmp(argv[i], "--cuda") == 0) {
      device = torch::Device(torch::kCUDA, 0);
    } else {
      argc = 0;
    }
  }
  if (argc < 3) {
    std::fprintf(stderr, "usage: detect detector.ts image.npy [--golden FOLDER] [--cuda]\n");
    return 2;
  }
  const torch::InferenceMode guard;
  if (is_package(argv[1])) {
    if (!folder.empty()) throw std::runtime_error("--golden wants a TorchScript detector: a package has no stages");
    run_package(argv[1], load_image(argv[2]).to(device));
    return 0;
  }
  torch::jit::Module detector = torch::jit::load(argv[1], device);
  detector.eval();
  const torch::Tensor image = load_image(argv[2]).to(device);

  const auto outputs = detector.forward({image}).toTuple();
  print(outputs->elements().at(0).toTensor().cpu(), outputs->elements().at(1).toTensor().cpu());

  if (!folder.empty()) {
    golden::Writer writer(folder);
    for (const auto& stage : detector.get_method("stages")({image}).toGenericDict()) {
      golden::save(writer, stage.key().toStringRef(), stage.value().toTensor());
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "detect: %s\n", error.what());
    return 1;
  }
}
