// libFuzzer: a connection gets any bytes, in two parts, and what was taken of them runs. The first message is known.
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "steps/server.h"

namespace {

constexpr uint64_t kRow = 8, kForm = 1, kQueue = 2, kSequence = 3, kCall = 4;

std::string known_message() {
  std::string message = "\x0a\x01n\x22\x11\x0a\x0bsequence_id\x12\x02\x10\x07\x2a\x03\x0a\x01x\x3a\x08";
  return message + std::string(kRow, 'x');
}

struct Server {
  ek_steps* steps = ek_steps_open(std::vector<double>{0.001, 1.0}.data(), 2);
  ek_steps_queue* queue;
  ek_steps_client* client = ek_steps_open_client(steps);
  ek_steps_call* call = ek_steps_open_call(client, kCall, 1, 0);
  std::vector<char> state = std::vector<char>(kRow);
  ek_steps_sequence* sequence;

  Server() {
    const uint8_t yes = 1;
    const uint32_t first = 0;
    queue = ek_steps_open_queue(steps, kQueue, 0, 16, &kRow, 1, &kRow, &yes, &yes, 1);
    *ek_steps_queue_bytes(queue) = 1 << 20;
    const std::string form("\x0a\x01n\x2a\x03\x0a\x01x", 8);
    ek_steps_add_form(steps, kForm, form.data(), form.size(), &kRow, &first, 1, 1);
    ek_steps_set_answer(queue, 1, "a", 1, "b", 1, &kRow, 1);
    void* rows = state.data();
    sequence = ek_steps_open_sequence(queue, kSequence, kForm, 0, 1, 7, nullptr, 0, &rows);
    ek_steps_allow(call, 1, 1, 256);
  }

  bool run() {
    ek_steps_taken taken;
    ek_steps_take(queue, 16, std::numeric_limits<double>::max(), &taken);
    if (taken.batch == nullptr) return false;
    std::vector<char> inputs(16 * kRow), rows(16 * kRow);
    void *input = inputs.data(), *row = rows.data();
    const void* output = inputs.data();
    ek_steps_gather(taken.batch, 0, taken.count.steps, &input, &row);
    ek_steps_scatter(taken.batch, 0, taken.count.steps, &row);
    if (ek_steps_answer(taken.batch, 0, taken.count.steps, &output)) __builtin_trap();
    ek_steps_finished finished;
    ek_steps_finish(taken.batch, exportkit::steps::now(), &finished);
    return true;
  }

  ~Server() {
    const uint64_t* left;
    ek_steps_close_call(call, &left);
    ek_steps_dropped dropped;
    ek_steps_close_sequence(sequence, &dropped);
    ek_steps_close_client(client);
    ek_steps_close_queue(queue);
    ek_steps_close(steps);
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string message = known_message();
  Server server;
  if (!ek_steps_read_message(server.call, message.data(), message.size())) __builtin_trap();
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  if (ek_steps_read(server.client, bytes.data(), bytes.size(), 0) > bytes.size()) __builtin_trap();
  ek_steps_read_result result;
  ek_steps_count_read(server.steps, &result);
  ek_steps_read(server.client, bytes.data(), bytes.size(), bytes.empty() ? 0 : data[0] % bytes.size());
  ek_steps_read_message(server.call, bytes.data(), bytes.size());
  while (server.run()) {
  }
  return 0;
}
