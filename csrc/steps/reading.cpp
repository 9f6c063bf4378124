#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "steps/server.h"

namespace exportkit::steps {
namespace {

constexpr size_t kFrameHead = 9, kPrefix = 5, kMostFrame = 16 << 10;
constexpr size_t kMostAhead = 4096,
                 kBytesAhead = 4 << 20;  // steps of a call that wait: no more than the window of a stream

uint32_t big_endian(const char* data, size_t size) {
  uint32_t value = 0;
  for (size_t at = 0; at < size; ++at) value = value << 8 | static_cast<unsigned char>(data[at]);
  return value;
}

// A message whose sequence is known, and which may be queued.
struct Ready {
  ek_steps_sequence* sequence;
  const Form* form;
  std::string_view message;
  Step step;
};

bool find(ek_steps_call& call, std::string_view message, Ready& ready) {
  ek_steps& steps = *call.client->steps;
  if (!read_step(message, steps.form, ready.step) || ready.step.start || ready.step.end) return false;
  const auto form = steps.forms.find(steps.form);
  if (form == steps.forms.end()) return false;
  size_t at = ready.step.data;
  for (const Part& part : form->second.parts) {
    if (message.size() - at < part.head.size() || message.compare(at, part.head.size(), part.head) != 0) return false;
    at += part.head.size();
    if (message.size() - at < part.size) return false;
    at += part.size;
  }
  if (at != message.size()) return false;
  const Step& step = ready.step;
  key_of(steps.key, form->second.number, call.owner, step.is_number, step.number, step.text);
  const auto found = steps.sequences.find(steps.key);
  if (found == steps.sequences.end()) return false;
  ready.sequence = found->second;
  ready.form = &form->second;
  ready.message = message;
  return true;
}

void accept(ek_steps_call& call, const Ready& ready, double arrived) {
  ek_steps_sequence& sequence = *ready.sequence;
  const Form& form = *ready.form;
  auto step = new_step(*call.client->steps, form.size);
  step->sequence = &sequence;
  step->call = &call;
  step->place = call.first + call.places.size();
  call.places.emplace_back().step = step.get();
  step->stream = call.stream;
  step->rows = form.rows;
  step->size = form.size;
  step->arrived = arrived;
  step->request_id = ready.step.request_id;
  step->inputs.resize(form.parts.size());
  size_t from = ready.step.data, to = 0;
  for (const Part& part : form.parts) {
    from += part.head.size();
    std::memcpy(step->data.get() + to, ready.message.data() + from, part.size);
    step->inputs[part.order] = {step->data.get() + to, part.size};
    from += part.size;
    to += part.size;
  }
  ek_steps_queue& queue = *sequence.queue;
  ek_steps_count& count = queue.read_now;
  if (!count.steps++) queue.steps->queues_read.push_back(&queue);
  count.rows += form.rows;
  count.bytes += form.size;
  sequence.last = arrived;
  if (!sequence.used) {
    sequence.used = true;
    call.client->steps->used.push_back(&sequence);
  }
  if (sequence.current == nullptr) {
    sequence.current = step.get();
    enqueue(queue, std::move(step));
  } else {
    sequence.waiting.push_back(std::move(step));
  }
}

// Keeps room for all of them in their queues, if there is any, and if the call may have so many.
bool keep_room(const ek_steps_call& call, const std::vector<Ready>& all) {
  size_t largest = 1;
  for (const Ready& ready : all) largest = std::max<size_t>(largest, ready.form->size);
  const size_t most = std::max<size_t>(call.most, std::min(kMostAhead, kBytesAhead / largest));
  if (call.places.size() + all.size() > most) return false;
  size_t kept = 0;
  bool enough = true;
  while (kept < all.size() && enough) {
    const Ready& ready = all[kept++];
    enough = (ready.sequence->queue->room -= static_cast<int64_t>(ready.form->size)) >= 0;
  }
  while (!enough && kept) {
    const Ready& ready = all[--kept];
    ready.sequence->queue->room += static_cast<int64_t>(ready.form->size);
  }
  return enough;
}

// Splits a frame's payload into messages. Returns false unless it has whole steps alone that all may be queued.
bool read_messages(ek_steps_call& call, std::string_view payload, std::vector<Ready>& all) {
  all.clear();
  while (!payload.empty()) {
    if (payload.size() < kPrefix || payload[0] != 0) return false;
    const size_t size = big_endian(payload.data() + 1, 4);
    if (payload.size() - kPrefix < size) return false;
    Ready ready;
    if (!find(call, payload.substr(kPrefix, size), ready)) return false;
    all.push_back(ready);
    payload.remove_prefix(kPrefix + size);
  }
  return keep_room(call, all);
}

void accept_all(ek_steps_call& call, const std::vector<Ready>& all, size_t frame, double arrived) {
  ek_steps_read_call& read = call.read_now;
  if (!read.message_bytes) call.client->steps->calls_read.push_back(&call);
  read.frame_bytes += frame;
  for (const Ready& ready : all) {
    read.message_bytes += ready.message.size();
    accept(call, ready, arrived);
  }
}

}  // namespace

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

void key_of(std::string& key, uint64_t form, uint64_t owner, bool is_number, uint64_t number, std::string_view text) {
  key.assign(reinterpret_cast<const char*>(&form), sizeof form);
  key.append(reinterpret_cast<const char*>(&owner), sizeof owner);
  key.push_back(is_number ? 'n' : 't');
  if (is_number) {
    key.append(reinterpret_cast<const char*>(&number), sizeof number);
  } else {
    key.append(text);
  }
}

}  // namespace exportkit::steps

