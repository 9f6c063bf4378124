#include <algorithm>

#include "steps/server.h"

namespace exportkit::steps {

ek_steps_answers collect(ek_steps_call& call) {
  ek_steps_answers found{call.number, 0, 0, nullptr, 0, 0, 0};
  call.out.clear();
  while (!call.places.empty() && call.places.front().ready && !found.own) {
    auto step = std::move(call.places.front().answered);
    if (step == nullptr) {
      found.own = 1;
      found.place = call.first;
    } else {
      ++found.count;
      found.largest = std::max<uint64_t>(found.largest, step->answer.size());
      call.out += step->answer;
      give_back(*call.client->steps, std::move(step));
    }
    call.places.pop_front();
    ++call.first;
  }
  found.data = call.out.data();
  found.size = call.out.size();
  return found;
}

}  // namespace exportkit::steps

using namespace exportkit::steps;

ek_steps_client* ek_steps_open_client(ek_steps* steps) { return new ek_steps_client{steps, {}}; }

void ek_steps_close_client(ek_steps_client* client) { delete client; }

ek_steps_call* ek_steps_open_call(ek_steps_client* client, uint64_t number, uint32_t stream, uint64_t owner) {
  auto* call = new ek_steps_call;
  call->client = client, call->number = number, call->stream = stream, call->owner = owner;
  client->calls.insert_or_assign(stream, call);
  return call;
}

void ek_steps_allow(ek_steps_call* call, int frames, int messages, uint64_t most) {
  call->frames = frames != 0, call->messages = messages != 0, call->most = most;
}

size_t ek_steps_close_call(ek_steps_call* call, const uint64_t** sequences) {
  ek_steps& steps = *call->client->steps;
  steps.numbers.clear();
  for (const Answer& place : call->places) {
    if (place.step == nullptr) continue;
    place.step->call = nullptr;
    steps.numbers.push_back(place.step->sequence->number);
  }
  auto& calls = call->client->calls;
  if (const auto found = calls.find(call->stream); found != calls.end() && found->second == call) calls.erase(found);
  std::erase(steps.calls_read, call);
  delete call;
  *sequences = steps.numbers.data();
  return steps.numbers.size();
}

uint64_t ek_steps_keep_place(ek_steps_call* call) {
  call->places.emplace_back();
  return call->first + call->places.size() - 1;
}

void ek_steps_put(ek_steps_call* call, uint64_t place) {
  if (place - call->first < call->places.size()) call->places[place - call->first].ready = true;
}

void ek_steps_next(ek_steps_call* call, ek_steps_answers* answers) { *answers = collect(*call); }

uint64_t ek_steps_waiting(const ek_steps_call* call) { return call->places.size(); }
