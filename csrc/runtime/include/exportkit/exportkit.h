/* exportkit for C, and for every language that calls C: opens a package, checks it like exportkit.load, and runs it.
 *
 *     exportkit_model model;
 *     exportkit_error* error;
 *     if (exportkit_open("model.pt2", NULL, &model, &error) != EXPORTKIT_OK) {
 *       fprintf(stderr, "%s\n", exportkit_error_message(error));
 *       exportkit_error_free(error);
 *     }
 *
 * The interface is stable: a program that was compiled with this header runs with every later library, and with each
 * minor version of torch that the library is built for. Functions are added and never changed; a structure grows at its
 * end.
 *
 * Any thread may call any function at any time. A function that returns an int returns EXPORTKIT_OK or the code of an
 * error; it then has written nothing but zeros to its results. No C++ exception leaves a function, so a callback must
 * not throw one or call longjmp. Text is UTF-8 and ends with a NUL; paths are the bytes that the system knows.
 *
 * Tensors are DLPack's (https://dmlc.github.io/dlpack). Inputs are views: the caller keeps the memory, and nothing
 * refers to it after the call. Outputs are the caller's: `tensor->deleter(tensor)` frees one, in any thread, also after
 * the model was closed. No data are copied, unless an input is not contiguous or an output shares memory with an input.
 *
 * A model with state has sessions:
 *
 *     exportkit_session session;
 *     exportkit_open_session(model, NULL, 0, &session, &error);
 *     exportkit_session_run(session, "decode", inputs, 1, outputs, 1, NULL, &error);
 */
#ifndef EXPORTKIT_EXPORTKIT_H_
#define EXPORTKIT_EXPORTKIT_H_

#include <dlpack/dlpack.h>
#include <exportkit/codes.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(DLPACK_MAJOR_VERSION) || DLPACK_MAJOR_VERSION != 1
#error "exportkit.h needs the dlpack/dlpack.h of DLPack 1, which is beside it"
#endif

#if defined(__GNUC__)
#define EXPORTKIT_API __attribute__((visibility("default")))
#else
#define EXPORTKIT_API
#endif

