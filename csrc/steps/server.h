// The parts of a server of steps, and how they refer to one another.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "steps/request.h"
#include "steps/steps.h"

namespace exportkit::steps {

// What stands before each input's elements, and how many bytes they have.
struct Part {
  std::string head;
  uint64_t size;
  uint32_t order;  // the input's place among the model's
};

struct Form {
  std::vector<Part> parts;
  uint64_t number, rows, size;
};

struct Template {
  std::string before, behind;
  std::vector<uint64_t> sizes;
};

// A step that waits or runs. `call` is null where nobody waits for its answer.
struct Waiting {
  ek_steps_sequence* sequence;
  ek_steps_call* call;
  uint64_t place, rows, size;
  double arrived;
  uint32_t stream;
  std::string request_id;
  std::vector<std::string_view> inputs;  // into `data`, in the model's order
  std::unique_ptr<char[]> data;
  size_t capacity = 0;  // of `data`
  bool running = false, failed = false;
  std::string answer;  // its frame
};

// A place among the answers of a call. `step` is the one that will fill it; null: the caller will, or it is filled.
struct Answer {
  Waiting* step = nullptr;
  bool ready = false;
  std::unique_ptr<Waiting> answered;  // null: the caller has the answer
};

}  // namespace exportkit::steps

struct ek_steps_sequence {
  ek_steps_queue* queue;
  uint64_t number;
  std::string key;
  std::vector<char*> state;
  std::deque<std::unique_ptr<exportkit::steps::Waiting>> waiting;  // behind `current`
  exportkit::steps::Waiting* current = nullptr;                    // in the queue, or runs
  bool left = false, closed = false, used = false;
  double last = 0;
  uint64_t unanswered() const { return waiting.size() + (current != nullptr); }
};

struct ek_steps_queue {
  ek_steps* steps;
  uint64_t number, most_rows;
  double delay;
  std::vector<uint64_t> input_sizes, state_sizes;
  std::vector<uint8_t> read, written;
  int64_t room = 0;
  std::unordered_map<uint64_t, exportkit::steps::Template> answers;
  ek_steps_count read_now{};  // since this was counted last
  std::mutex lock;            // guards the next two and `answers`
  std::deque<std::unique_ptr<exportkit::steps::Waiting>> queued;
  uint64_t rows = 0;
  double due_locked() const;
};

struct ek_steps_batch {
  ek_steps_queue* queue;
  double taken;
  std::vector<std::unique_ptr<exportkit::steps::Waiting>> steps;
};

struct ek_steps_call {
  ek_steps_client* client;
  uint64_t number, owner;
  uint32_t stream;
  bool frames = false, messages = false;
  uint64_t most = 0;   // places
  uint64_t first = 0;  // the number of the first place
  std::deque<exportkit::steps::Answer> places;
  std::string out;
  ek_steps_read_call read_now{};  // since this was counted last
};

struct ek_steps_client {
  ek_steps* steps;
  std::unordered_map<uint32_t, ek_steps_call*> calls;
};

struct ek_steps {
  std::vector<double> bounds;
  std::unordered_map<std::string, exportkit::steps::Form> forms;
  std::unordered_map<std::string, ek_steps_sequence*> sequences;
  std::vector<ek_steps_sequence*> used;
  std::vector<ek_steps_call*> calls_read;  // of which something was
  std::vector<ek_steps_queue*> queues_read;
  // The results of the last call of each kind, to which the caller has pointers.
  std::vector<ek_steps_read_call> read_calls;
  std::vector<ek_steps_count> read_queues;
  std::vector<ek_steps_answers> answers;
  std::vector<ek_steps_place> places, failures;
  std::vector<uint64_t> numbers, rested, gone;
  std::vector<double> when;
  std::string form, key;
  std::vector<std::unique_ptr<exportkit::steps::Waiting>> spare;  // their memory is used again
};

namespace exportkit::steps {

double now();

// The name of a sequence among all: the form of its requests, whose it is, and its id.
void key_of(std::string& key, uint64_t form, uint64_t owner, bool is_number, uint64_t number, std::string_view text);

// Returns one with room for so many bytes of inputs.
std::unique_ptr<Waiting> new_step(ek_steps& steps, size_t size);
// Nobody needs it any more.
void give_back(ek_steps& steps, std::unique_ptr<Waiting> step);

// Puts a step into the queue of its sequence's copy.
void enqueue(ek_steps_queue& queue, std::unique_ptr<Waiting> step);

// Takes what a call may send next, up to an answer of the caller's.
ek_steps_answers collect(ek_steps_call& call);

// Frees a sequence without steps.
void erase(ek_steps_sequence* sequence);

}  // namespace exportkit::steps
