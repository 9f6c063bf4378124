// load_tiny FILE: a C++ program that loads a package of the model `Flat` with torch's own loader, and runs it.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  torch::inductor::AOTIModelPackageLoader model(argv[1], "cpu", false, 1, -1);
  const auto outputs = model.run({at::ones({2, 3, 16, 8}), at::ones({2, 5}), at::zeros({5})});
  if (outputs.size() != 3 || !at::allclose(outputs[1], at::full({2, 3, 16, 8}, 2.0))) return 3;
  std::puts("ran");
}
