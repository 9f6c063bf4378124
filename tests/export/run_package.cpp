// run_package FILE TARGET DEVICE: loads a package of the model `Quantize` with what torch brings and nothing else, and
// compares what it returns with ATen.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const at::Device device(argv[3]);
  torch::inductor::AOTIModelPackageLoader model(argv[1], argv[2], false, 1, device.is_cpu() ? -1 : 0);
  for (const int64_t batch : {1, 16}) {
    const auto x = at::randn({batch, 7, 40}, device), bias = at::randn({batch, 7, 40}, device);
    const auto outputs = model.run({x, bias});
    const auto softmax = at::softmax(x + bias, -1), columns = at::softmax(x.mT(), -1);
    const auto steps = outputs[1].abs().amax(-1);
    if (!at::allclose(outputs[0], softmax, 1e-4, 1e-6) || !at::allclose(outputs[3], columns, 1e-4, 1e-6)) return 3;
    if (outputs[1].scalar_type() != at::kChar || !steps.eq(127).all().item<bool>()) return 4;
  }
  std::puts("equal");
}
