#include <algorithm>
#include <cstring>

#include "steps/server.h"

namespace exportkit::steps {
namespace {

constexpr unsigned kResponse = 2, kAnswerId = 3, kRawOutputs = 6;  // fields of the answers in open_inference.proto

size_t field_size(size_t size) {
  size_t head = 2;
  for (size_t rest = size; rest >= 0x80; rest >>= 7) ++head;
  return head + size;
}

size_t response_size(const Template& known, const Waiting& step) {
  size_t size = known.before.size() + known.behind.size();
  if (!step.request_id.empty()) size += field_size(step.request_id.size());
  for (const uint64_t output : known.sizes) size += field_size(output);
  return size;
}

// A frame of HTTP/2 with a message of gRPC.
void append_frame_head(std::string& out, uint32_t stream, size_t message) {
  const size_t length = message + 5;
  for (int shift = 16; shift >= 0; shift -= 8) out.push_back(static_cast<char>(length >> shift));
  out.append(2, '\0');  // DATA, without flags
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(stream >> shift));
  out.push_back('\0');  // not compressed
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(message >> shift));
}

// Makes the frame that answers a step. `outputs` are its rows of each.
void answer(Waiting& step, const Template& known, const std::vector<const char*>& outputs) {
  const size_t response = response_size(known, step), message = field_size(response);
  std::string& out = step.answer;
  out.clear();
  out.reserve(message + 14);
  append_frame_head(out, step.stream, message);
  append_field_head(out, kResponse, response);
  out += known.before;
  if (!step.request_id.empty()) {
    append_field_head(out, kAnswerId, step.request_id.size());
    out += step.request_id;
  }
  out += known.behind;
  for (size_t place = 0; place < outputs.size(); ++place) {
    append_field_head(out, kRawOutputs, known.sizes[place]);
    out.append(outputs[place], known.sizes[place]);
  }
}

// What is known stays where it is while others are added.
const Template* known_answer(ek_steps_queue& queue, uint64_t rows) {
  const std::lock_guard<std::mutex> guard(queue.lock);
  const auto found = queue.answers.find(rows);
  return found == queue.answers.end() ? nullptr : &found->second;
}

void add(ek_steps_count& count, const Waiting& step) {
  ++count.steps;
  count.rows += step.rows;
  count.bytes += step.size;
}

void count_times(ek_steps_finished& finished, const std::vector<double>& bounds, double seconds, double waited) {
  finished.seconds += seconds;
  finished.waited += waited;
  ++finished.bounds[std::lower_bound(bounds.begin(), bounds.end(), seconds) - bounds.begin()];
}

// The sequence of a step that ran goes on with the next one.
void follow(ek_steps_sequence& sequence, ek_steps_finished& finished, ek_steps& steps) {
  sequence.current = nullptr;
  if (sequence.closed) {
    steps.gone.push_back(sequence.number);
    erase(&sequence);
  } else if (!sequence.waiting.empty()) {
    auto next = std::move(sequence.waiting.front());
    sequence.waiting.pop_front();
    sequence.current = next.get();
    add(finished.next, *next);
    enqueue(*sequence.queue, std::move(next));
  } else if (sequence.left) {
    steps.rested.push_back(sequence.number);
    erase(&sequence);
  }
}

}  // namespace

}  // namespace exportkit::steps

using namespace exportkit::steps;

double ek_steps_queue::due_locked() const {
  if (queued.empty()) return std::numeric_limits<double>::infinity();
  return rows >= most_rows || delay <= 0 ? 0.0 : queued.front()->arrived + delay;
}

double ek_steps_due(ek_steps_queue* queue) {
  const std::lock_guard<std::mutex> guard(queue->lock);
  return queue->due_locked();
}

void ek_steps_take(ek_steps_queue* queue, uint64_t most_rows, double when, ek_steps_taken* taken) {
  *taken = {nullptr, {queue->number, 0, 0, 0}};
  const std::lock_guard<std::mutex> guard(queue->lock);
  if (queue->due_locked() > when) return;
  auto batch = std::make_unique<ek_steps_batch>();
  batch->queue = queue;
  batch->taken = when;
  ek_steps_count& count = taken->count;
  while (!queue->queued.empty()) {
    Waiting& step = *queue->queued.front();
    if (count.steps && count.rows + step.rows > most_rows) break;
    step.running = true;
    add(count, step);
    batch->steps.push_back(std::move(queue->queued.front()));
    queue->queued.pop_front();
  }
  queue->rows -= count.rows;
  taken->batch = batch.release();
}

