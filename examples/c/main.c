/* Loads a package, says what it takes and gives, checks it against its recorded cases, and calls it, perhaps with
 * another fine-tune's weights: predict model.pt2 [weights.safetensors] */
#include <exportkit/exportkit.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct DLManagedTensorVersioned Tensor;

/* Ends the program if a call failed, with the exit code of the command line. */
static void check(int code, exportkit_error** error) {
  if (code == EXPORTKIT_OK) return;
  fprintf(stderr, "%s: %s\n", exportkit_error_name(*error), exportkit_error_message(*error));
  if (*exportkit_error_hint(*error)) fprintf(stderr, "  %s\n", exportkit_error_hint(*error));
  exportkit_error_free(*error);
  exit(code / 100);
}

static void print(const char* what, const exportkit_tensor_info* const* tensors, size_t count) {
  printf("%s:\n", what);
  for (size_t i = 0; i < count; ++i) {
    printf("  %s %s", tensors[i]->name, tensors[i]->dtype);
    for (int32_t axis = 0; axis < tensors[i]->ndim; ++axis) printf(" %s", tensors[i]->shape[axis]->text);
    printf("\n");
  }
}

static void print_shape(const DLTensor* tensor) {
  printf("got [");
  for (int32_t axis = 0; axis < tensor->ndim; ++axis)
    printf("%s%lld", axis ? ", " : "", (long long)tensor->shape[axis]);
  printf("]\n");
}

/* Runs the inputs of the first recorded case; they could be any memory of the program, each described by a DLTensor. */
static void run(exportkit_model model, const exportkit_description* about) {
  const size_t inputs = about->input_count, outputs = about->output_count;
  Tensor** given = calloc(inputs + outputs, sizeof *given);
  Tensor** got = given + inputs;
  const DLTensor** views = calloc(inputs, sizeof *views);
  exportkit_error* error;
  if (!given || !views) abort();
  check(exportkit_read_case(model, 0, given, inputs, NULL, 0, &error), &error);
  for (size_t i = 0; i < inputs; ++i) views[i] = &given[i]->dl_tensor;
  check(exportkit_run(model, views, inputs, got, outputs, NULL, &error), &error);
  for (size_t i = 0; i < outputs; ++i) print_shape(&got[i]->dl_tensor);
  for (size_t i = 0; i < inputs + outputs; ++i) given[i]->deleter(given[i]);
  free(views);
  free(given);
}

int main(int argc, char** argv) {
  exportkit_open_options options = {.size = sizeof options, .runners = 2}; /* calls of two threads run at a time */
  const exportkit_description* about;
  exportkit_model model;
  exportkit_error* error;
  if (argc != 2 && argc != 3) {
    fprintf(stderr, "usage: %s PACKAGE [WEIGHTS]\n", argv[0]);
    return 2;
  }
  check(exportkit_open(argv[1], &options, &model, &error), &error);
  check(exportkit_describe(model, &about, &error), &error);
  printf("%s %s on %s\n", about->name, about->version, about->device);
  print("takes", about->inputs, about->input_count);
  print("gives", about->outputs, about->output_count);
  for (size_t i = 0; i < about->case_count; ++i) {
    check(exportkit_replay(model, i, &error), &error);
    printf("case %zu: ok\n", i);
  }
  if (argc == 3)
    check(exportkit_swap_weights(model, argv[2], &error), &error); /* other threads could go on meanwhile */
  if (about->case_count > 0) run(model, about);
  check(exportkit_close(model, &error), &error);
  return 0;
}
