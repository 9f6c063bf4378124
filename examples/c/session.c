/* Runs a model with state: makes a session, runs the calls of the first recorded sequence in it, forks it, and saves
 * and loads its state: session model.pt2 state.safetensors */
#include <exportkit/exportkit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct DLManagedTensorVersioned Tensor;

/* Ends the program if a call failed, with the exit code of the command line. */
static void check(int code, exportkit_error** error) {
  if (code == EXPORTKIT_OK) return;
  fprintf(stderr, "%s: %s\n", exportkit_error_name(*error), exportkit_error_message(*error));
  if (*exportkit_error_hint(*error)) fprintf(stderr, "  %s\n", exportkit_error_hint(*error));
  exportkit_error_free(*error);
  exit(code / 100);
}

static void* zeros(size_t count, size_t size) {
  void* memory = calloc(count > 0 ? count : 1, size);
  if (!memory) abort();
  return memory;
}

static void free_tensors(Tensor** tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) tensors[i]->deleter(tensors[i]);
  free(tensors);
}

/* The first recorded case that needs a session. */
static size_t first_sequence(const exportkit_description* about) {
  for (size_t i = 0; i < about->case_count; ++i) {
    for (size_t call = 0; call < about->cases[i]->call_count; ++call) {
      if (about->methods[about->cases[i]->calls[call]->method]->stateful) return i;
    }
  }
  fprintf(stderr, "the package has no recorded case with state\n");
  exit(2);
}

/* The number of a dimension in the first call of a case that has it. */
static int64_t size_in(const exportkit_description* about, const exportkit_case_info* recorded, const char* dimension) {
  for (size_t call = 0; call < recorded->call_count; ++call) {
    const exportkit_method_info* method = about->methods[recorded->calls[call]->method];
    for (size_t i = 0; i < method->dimension_count; ++i) {
      const int64_t size = recorded->calls[call]->dimensions[i];
      if (size >= 0 && strcmp(method->dimensions[i]->name, dimension) == 0) return size;
    }
  }
  return -1;
}

static exportkit_session open_session(exportkit_model model, const exportkit_description* about,
                                      const exportkit_case_info* recorded) {
  const size_t count = about->state_dimension_count;
  exportkit_size* sizes = zeros(count, sizeof *sizes);
  exportkit_session session;
  exportkit_error* error;
  for (size_t i = 0; i < count; ++i) {
    sizes[i].dimension = about->state_dimensions[i]->name;
    sizes[i].size = size_in(about, recorded, sizes[i].dimension);
  }
  check(exportkit_open_session(model, sizes, count, &session, &error), &error);
  free(sizes);
  return session;
}

/* Runs one recorded call. Its inputs could be any memory of the program, each described by a DLTensor. */
static void run(exportkit_model model, exportkit_session session, size_t index, size_t call,
                const exportkit_method_info* method) {
  Tensor** inputs = zeros(method->input_count, sizeof *inputs);
  Tensor** outputs = zeros(method->output_count, sizeof *outputs);
  const DLTensor** views = zeros(method->input_count, sizeof *views);
  exportkit_error* error;
  check(exportkit_read_call(model, index, call, inputs, method->input_count, NULL, 0, &error), &error);
  for (size_t i = 0; i < method->input_count; ++i) views[i] = &inputs[i]->dl_tensor;
  check(exportkit_session_run(session, method->name, views, method->input_count, outputs, method->output_count, NULL,
                              &error),
        &error);
  printf("ran %s\n", method->name);
  free(views);
  free_tensors(inputs, method->input_count);
  free_tensors(outputs, method->output_count);
}

/* Whether the states of two sessions on the CPU have the same bytes. */
static int same_state(const exportkit_description* about, exportkit_session one, exportkit_session other) {
  const size_t count = about->state_count;
  Tensor **left = zeros(count, sizeof *left), **right = zeros(count, sizeof *right);
  exportkit_error* error;
  int same = 1;
  check(exportkit_session_state(one, left, count, &error), &error);
  check(exportkit_session_state(other, right, count, &error), &error);
  for (size_t i = 0; i < count; ++i) {
    size_t bytes = left[i]->dl_tensor.dtype.bits / 8;
    for (int32_t axis = 0; axis < left[i]->dl_tensor.ndim; ++axis) bytes *= (size_t)left[i]->dl_tensor.shape[axis];
    same &= bytes == 0 || memcmp(left[i]->dl_tensor.data, right[i]->dl_tensor.data, bytes) == 0;
  }
  free_tensors(left, count);
  free_tensors(right, count);
  return same;
}

int main(int argc, char** argv) {
  const exportkit_open_options options = {.size = sizeof options, .device = "cpu"};
  const exportkit_description* about;
  exportkit_model model;
  exportkit_session session, other;
  exportkit_error* error;
  if (argc != 3) {
    fprintf(stderr, "usage: %s PACKAGE STATE\n", argv[0]);
    return 2;
  }
  check(exportkit_open(argv[1], &options, &model, &error), &error);
  check(exportkit_describe(model, &about, &error), &error);
  for (size_t i = 0; i < about->method_count; ++i)
    printf("%s needs %s session\n", about->methods[i]->name, about->methods[i]->stateful ? "a" : "no");
  const size_t index = first_sequence(about);
  const exportkit_case_info* recorded = about->cases[index];
  session = open_session(model, about, recorded);
  for (size_t call = 0; call < recorded->call_count; ++call)
    run(model, session, index, call, about->methods[recorded->calls[call]->method]);
  check(exportkit_session_fork(session, &other, &error), &error); /* from here on, each has its own */
  check(exportkit_session_save(session, argv[2], &error), &error);
  check(exportkit_session_reset(session, &error), &error); /* as at export */
  printf("after reset: %s state\n", same_state(about, session, other) ? "the same" : "another");
  check(exportkit_session_load_state(session, argv[2], &error), &error); /* here, or in another process */
  printf("after load_state: %s state\n", same_state(about, session, other) ? "the same" : "another");
  check(exportkit_session_close(other, &error), &error);
  check(exportkit_close(model, &error), &error); /* and its sessions */
  return 0;
}