void ek_steps_gather(const ek_steps_batch* batch, size_t first, size_t end, void* const* inputs, void* const* state) {
  const ek_steps_queue& queue = *batch->queue;
  size_t row = 0;
  for (size_t place = first; place < end; ++place) {
    const Waiting& step = *batch->steps[place];
    for (size_t input = 0; input < step.inputs.size(); ++input)
      std::memcpy(static_cast<char*>(inputs[input]) + row * queue.input_sizes[input], step.inputs[input].data(),
                  step.inputs[input].size());
    for (size_t tensor = 0; tensor < queue.state_sizes.size(); ++tensor)
      if (const size_t size = queue.state_sizes[tensor]; queue.read[tensor] != 0)
        std::memcpy(static_cast<char*>(state[tensor]) + row * size, step.sequence->state[tensor], step.rows * size);
    row += step.rows;
  }
}

void ek_steps_scatter(const ek_steps_batch* batch, size_t first, size_t end, void* const* state) {
  const ek_steps_queue& queue = *batch->queue;
  size_t row = 0;
  for (size_t place = first; place < end; ++place) {
    const Waiting& step = *batch->steps[place];
    for (size_t tensor = 0; tensor < queue.state_sizes.size(); ++tensor)
      if (const size_t size = queue.state_sizes[tensor]; queue.written[tensor] != 0)
        std::memcpy(step.sequence->state[tensor], static_cast<char*>(state[tensor]) + row * size, step.rows * size);
    row += step.rows;
  }
}

int ek_steps_answer(ek_steps_batch* batch, size_t first, size_t end, const void* const* outputs) {
  std::vector<const char*> next;
  for (size_t place = first; place < end; ++place) {
    Waiting& step = *batch->steps[place];
    const Template* known = known_answer(*batch->queue, step.rows);
    if (known == nullptr) return -1;
    const Template& form = *known;
    if (next.empty())
      for (size_t output = 0; output < form.sizes.size(); ++output)
        next.push_back(static_cast<const char*>(outputs[output]));
    answer(step, form, next);
    for (size_t output = 0; output < next.size(); ++output) next[output] += form.sizes[output];
  }
  return 0;
}

void ek_steps_fail(ek_steps_batch* batch, size_t step) { batch->steps[step]->failed = true; }

uint64_t ek_steps_rows(const ek_steps_batch* batch, size_t first, size_t end) {
  uint64_t rows = 0;
  for (size_t place = first; place < end; ++place) rows += batch->steps[place]->rows;
  return rows;
}

void ek_steps_finish(ek_steps_batch* batch, double when, ek_steps_finished* finished) {
  const std::unique_ptr<ek_steps_batch> owned(batch);
  ek_steps& steps = *batch->queue->steps;
  *finished = {};
  steps.answers.clear(), steps.failures.clear(), steps.rested.clear(), steps.gone.clear();
  std::vector<ek_steps_call*> calls;
  for (size_t index = 0; index < batch->steps.size(); ++index) {
    Waiting& step = *batch->steps[index];
    ek_steps_sequence& sequence = *step.sequence;
    sequence.last = when;
    add(step.call == nullptr ? finished->unwanted : step.failed ? finished->failed : finished->answered, step);
    if (step.call != nullptr) {
      Answer& place = step.call->places[step.place - step.call->first];
      place.step = nullptr;
      if (!step.failed) {
        count_times(*finished, steps.bounds, when - step.arrived, batch->taken - step.arrived);
        place.ready = true;
        calls.push_back(step.call);
      }
    }
    if (step.failed) {
      const uint64_t call = step.call == nullptr ? 0 : step.call->number;
      steps.failures.push_back({call, step.place, sequence.number, index});
    }
    if (step.failed && !sequence.closed) {  // the caller closes it
      sequence.current = nullptr;
    } else {
      follow(sequence, *finished, steps);
    }
    if (step.call != nullptr && !step.failed) {
      step.call->places[step.place - step.call->first].answered = std::move(batch->steps[index]);
    } else {
      give_back(steps, std::move(batch->steps[index]));
    }
  }
  std::sort(calls.begin(), calls.end(),
            [](const ek_steps_call* one, const ek_steps_call* other) { return one->number < other->number; });
  calls.erase(std::unique(calls.begin(), calls.end()), calls.end());
  for (ek_steps_call* call : calls) {
    const ek_steps_answers found = collect(*call);
    if (found.count || found.own) steps.answers.push_back(found);
  }
  finished->call_count = steps.answers.size(), finished->calls = steps.answers.data();
  finished->failed_count = steps.failures.size(), finished->failures = steps.failures.data();
  finished->rested_count = steps.rested.size(), finished->rested = steps.rested.data();
  finished->gone_count = steps.gone.size(), finished->gone = steps.gone.data();
}
