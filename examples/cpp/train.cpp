// Trains a model in a package, by its method `step`, and saves what it has learnt:
// train model.pt2 data.safetensors learnt.safetensors STEPS
#include <exportkit/runtime.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: " << argv[0] << " PACKAGE DATA STATE STEPS\n";
    return 2;
  }
  try {
    const exportkit::Model model = exportkit::Model::open(argv[1]);
    const std::map<std::string, at::Tensor> data = exportkit::read_safetensors(argv[2]);
    std::vector<at::Tensor> inputs;
    for (const exportkit::TensorInfo& input : model.method("step").inputs) {
      const auto tensor = data.find(input.name);
      if (tensor == data.end()) {
        throw exportkit::Error(exportkit::errors::kUsage, std::string(argv[2]) + " has no tensor " + input.name);
      }
      inputs.push_back(tensor->second);
    }
    exportkit::Session session = model.session();
    const long steps = std::strtol(argv[4], nullptr, 10);
    for (long number = 1; number <= steps; ++number) {
      const at::Tensor loss = session.run("step", inputs).front();
      if (number == 1 || number == steps) std::cout << "step " << number << ": " << loss.item<float>() << "\n";
    }
    session.save(argv[3]);
  } catch (const exportkit::Error& error) {
    std::cerr << error.name() << ": " << error.what() << "\n";
    return error.exit_code();
  }
}
