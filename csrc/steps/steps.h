// The way of a step of a sequence through a server, from the frames of its connection into a batch and back, for the
// steps that need nothing else: exportkit/serve/engine/step_library.py calls it, and says when that is.
//
// Only the event loop's thread may call these functions, unless another one is named below. No function throws. Do not
// use a pointer after it was closed.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EK_STEPS_BOUNDS 16  // of the histogram of seconds

typedef struct ek_steps ek_steps;                // of a server
typedef struct ek_steps_client ek_steps_client;  // a connection
typedef struct ek_steps_call ek_steps_call;      // a stream of requests
typedef struct ek_steps_queue ek_steps_queue;    // of one copy of a model: steps that can run together
typedef struct ek_steps_sequence ek_steps_sequence;
typedef struct ek_steps_batch ek_steps_batch;

// How many steps of a queue something is about.
typedef struct ek_steps_count {
  uint64_t queue;  // its number
  uint64_t steps, rows, bytes;
} ek_steps_count;

// What was read of a call: bytes of frames, and bytes of messages.
typedef struct ek_steps_read_call {
  uint64_t call;  // its number
  uint64_t frame_bytes, message_bytes;
} ek_steps_read_call;

typedef struct ek_steps_read_result {
  size_t call_count, queue_count;
  const ek_steps_read_call* calls;
  const ek_steps_count* queues;
} ek_steps_read_result;

// What a call sends next: `count` frames, each with one message. Behind them the caller's own answer, if `own` is not
// 0: what follows on it is returned by `ek_steps_next`.
typedef struct ek_steps_answers {
  uint64_t call;
  uint64_t count, largest;  // frames, and the bytes of the largest one
  const char* data;
  size_t size;
  uint64_t own, place;
} ek_steps_answers;

// A step that the caller has to answer, at `place` among the answers of its call. `step` is its place in the batch.
typedef struct ek_steps_place {
  uint64_t call, place, sequence, step;
} ek_steps_place;

typedef struct ek_steps_dropped {
  ek_steps_count queued;  // those that waited, whoever wants their answers
  size_t count;
  const ek_steps_place* places;
  int gone;  // whether the sequence has ended: none of its steps was running
} ek_steps_dropped;

typedef struct ek_steps_finished {
  size_t call_count;
  const ek_steps_answers* calls;
  ek_steps_count answered, failed, unwanted;  // the last: nobody waits for them
  double seconds, waited;                     // of the answered ones together
  uint64_t bounds[EK_STEPS_BOUNDS];           // how many took up to so long
  size_t failed_count, rested_count, gone_count;
  const ek_steps_place* failures;  // `call` 0: nobody waits for it
  const uint64_t* rested;          // left ones without a step
  const uint64_t* gone;            // closed ones without a step, which are no more
  ek_steps_count next;             // steps that follow on these, which are in the queue now
} ek_steps_finished;

typedef struct ek_steps_taken {
  ek_steps_batch* batch;  // null: nothing may run yet
  ek_steps_count count;
} ek_steps_taken;

ek_steps* ek_steps_open(const double* bounds, size_t count);
void ek_steps_close(ek_steps* steps);

// A request that clients repeat: `form` is what `ek_steps_read_head` makes of it. `sizes` are the bytes of each input,
// and `order` its place among the model's.
int ek_steps_add_form(ek_steps* steps, uint64_t number, const char* form, size_t size, const uint64_t* sizes,
                      const uint32_t* order, size_t count, uint64_t rows);
void ek_steps_remove_form(ek_steps* steps, uint64_t number);

// For tests: the form, the request's id and the sequence of a message. Returns the form's bytes, or -1.
long ek_steps_read_head(const char* message, size_t size, char* form, size_t capacity, char* text, uint64_t* numbers);

ek_steps_client* ek_steps_open_client(ek_steps* steps);
void ek_steps_close_client(ek_steps_client* client);

// `number` is not 0.
ek_steps_call* ek_steps_open_call(ek_steps_client* client, uint64_t number, uint32_t stream, uint64_t owner);
// Whether frames of the call are read here, and whether messages are.
void ek_steps_allow(ek_steps_call* call, int frames, int messages, uint64_t most);
// The client left, or the call is over. Returns the sequence of each step that had no answer; nobody waits for it now.
size_t ek_steps_close_call(ek_steps_call* call, const uint64_t** sequences);

