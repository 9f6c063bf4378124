#include <algorithm>

#include "steps/server.h"

using namespace exportkit::steps;

namespace exportkit::steps {
namespace {

constexpr size_t kMostSpare = 1024, kLargestSpare = 16 << 10;
constexpr size_t kMostAnswer = (16 << 10) - 64;  // with its heads it is one frame, of the size that every client takes

// Lets the caller answer a step that will not run.
void drop(const Waiting& step, ek_steps& steps, ek_steps_dropped& dropped) {
  ++dropped.queued.steps;
  dropped.queued.rows += step.rows;
  dropped.queued.bytes += step.size;
  if (step.call == nullptr) return;
  step.call->places[step.place - step.call->first].step = nullptr;
  steps.places.push_back({step.call->number, step.place, step.sequence->number, 0});
}

// Takes a step out of its queue. Returns null if it runs.
std::unique_ptr<Waiting> withdraw(ek_steps_queue& queue, const Waiting* step) {
  const std::lock_guard<std::mutex> guard(queue.lock);
  if (step->running) return nullptr;
  const auto found =
      std::find_if(queue.queued.begin(), queue.queued.end(), [step](const auto& each) { return each.get() == step; });
  auto taken = std::move(*found);
  queue.queued.erase(found);
  queue.rows -= taken->rows;
  return taken;
}

}  // namespace

std::unique_ptr<Waiting> new_step(ek_steps& steps, size_t size) {
  auto step = steps.spare.empty() ? std::make_unique<Waiting>() : std::move(steps.spare.back());
  if (!steps.spare.empty()) steps.spare.pop_back();
  if (step->capacity < size) {
    step->data = std::make_unique_for_overwrite<char[]>(size);
    step->capacity = size;
  }
  step->running = step->failed = false;
  return step;
}

void give_back(ek_steps& steps, std::unique_ptr<Waiting> step) {
  if (steps.spare.size() < kMostSpare && step->capacity <= kLargestSpare) steps.spare.push_back(std::move(step));
}

void enqueue(ek_steps_queue& queue, std::unique_ptr<Waiting> step) {
  const std::lock_guard<std::mutex> guard(queue.lock);
  queue.rows += step->rows;
  queue.queued.push_back(std::move(step));
}

void erase(ek_steps_sequence* sequence) {
  auto& used = sequence->queue->steps->used;
  if (sequence->used) used.erase(std::remove(used.begin(), used.end(), sequence), used.end());
  delete sequence;
}

}  // namespace exportkit::steps

ek_steps* ek_steps_open(const double* bounds, size_t count) {
  auto* steps = new ek_steps;
  steps->bounds.assign(bounds, bounds + std::min<size_t>(count, EK_STEPS_BOUNDS - 1));
  return steps;
}

void ek_steps_close(ek_steps* steps) { delete steps; }

int ek_steps_add_form(ek_steps* steps, uint64_t number, const char* form, size_t size, const uint64_t* sizes,
                      const uint32_t* order, size_t count, uint64_t rows) {
  Form known{{}, number, rows, 0};
  for (size_t place = 0; place < count; ++place) {
    if (order[place] >= count) return -1;
    Part part{{}, sizes[place], order[place]};
    append_field_head(part.head, 7, sizes[place]);
    known.size += sizes[place];
    known.parts.push_back(std::move(part));
  }
  steps->forms.insert_or_assign(std::string(form, size), std::move(known));
  return 0;
}

void ek_steps_remove_form(ek_steps* steps, uint64_t number) {
  for (auto each = steps->forms.begin(); each != steps->forms.end();)
    each = each->second.number == number ? steps->forms.erase(each) : std::next(each);
}