#ifdef __cplusplus
#define EXPORTKIT_NOEXCEPT noexcept
extern "C" {
#else
#define EXPORTKIT_NOEXCEPT
#endif

/* Increases with each addition to this header. */
#define EXPORTKIT_ABI_VERSION 6

/* --- versions ---------------------------------------------------------------------------------------------------- */

/* The EXPORTKIT_ABI_VERSION of the library. It serves programs that were compiled with this version or an earlier one.
 */
EXPORTKIT_API uint32_t exportkit_abi_version(void) EXPORTKIT_NOEXCEPT;
/* The version of exportkit, such as "0.1.0". */
EXPORTKIT_API const char* exportkit_version(void) EXPORTKIT_NOEXCEPT;
/* The version of the running torch, such as "2.13.0". */
EXPORTKIT_API const char* exportkit_torch_version(void) EXPORTKIT_NOEXCEPT;

/* --- errors ------------------------------------------------------------------------------------------------------ */

/* Why a call failed. It belongs to the caller. Every function that can fail takes an `exportkit_error** error`, which
 * may be null; it sets *error to null if it succeeds. */
typedef struct exportkit_error exportkit_error;

/* The code that the function returned. These four take null, as if there were no error. */
EXPORTKIT_API int exportkit_error_code(const exportkit_error* error) EXPORTKIT_NOEXCEPT;
/* The class, such as "InputError". This text and the next two are valid until the error is freed. */
EXPORTKIT_API const char* exportkit_error_name(const exportkit_error* error) EXPORTKIT_NOEXCEPT;
/* What was given and what is allowed. */
EXPORTKIT_API const char* exportkit_error_message(const exportkit_error* error) EXPORTKIT_NOEXCEPT;
/* What to do next; empty if the message says it. */
EXPORTKIT_API const char* exportkit_error_hint(const exportkit_error* error) EXPORTKIT_NOEXCEPT;
EXPORTKIT_API void exportkit_error_free(exportkit_error* error) EXPORTKIT_NOEXCEPT;

/* --- opening ----------------------------------------------------------------------------------------------------- */

/* An open model, a number and not a pointer: a call with the number of a closed model is an error. 0 is never a model.
 */
typedef uint64_t exportkit_model;

/* Flags of exportkit_open_options. EXPORTKIT_VERIFY_ALWAYS checks every digest, also of a package that was checked on
 * this machine before. EXPORTKIT_CUDA_GRAPHS runs calls of a model on CUDA as CUDA graphs: as one launch in the place
 * of one for each kernel, with the same bits. The first call with any sizes takes longer, and launches of several
 * threads take turns; what cannot be a graph runs without one. For a model on the CPU, or a library without CUDA
 * graphs, it is an error. */
#define EXPORTKIT_VERIFY_ALWAYS UINT64_C(1)
#define EXPORTKIT_CUDA_GRAPHS UINT64_C(2)

/* How to open a package. `size` is sizeof(exportkit_open_options), which tells the library which members there are; all
 * others may be zero: exportkit_open_options options = {.size = sizeof options}. */
typedef struct exportkit_open_options {
  size_t size;
  uint64_t flags;
  /* auto, cpu, cuda or cuda:<index>. Null is auto: CUDA if the package has a CUDA target that runs here. */
  const char* device;
  /* The name of the target to run. Null: the best target that runs here. */
  const char* target;
  /* The number of calls that can run at the same time, which share the weights. 0 is 1. */
  int64_t runners;
  /* PEM files or PEM text. One of these keys must have signed the package. This machine's policies add their own
   * requirements. */
  const char* const* public_keys;
  size_t public_key_count;
  /* The signature file. Null: the package's name with .sig, or .sigstore.json. */
  const char* signature;
  /* Gets the warnings of exportkit_open, in its thread. Null: warnings go to stderr. */
  void (*warn)(const char* message, void* context);
  void* warn_context;
  /* The content of a signature file, in place of one. Beside a package that has no path there is none. */
  const char* signature_content;
  size_t signature_content_size;
  /* How many bytes of a pipe or a socket are taken, which may never end. 0 is 8 GiB. */
  uint64_t stream_limit;
  /* The number of CPU threads of a call. 0: as many as torch takes in the thread that calls. */
  int64_t threads;
} exportkit_open_options;

/* Opens a package. Checks its required signatures and every digest before any of its code runs, and each library before
 * it is loaded. `options` may be null. */
EXPORTKIT_API int exportkit_open(const char* path, const exportkit_open_options* options, exportkit_model* model,
                                 exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* The same for the content of a package. It is copied once, into memory that is sealed before anything is checked: the
 * caller may change or free it afterwards. */
EXPORTKIT_API int exportkit_open_bytes(const void* bytes, size_t size, const exportkit_open_options* options,
                                       exportkit_model* model, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* The same for an open descriptor, which stays the caller's. A file is read by offset from its beginning, and its
 * weights are mapped. A pipe or a socket is read to its end. */
EXPORTKIT_API int exportkit_open_descriptor(int descriptor, const exportkit_open_options* options,
                                            exportkit_model* model, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Closes a model and its sessions. Running calls finish first, in their threads; this function does not wait for them.
 */
EXPORTKIT_API int exportkit_close(exportkit_model model, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* --- describing -------------------------------------------------------------------------------------------------- */

/* A size of a tensor: from `min` to `max`, in steps. A fixed size has min == max. */
typedef struct exportkit_size_range {
  int64_t min, max, step;
  const char* text; /* such as "16*gh", where gh is the same number in all tensors; "?" if unknown */
  /* The size is scale * n + offset, where n is the number of a dimension. `dimension` is the index of that dimension in
   * the method's or the state's list; -1 if the size is fixed or unknown. */
  int64_t dimension, scale, offset;
} exportkit_size_range;

/* An input, an output, or a tensor of the state. */
typedef struct exportkit_tensor_info {
  const char* name;  /* its place in the call or result, such as "image" or "batch.mask" */
  const char* dtype; /* such as "float32" */
  DLDataType dl_dtype;
  int32_t ndim;
  const exportkit_size_range* const* shape; /* ndim pointers */
  int32_t written; /* not 0: the call writes into this input, whose memory must be row-major and no other input's */
} exportkit_tensor_info;

/* A number that sizes depend on. */
typedef struct exportkit_dimension {
  const char* name; /* such as "gh" */
  int64_t min, max;
} exportkit_dimension;

/* One entry of a model. Most models have only "forward". */
typedef struct exportkit_method_info {
  const char* name;
  int32_t stateful; /* not 0: it needs a session */
  size_t input_count;
  const exportkit_tensor_info* const* inputs;
  size_t output_count;
  const exportkit_tensor_info* const* outputs;
  size_t dimension_count;
  const exportkit_dimension* const* dimensions;
  /* The state that it uses: indices of the description's state, and for each whether the method writes it. */
  size_t state_count;
  const size_t* state;
  const int32_t* state_written;
  /* The index of the dimension that is the first size of every input, every output and all state that the method uses,
   * and no other size: each of its numbers is a row, which may be another request's. -1: there is none, and row_reason
   * says why. exportkit_try_rows finds out whether rows influence one another. */
  int64_t row_dimension;
  const char* row_reason;
} exportkit_method_info;

/* A call that was recorded at export. */
typedef struct exportkit_call_info {
  size_t method;             /* its index in the description's methods */
  const int64_t* dimensions; /* the number of each of the method's dimensions; -1 if it has none */
} exportkit_call_info;

/* Recorded calls that follow one another in one session. A call without state is a case of its own. */
typedef struct exportkit_case_info {
  const int64_t* dimensions; /* of the first call */
  size_t call_count;
  const exportkit_call_info* const* calls;
} exportkit_case_info;

typedef struct exportkit_description {
  const char* name;
  const char* version;
  const char* target; /* the name of the chosen target */
  const char* device; /* such as "cuda:0" */
  DLDevice dl_device;
  /* Of the method that exportkit_run runs; none if that is none of several methods. */
  size_t input_count;
  const exportkit_tensor_info* const* inputs;
  size_t output_count;
  const exportkit_tensor_info* const* outputs;
  size_t dimension_count;
  const exportkit_dimension* const* dimensions;
  size_t case_count;
  const exportkit_case_info* const* cases;
  size_t method_count;
  const exportkit_method_info* const* methods;
  /* What a session has, and the dimensions of its sizes. */
  size_t state_count;
  const exportkit_tensor_info* const* state;
  size_t state_dimension_count;
  const exportkit_dimension* const* state_dimensions;
  /* What the weights take of the device's memory. On the CPU, it may be mapped from the package. */
  uint64_t bytes;
} exportkit_description;

/* What a model is, takes and gives. The description belongs to the model and is valid until it is closed. */
EXPORTKIT_API int exportkit_describe(exportkit_model model, const exportkit_description** description,
                                     exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* --- running ----------------------------------------------------------------------------------------------------- */

/* Flags of exportkit_run_options.
 * HOST_TENSORS: inputs on the CPU are copied to the model's device, and outputs to the CPU; the call waits for them.
 * CONTIGUOUS_OUTPUTS: outputs are row-major without gaps. Without this flag, their strides may be any.
 * OWN_STREAM: a CUDA model runs on a stream of the calling thread, so that threads do not wait for one another.
 * exportkit_synchronize waits for it with the same flag. */
#define EXPORTKIT_HOST_TENSORS UINT64_C(1)
#define EXPORTKIT_CONTIGUOUS_OUTPUTS UINT64_C(2)
#define EXPORTKIT_OWN_STREAM UINT64_C(4)

/* How to run a call. `size` is sizeof(exportkit_run_options); all others may be zero. */
typedef struct exportkit_run_options {
  size_t size;
  uint64_t flags;
  /* A cudaStream_t of the model's device, on which a CUDA model runs. Null: torch's current stream of this thread,
   * which is the default stream unless the program changed it. */
  void* stream;
} exportkit_run_options;

/* Runs the model on inputs in the order of the description. They must be on the model's device. `outputs` has the
 * description's output_count elements. `options` may be null.
 *
 * A CUDA model's call returns when its work is queued: let the inputs' memory be until the stream has finished, read
 * the outputs on the same stream or after it, and free an output when no other stream needs it any longer. If it meets
 * a value that the model refuses, exportkit_synchronize says so, or else the next call on the stream, or in the
 * session.
 *
 * Strides may be null (row-major) and must not be negative. The elements must be aligned to their size. Pinned memory
 * is CPU memory. Of a DLManagedTensor or DLManagedTensorVersioned, pass &managed->dl_tensor; it is not freed. A tensor
 * whose flags say that it is read-only must not be given for an input that is written: a DLTensor does not say so. */
EXPORTKIT_API int exportkit_run(exportkit_model model, const DLTensor* const* inputs, size_t input_count,
                                struct DLManagedTensorVersioned** outputs, size_t output_count,
                                const exportkit_run_options* options, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* The same for one of the model's methods. Null: `forward`, or the only method, as exportkit_run. A method with state
 * needs a session. `outputs` has the method's output_count elements. */
EXPORTKIT_API int exportkit_run_method(exportkit_model model, const char* method, const DLTensor* const* inputs,
                                       size_t input_count, struct DLManagedTensorVersioned** outputs,
                                       size_t output_count, const exportkit_run_options* options,
                                       exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Waits for a CUDA model's calls on the stream of `options`: EXPORTKIT_REFUSED_VALUE_ERROR if one of them, outside of
 * sessions, met a value that the model refuses. Its outputs are not to be used. */
EXPORTKIT_API int exportkit_synchronize(exportkit_model model, const exportkit_run_options* options,
                                        exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Replaces the weights with another fine-tune's, while calls continue. `path` is a safetensors file with the model's
 * whole state_dict and the same dtypes and shapes; what sessions begin with may be left out, and must not differ. Each
 * call runs with only the old weights or only the new ones. A swap that fails leaves the old weights in place. During
 * the swap, both need memory. */
EXPORTKIT_API int exportkit_swap_weights(exportkit_model model, const char* path,
                                         exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* --- sessions ---------------------------------------------------------------------------------------------------- */

/* What a model remembers from call to call, a number like exportkit_model. A session has one caller at a time: a second
 * one gets EXPORTKIT_SESSION_BUSY_ERROR. Sessions are independent of each other and run in any number of threads. */
typedef uint64_t exportkit_session;

/* The number of one of the state's dimensions. */
typedef struct exportkit_size {
  const char* dimension; /* such as "batch" */
  int64_t size;
} exportkit_size;

/* Makes a session whose state begins as it was at export. `sizes` has each of the state's dimensions; null with the
 * count 0 if there are none. */
EXPORTKIT_API int exportkit_open_session(exportkit_model model, const exportkit_size* sizes, size_t size_count,
                                         exportkit_session* session, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Runs a method in a session, like exportkit_run_method. Inputs that the package does not allow leave the state as it
 * was. If the compiled code fails, the session is broken until it is reset or loads a state. */
EXPORTKIT_API int exportkit_session_run(exportkit_session session, const char* method, const DLTensor* const* inputs,
                                        size_t input_count, struct DLManagedTensorVersioned** outputs,
                                        size_t output_count, const exportkit_run_options* options,
                                        exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* The same for the calls of a session, which is broken then, if the call writes state. */
EXPORTKIT_API int exportkit_session_synchronize(exportkit_session session, const exportkit_run_options* options,
                                                exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Makes a session with a copy of the state. */
EXPORTKIT_API int exportkit_session_fork(exportkit_session session, exportkit_session* copy,
                                         exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Makes the state what it was at export. */
EXPORTKIT_API int exportkit_session_reset(exportkit_session session, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Writes the state to a safetensors file, which gets its name when it is complete; reads it, here or in another
 * process. EXPORTKIT_STATE_ERROR: another model's file, or other names, dtypes or shapes; the state stays as it was. */
EXPORTKIT_API int exportkit_session_save(exportkit_session session, const char* path,
                                         exportkit_error** error) EXPORTKIT_NOEXCEPT;
EXPORTKIT_API int exportkit_session_load_state(exportkit_session session, const char* path,
                                               exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Sets the state that a safetensors file names, in one row, or in all if `row` is -1.
 * The file may be an adapter of PEFT's beside its adapter_config.json. `set`, which may be null, has `count`
 * places, one for each tensor of the state in the order of the description: 1 if it was set, else 0.
 * EXPORTKIT_STATE_ERROR: a tensor fits none of the state's. The state then stays as it was. */
EXPORTKIT_API int exportkit_session_load_partial_state(exportkit_session session, const char* path, int64_t row,
                                                       uint8_t* set, size_t count,
                                                       exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* The tensors of the state, in the order of the description. The caller frees them. Their memory is the session's: the
 * next call changes it. */
EXPORTKIT_API int exportkit_session_state(exportkit_session session, struct DLManagedTensorVersioned** tensors,
                                          size_t count, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* How many bytes of the device's memory the session has for itself. Sessions share some of what
   they have not written. */
EXPORTKIT_API int exportkit_session_bytes(exportkit_session session, uint64_t* bytes,
                                          exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Closes a session. A running call finishes first, in its thread. */
EXPORTKIT_API int exportkit_session_close(exportkit_session session, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* --- several requests in one call -------------------------------------------------------------------------------- */

/* Finds out by the recorded cases whether the rows of one request influence another's. *rows gets the most rows of a
 * call, at most `most`; 0 if each request must run by itself, and then *reason says why, in a text that is valid until
 * the model is closed; else *reason is null. It runs the model many times. */
EXPORTKIT_API int exportkit_try_rows(exportkit_model model, const char* method, int64_t most, int64_t* rows,
                                     const char** reason, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* A part of an input's elements, in memory of the CPU (pinned or not) or of the model's device, where they already are.
 */
typedef struct exportkit_piece {
  const void* data;
  uint64_t size; /* in bytes */
  DLDevice device;
} exportkit_piece;

/* An input of a request: its elements are row-major, in pieces that follow one another. */
typedef struct exportkit_request_input {
  DLDataType dtype;
  int32_t ndim;
  const int64_t* shape;
  size_t piece_count;
  const exportkit_piece* pieces;
} exportkit_request_input;

/* One of several requests. `size` is sizeof(exportkit_request). */
typedef struct exportkit_request {
  size_t size;
  size_t input_count;
  const exportkit_request_input* inputs; /* in the order of the description */
  exportkit_session session;             /* a method with state: the request's own; else 0 */
  /* Written by exportkit_run_requests: why this request was not answered; null if it was. The caller frees it. */
  exportkit_error* error;
} exportkit_request;

/* Where answers go. `size` is sizeof(exportkit_answers). */
typedef struct exportkit_answers {
  size_t size;
  /* Gives row-major memory for an output of the request with this index: writes *data and *device, the CPU or the
   * model's device, and returns a number greater than 0. 0: this output is not wanted. A number less than 0: there is
   * no memory, and the request is not answered. It is called in the thread of exportkit_run_requests, once for each
   * output of a request: after its call has succeeded, so that a session has its new state then, whatever this returns;
   * or on a GPU, for a request without a session that runs by itself, while the call may still fail. */
  int (*place)(size_t request, size_t output, DLDataType dtype, int32_t ndim, const int64_t* shape, uint64_t bytes,
               void** data, DLDevice* device, void* context);
  /* Says that a request has ended: its outputs are written, or its error is. Its memory and its session are the
   * caller's again. Called in the same thread, once for each request. May be null. */
  void (*ended)(size_t request, void* context);
  void* context;
} exportkit_answers;

/* Runs a method for several requests, and waits until all have ended. Each is checked by itself: a wrong one fails
 * alone. Requests whose shapes differ only in the number of rows share a call of up to `most` rows, in their order. If
 * that call fails, each of them runs again by itself. `most` is what exportkit_try_rows found. If `most` is 0, or the
 * method or its state has no rows, every request runs by itself. Requests of one session run one after the other. A
 * shared call that fails changes no session; a request by itself does what exportkit_session_run says.
 *
 * If a request runs by itself, an input in one piece is read where it lies, if it is aligned to its elements, and on a
 * GPU to 16 bytes. Other pieces are copied once. Methods that write into an input are refused. A returned error
 * concerns all requests: none was run, and none has an error of its own. Of the flags of `options`, only
 * EXPORTKIT_OWN_STREAM may be set. */
EXPORTKIT_API int exportkit_run_requests(exportkit_model model, const char* method, exportkit_request* const* requests,
                                         size_t request_count, int64_t most, const exportkit_answers* answers,
                                         const exportkit_run_options* options,
                                         exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* --- recorded cases ---------------------------------------------------------------------------------------------- */

/* Reads the first call of a recorded case: the inputs, and the outputs of the eager model, on the model's device.
 * Either array may be null, with the count 0, if it is not wanted. The tensors are the caller's. */
EXPORTKIT_API int exportkit_read_case(exportkit_model model, size_t index, struct DLManagedTensorVersioned** inputs,
                                      size_t input_count, struct DLManagedTensorVersioned** outputs,
                                      size_t output_count, exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* The same for any call of a case. */
EXPORTKIT_API int exportkit_read_call(exportkit_model model, size_t index, size_t call,
                                      struct DLManagedTensorVersioned** inputs, size_t input_count,
                                      struct DLManagedTensorVersioned** outputs, size_t output_count,
                                      exportkit_error** error) EXPORTKIT_NOEXCEPT;

/* Runs a recorded case again, in a session of its own, and compares each output by the rule of FORMAT.md.
 * EXPORTKIT_WRONG_RESULT_ERROR if one differs; the message says which, and by how much. On CUDA, the process's TF32
 * switches are those of the export meanwhile. */
EXPORTKIT_API int exportkit_replay(exportkit_model model, size_t index, exportkit_error** error) EXPORTKIT_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
