// Listens as listen.py does: listen speech.pt2 samples.raw [state.safetensors]
//
// The samples are float32 at 16 kHz, from -1 to 1. A line is how likely speech is in 512 of them. The state file is
// what a session saved that has heard what came before.
#include <ATen/ops/from_blob.h>
#include <exportkit/runtime.h>

#include <fstream>
#include <iomanip>
#include <iostream>
#include <limits>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::cerr << "usage: " << argv[0] << " PACKAGE SAMPLES [STATE]\n";
    return 2;
  }
  try {
    const exportkit::Model model = exportkit::Model::open(argv[1]);
    exportkit::Session session = model.session({{"streams", 1}});
    if (argc == 4) session.load_state(argv[3]);
    std::ifstream samples(argv[2], std::ios::binary);
    std::vector<float> chunk(512);
    const auto bytes = std::streamsize(chunk.size() * sizeof(float));
    std::cout << std::setprecision(std::numeric_limits<float>::max_digits10);
    while (samples.read(reinterpret_cast<char*>(chunk.data()), bytes)) {
      const at::Tensor input = at::from_blob(chunk.data(), {1, int64_t(chunk.size())});
      std::cout << session.run({input}).at(0).item<float>() << "\n";
    }
  } catch (const exportkit::Error& error) {
    std::cerr << error.name() << ": " << error.what() << "\n";
    return error.exit_code();
  }
}