ek_steps_queue* ek_steps_open_queue(ek_steps* steps, uint64_t number, double delay, uint64_t most_rows,
                                    const uint64_t* input_sizes, size_t inputs, const uint64_t* state_sizes,
                                    const uint8_t* read, const uint8_t* written, size_t states) {
  auto* queue = new ek_steps_queue;
  queue->steps = steps, queue->number = number, queue->delay = delay, queue->most_rows = most_rows;
  queue->input_sizes.assign(input_sizes, input_sizes + inputs);
  queue->state_sizes.assign(state_sizes, state_sizes + states);
  queue->read.assign(read, read + states);
  queue->written.assign(written, written + states);
  return queue;
}

int64_t* ek_steps_queue_bytes(ek_steps_queue* queue) { return &queue->room; }

int ek_steps_set_answer(ek_steps_queue* queue, uint64_t rows, const char* before, size_t before_size,
                        const char* behind, size_t behind_size, const uint64_t* sizes, size_t outputs) {
  Template known{{before, before_size}, {behind, behind_size}, {sizes, sizes + outputs}};
  size_t size = before_size + behind_size;
  for (size_t place = 0; place < outputs; ++place) size += sizes[place] + 11;
  if (size > kMostAnswer) return -1;
  const std::lock_guard<std::mutex> guard(queue->lock);
  queue->answers.try_emplace(rows, std::move(known));
  return 0;
}

void ek_steps_close_queue(ek_steps_queue* queue) { delete queue; }

ek_steps_sequence* ek_steps_open_sequence(ek_steps_queue* queue, uint64_t number, uint64_t form, uint64_t owner,
                                          int is_number, uint64_t id, const char* text, size_t text_size,
                                          void* const* state) {
  auto* sequence = new ek_steps_sequence;
  sequence->queue = queue, sequence->number = number;
  key_of(sequence->key, form, owner, is_number != 0, id, {text, text_size});
  for (size_t place = 0; place < queue->state_sizes.size(); ++place)
    sequence->state.push_back(static_cast<char*>(state[place]));
  queue->steps->sequences.insert_or_assign(sequence->key, sequence);
  return sequence;
}

uint64_t ek_steps_leave_sequence(ek_steps_sequence* sequence) {
  auto& known = sequence->queue->steps->sequences;
  if (const auto found = known.find(sequence->key); found != known.end() && found->second == sequence)
    known.erase(found);
  sequence->left = true;
  const uint64_t unanswered = sequence->unanswered();
  if (!unanswered) erase(sequence);
  return unanswered;
}

void ek_steps_close_sequence(ek_steps_sequence* sequence, ek_steps_dropped* dropped) {
  ek_steps& steps = *sequence->queue->steps;
  *dropped = {{sequence->queue->number, 0, 0, 0}, 0, nullptr, 0};
  steps.places.clear();
  if (sequence->current != nullptr) {
    if (const auto step = withdraw(*sequence->queue, sequence->current)) {
      drop(*step, steps, *dropped);
      sequence->current = nullptr;
    }
  }
  for (const auto& step : sequence->waiting) drop(*step, steps, *dropped);
  sequence->waiting.clear();
  if (const auto found = steps.sequences.find(sequence->key);
      found != steps.sequences.end() && found->second == sequence)
    steps.sequences.erase(found);
  sequence->closed = true;
  if (sequence->current == nullptr) {
    dropped->gone = 1;
    erase(sequence);
  }
  dropped->count = steps.places.size();
  dropped->places = steps.places.data();
}

size_t ek_steps_used(ek_steps* steps, const uint64_t** sequences, const double** when) {
  std::sort(steps->used.begin(), steps->used.end(),
            [](const auto* one, const auto* other) { return one->last < other->last; });
  steps->numbers.clear(), steps->when.clear();
  for (ek_steps_sequence* sequence : steps->used) {
    sequence->used = false;
    steps->numbers.push_back(sequence->number);
    steps->when.push_back(sequence->current == nullptr ? sequence->last : now());
  }
  // Those that have a step now are used until it ends.
  std::erase_if(steps->used, [](ek_steps_sequence* each) { return !(each->used = each->current != nullptr); });
  *sequences = steps->numbers.data();
  *when = steps->when.data();
  return steps->numbers.size();
}