using namespace exportkit::steps;

size_t ek_steps_read(ek_steps_client* client, const char* data, size_t size, size_t at) {
  const double arrived = now();
  static thread_local std::vector<Ready> all;
  while (at <= size && size - at >= kFrameHead) {
    const char* head = data + at;
    const size_t length = big_endian(head, 3);
    // Kind 0 is DATA. Without flags the frame does not end its stream, and has no padding.
    if (head[3] != 0 || head[4] != 0 || length == 0 || length > kMostFrame || length > size - at - kFrameHead) break;
    const auto call = client->calls.find(big_endian(head + 5, 4) & 0x7FFFFFFF);
    if (call == client->calls.end() || !call->second->frames) break;
    if (!read_messages(*call->second, {head + kFrameHead, length}, all)) break;
    accept_all(*call->second, all, length, arrived);
    at += kFrameHead + length;
  }
  return at;
}

int ek_steps_read_message(ek_steps_call* call, const char* message, size_t size) {
  std::vector<Ready> all(1);
  const bool taken = call->messages && find(*call, {message, size}, all[0]) && keep_room(*call, all);
  if (taken) accept_all(*call, all, 0, now());
  return taken;
}

void ek_steps_count_read(ek_steps* steps, ek_steps_read_result* result) {
  steps->read_calls.clear(), steps->read_queues.clear();
  for (ek_steps_call* call : steps->calls_read) {
    call->read_now.call = call->number;
    steps->read_calls.push_back(std::exchange(call->read_now, {}));
  }
  for (ek_steps_queue* queue : steps->queues_read) {
    queue->read_now.queue = queue->number;
    steps->read_queues.push_back(std::exchange(queue->read_now, {}));
  }
  steps->calls_read.clear(), steps->queues_read.clear();
  *result = {steps->read_calls.size(), steps->read_queues.size(), steps->read_calls.data(), steps->read_queues.data()};
}

int ek_steps_knows(ek_steps_call* call, const char* message, size_t size) {
  Ready ready;
  return find(*call, {message, size}, ready);
}

long ek_steps_read_head(const char* message, size_t size, char* form, size_t capacity, char* text, uint64_t* numbers) {
  std::string read;
  Step step;
  if (!read_step({message, size}, read, step) || read.size() > capacity) return -1;
  std::memcpy(form, read.data(), read.size());
  std::memcpy(text, step.request_id.data(), step.request_id.size());
  std::memcpy(text + step.request_id.size(), step.text.data(), step.text.size());
  const uint64_t found[] = {
      step.request_id.size(), step.text.size(), step.is_number, step.number, step.start, step.end, step.data};
  std::memcpy(numbers, found, sizeof found);
  return static_cast<long>(read.size());
}
