// Runs a model with state: makes a session, runs the calls of the first recorded sequence in it, forks it, and saves
// and loads its state: session model.pt2 state.safetensors
#include <exportkit/runtime.h>

#include <algorithm>
#include <iostream>

using exportkit::DimensionRange, exportkit::MethodInfo, exportkit::Model, exportkit::RecordedCall,
    exportkit::RecordedCase, exportkit::Session;

// The first recorded case that needs a session.
RecordedCase first_sequence(const Model& model) {
  for (size_t i = 0; i < model.case_count(); ++i) {
    RecordedCase recorded = model.recorded_case(i);
    const auto stateful = [&](const RecordedCall& call) { return model.method(call.method).stateful; };
    if (std::any_of(recorded.calls.begin(), recorded.calls.end(), stateful)) return recorded;
  }
  throw exportkit::Error(exportkit::errors::kUsage, "the package has no recorded case with state");
}

// The sizes of its session, such as {{"batch", 2}}. All its calls agree on them.
std::map<std::string, int64_t> session_sizes(const Model& model, const RecordedCase& recorded) {
  std::map<std::string, int64_t> sizes;
  for (const DimensionRange& dimension : model.state_dimensions()) {
    for (const RecordedCall& call : recorded.calls) {
      const auto size = call.sizes.find(dimension.name);
      if (size != call.sizes.end()) sizes.insert(*size);
    }
  }
  return sizes;
}

bool same_state(const Session& one, const Session& other) {
  const auto left = one.state(), right = other.state();
  return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                    [](const auto& a, const auto& b) { return a.first == b.first && a.second.equal(b.second); });
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: " << argv[0] << " PACKAGE STATE\n";
    return 2;
  }
  try {
    const Model model = Model::open(argv[1]);
    for (const MethodInfo& method : model.methods()) {
      std::cout << method.name << (method.stateful ? " needs a session\n" : " needs no session\n");
    }
    const RecordedCase recorded = first_sequence(model);
    Session session = model.session(session_sizes(model, recorded));
    for (const RecordedCall& call : recorded.calls) {
      std::cout << "ran " << call.method << ":";
      for (const at::Tensor& output : session.run(call.method, call.inputs)) std::cout << " " << output.sizes();
      std::cout << "\n";
    }
    Session other = session.fork();  // from here on, each has its own
    session.save(argv[2]);
    session.reset();  // as at export
    std::cout << "after reset: " << (same_state(session, other) ? "the same" : "another") << " state\n";
    session.load_state(argv[2]);  // here, or in another process
    std::cout << "after load_state: " << (same_state(session, other) ? "the same" : "another") << " state, "
              << session.state_bytes() << " bytes\n";
  } catch (const exportkit::Error& error) {
    std::cerr << error.name() << ": " << error.what() << "\n";
    return error.exit_code();
  }
}
