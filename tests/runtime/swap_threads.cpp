// swap_threads PACKAGE ANSWERS OLD NEW: swaps a model's weights while threads call it, between those of two files, and
// keeps what it answers with each. Every call must answer bit for bit with one or with the other. A swap once the
// package was written to must be refused in words, and change nothing; it comes last. The same package from bytes and
// from descriptors has weights of its own. Status 0 where all of that holds.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <exportkit/runtime.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kCallers = 4, kSwappers = 2, kSwaps = 20;

using Answer = std::vector<at::Tensor>;

bool same(const Answer& one, const Answer& other) {
  if (one.size() != other.size()) return false;
  for (size_t i = 0; i < one.size(); ++i) {
    if (!at::equal(one[i], other[i])) return false;
  }
  return true;
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

struct Fixture {
  exportkit::Model model;
  Answer inputs, old_answer, new_answer;
  std::string old_file, new_file;
};

void refuse(Fixture& fixture, const std::string& bad) {
  const auto before = fixture.model.run(fixture.inputs);
  try {
    fixture.model.swap_weights(bad);
  } catch (const exportkit::Error& error) {
    std::printf("%s: %s\n\n", error.name(), error.what());
    if (!same(fixture.model.run(fixture.inputs), before)) fail("a swap that failed changed something");
    return;
  }
  fail("what should be refused was taken");
}

void swap_while_calls_go_on(const Fixture& fixture) {
  std::atomic<int> swapping = kSwappers, with_old = 0, with_new = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kCallers; ++i) {
    threads.emplace_back([&] {
      while (swapping > 0) {
        const auto answer = fixture.model.run(fixture.inputs);
        const bool old = same(answer, fixture.old_answer);
        if (!old && !same(answer, fixture.new_answer)) fail("a call ran with something else than either weights");
        ++(old ? with_old : with_new);
      }
    });
  }
  for (int i = 0; i < kSwappers; ++i) {
    threads.emplace_back([&, i] {
      exportkit::Model copy = fixture.model;  // is the same model
      // On a busy machine no call may come to run in between for a while.
      for (int swap = i; swap < i + kSwaps || with_old == 0 || with_new == 0; ++swap) {
        copy.swap_weights(swap % 2 ? fixture.old_file : fixture.new_file);
      }
      --swapping;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What the package answers that comes as bytes, which are gone by then, as an open file, and through a pipe.
std::vector<Answer> answers_of_other_sources(const std::string& path, const Answer& inputs) {
  std::ifstream file(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(file), {}};
  exportkit::Model from_bytes = exportkit::Model::open(std::as_bytes(std::span(content)));
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  exportkit::Model from_file = exportkit::Model::open_descriptor(descriptor);
  close(descriptor);
  int ends[2];
  if (pipe(ends) != 0) fail("no pipe");
  std::thread writer([&content, into = ends[1]] {
    for (size_t done = 0; done < content.size();) {
      const ssize_t count = write(into, content.data() + done, content.size() - done);
      if (count <= 0) fail("the pipe was not read to its end");
      done += static_cast<size_t>(count);
    }
    close(into);
  });
  exportkit::Model from_pipe = exportkit::Model::open_descriptor(ends[0]);
  writer.join();
  close(ends[0]);
  content.assign(content.size(), '\xff');
  return {from_bytes.run(inputs), from_file.run(inputs), from_pipe.run(inputs)};
}

// Every source is refused in the words of its own.
void refuse_other_sources() {
  const auto refused = [](const char* words, auto open_it) {
    try {
      open_it();
    } catch (const exportkit::Error& error) {
      if (error.message().find(words) != std::string::npos) return;
      fail(error.what());
    }
    fail("a source without a package was taken");
  };
  refused("0 bytes in memory", [] { exportkit::Model::open(std::span<const std::byte>()); });
  refused("descriptor -1 is not open", [] { exportkit::Model::open_descriptor(-1); });
  exportkit::OpenOptions little;
  little.stream_limit = 3;
  int ends[2];
  if (pipe(ends) != 0 || write(ends[1], "more", 4) != 4) fail("no pipe");
  close(ends[1]);
  refused("gave more than 3 bytes", [&] { exportkit::Model::open_descriptor(ends[0], little); });
  close(ends[0]);
}

// A tensor whose storage ends before it does is not read.
void refuse_cut_storage(const Fixture& fixture) {
  at::Tensor cut = fixture.inputs.at(0).clone();
  cut.storage().unsafeGetStorageImpl()->set_nbytes(cut.nbytes() - 1);
  try {
    fixture.model.run({cut});
  } catch (const exportkit::Error& error) {
    if (error.message().find("of its storage") != std::string::npos) return;
  }
  fail("a tensor whose storage was cut short was taken");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  exportkit::OpenOptions options;
  options.runners = kCallers;
  try {
    exportkit::Model model = exportkit::Model::open(argv[1], options);
    Fixture fixture{model, model.recorded_case(0).calls[0].inputs, {}, {}, argv[3], argv[4]};
    const auto packaged = model.run(fixture.inputs);
    refuse_cut_storage(fixture);
    model.swap_weights(fixture.new_file);
    fixture.new_answer = model.run(fixture.inputs);
    model.swap_weights(fixture.old_file);
    fixture.old_answer = model.run(fixture.inputs);
    if (same(fixture.old_answer, fixture.new_answer)) fail("both files give one answer");
    for (const Answer& other : answers_of_other_sources(argv[1], fixture.inputs)) {
      if (!same(other, packaged)) fail("another model was changed, or another source gives another answer");
    }
    refuse_other_sources();
    swap_while_calls_go_on(fixture);
    std::filesystem::last_write_time(argv[1], std::filesystem::file_time_type::clock::now());
    refuse(fixture, fixture.new_file);
    exportkit::write_safetensors(argv[2], {{"input", fixture.inputs.at(0)},
                                           {"packaged", packaged.at(0)},
                                           {"old", fixture.old_answer.at(0)},
                                           {"new", fixture.new_answer.at(0)}});
  } catch (const exportkit::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.name(), error.what());
    return error.exit_code();
  }
}
