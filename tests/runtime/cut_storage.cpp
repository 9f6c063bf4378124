// cut_storage PACKAGE: a tensor whose storage ends before it does must be refused in words, and not be read. Status 0
// where it is.
#include <ATen/core/Tensor.h>
#include <exportkit/runtime.h>

#include <string>

int main(int, char** argv) {
  const exportkit::Model model = exportkit::Model::open(argv[1]);
  auto inputs = model.recorded_case(0).calls[0].inputs;
  at::Tensor& cut = inputs.at(0);
  cut = cut.clone();
  cut.storage().unsafeGetStorageImpl()->set_nbytes(cut.nbytes() - 1);
  try {
    model.run(inputs);
  } catch (const exportkit::Error& error) {
    return error.message().find("of its storage") == std::string::npos;
  }
  return 2;
}