// Reads frames from `at` on, while each has steps alone. Returns where the first one begins that was not read.
size_t ek_steps_read(ek_steps_client* client, const char* data, size_t size, size_t at);
// Reads one message. Returns whether it is a step that is queued now.
int ek_steps_read_message(ek_steps_call* call, const char* message, size_t size);
// What was read since this was called last, which the caller does before it closes a queue.
void ek_steps_count_read(ek_steps* steps, ek_steps_read_result* result);
// Whether a message is a step that could be queued here, were there room and its call allowed.
int ek_steps_knows(ek_steps_call* call, const char* message, size_t size);

// Keeps a place among the answers of a call for one that is made elsewhere.
uint64_t ek_steps_keep_place(ek_steps_call* call);
// The answer is there, which the caller keeps until `ek_steps_next` says that it is its turn.
void ek_steps_put(ek_steps_call* call, uint64_t place);
void ek_steps_next(ek_steps_call* call, ek_steps_answers* answers);
uint64_t ek_steps_waiting(const ek_steps_call* call);

// `state_sizes` are the bytes of a row of each tensor of the state, `read` and `written` whether the method does that.
ek_steps_queue* ek_steps_open_queue(ek_steps* steps, uint64_t number, double delay, uint64_t most_rows,
                                    const uint64_t* input_sizes, size_t inputs, const uint64_t* state_sizes,
                                    const uint8_t* read, const uint8_t* written, size_t states);
// The bytes of inputs that a queue may take before the next update, which the caller writes.
int64_t* ek_steps_queue_bytes(ek_steps_queue* queue);
// What stands before and behind the id in the answers to steps of so many rows, and the bytes of their outputs.
int ek_steps_set_answer(ek_steps_queue* queue, uint64_t rows, const char* before, size_t before_size,
                        const char* behind, size_t behind_size, const uint64_t* sizes, size_t outputs);
void ek_steps_close_queue(ek_steps_queue* queue);

// From now on the steps of a sequence are read here. `state` has the first row of each tensor.
ek_steps_sequence* ek_steps_open_sequence(ek_steps_queue* queue, uint64_t number, uint64_t form, uint64_t owner,
                                          int is_number, uint64_t id, const char* text, size_t text_size,
                                          void* const* state);
// Reads no more of its steps. Returns how many are not answered; with none, the sequence is no more.
uint64_t ek_steps_leave_sequence(ek_steps_sequence* sequence);
// Ends the sequence: only the step that runs is answered.
void ek_steps_close_sequence(ek_steps_sequence* sequence, ek_steps_dropped* dropped);
// The sequences that had steps since this was called last, and when.
size_t ek_steps_used(ek_steps* steps, const uint64_t** sequences, const double** when);

// When the next batch may run: 0 now, infinity never. Any thread.
double ek_steps_due(ek_steps_queue* queue);

// --- the thread of a runner -----------------------------------------------------------------------------------------

void ek_steps_take(ek_steps_queue* queue, uint64_t most_rows, double now, ek_steps_taken* taken);
// Copies the inputs and the state of the steps `first` to `end` into tensors that begin with the row of `first`.
void ek_steps_gather(const ek_steps_batch* batch, size_t first, size_t end, void* const* inputs, void* const* state);
void ek_steps_scatter(const ek_steps_batch* batch, size_t first, size_t end, void* const* state);
// Makes the answers of these steps of their outputs. Returns 0, or -1 where no answer of so many rows is known.
int ek_steps_answer(ek_steps_batch* batch, size_t first, size_t end, const void* const* outputs);
void ek_steps_fail(ek_steps_batch* batch, size_t step);
uint64_t ek_steps_rows(const ek_steps_batch* batch, size_t first, size_t end);

// --- the event loop's thread again ----------------------------------------------------------------------------------

// Ends a batch, which is no more then.
void ek_steps_finish(ek_steps_batch* batch, double now, ek_steps_finished* finished);

#ifdef __cplusplus
}
#endif
