// Loads a package, says what it takes and gives, checks it against its recorded cases, and calls it, perhaps with
// another fine-tune's weights: predict model.pt2 [weights.safetensors]
#include <exportkit/runtime.h>

#include <iostream>

void print(const char* what, const std::vector<exportkit::TensorInfo>& tensors) {
  std::cout << what << ":\n";
  for (const exportkit::TensorInfo& tensor : tensors) {
    std::cout << "  " << tensor.name << " " << tensor.dtype;
    for (const exportkit::SizeRange& size : tensor.shape) std::cout << " " << size.text;
    std::cout << "\n";
  }
}

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::cerr << "usage: " << argv[0] << " PACKAGE [WEIGHTS]\n";
    return 2;
  }
  try {
    exportkit::OpenOptions options;
    options.runners = 2;  // calls of two threads run at a time
    exportkit::Model model = exportkit::Model::open(argv[1], options);
    std::cout << model.name() << " " << model.version() << " on " << model.device() << "\n";
    print("takes", model.inputs());
    print("gives", model.outputs());
    for (size_t i = 0; i < model.case_count(); ++i) {
      std::cout << "case " << i << ": " << (model.replay(i).ok() ? "ok" : "differs") << "\n";
    }
    if (argc == 3) model.swap_weights(argv[2]);  // calls of other threads could go on meanwhile
    const std::vector<at::Tensor> inputs = model.recorded_case(0).calls[0].inputs;
    for (const at::Tensor& output : model.run(inputs)) std::cout << "got " << output.sizes() << "\n";
  } catch (const exportkit::Error& error) {
    std::cerr << error.name() << ": " << error.what() << "\n";
    return error.exit_code();
  }
}
