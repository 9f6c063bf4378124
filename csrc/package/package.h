/* Reads and writes packages. This is a C interface that needs neither torch nor Python.
 *
 * exportkit/package/FORMAT.md defines the rules. Python calls this library through exportkit/package/core.py. The C++
 * runtime and exportkit-run link it.
 *
 * A function that returns an int returns 0 on success and -1 on failure; ek_last_error then gives the reason. Any
 * thread may call any function. Several threads may use an object at once, but it must be closed once. Paths are
 * bytes, other text is UTF-8, and both end with a NUL. An ek_text is valid until the same thread's next call, unless
 * noted otherwise. JSON has the keys of FORMAT.md, or the keys named here.
 */
#ifndef EXPORTKIT_PACKAGE_H_
#define EXPORTKIT_PACKAGE_H_

#include <stddef.h>
#include <stdint.h>

#define EK_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ek_package ek_package;   /* an open package */
typedef struct ek_arriving ek_arriving; /* a package that comes in pieces */
typedef struct ek_mapping ek_mapping;   /* a package's weights in memory */
typedef struct ek_entry ek_entry;       /* an unpacked cache entry, held in use */
typedef struct ek_writer ek_writer;     /* a package being written */
typedef struct ek_folder ek_folder;     /* a temporary folder */

typedef struct {
  const char* data;
  size_t size;
} ek_text;

/* Why this thread's last call failed. */
typedef struct {
  const char* kind;    /* a class name of exportkit/errors.py, or OSError */
  const char* message; /* what was given and what is allowed; for an OSError, the system's message */
  const char* hint;    /* what to do next; may be empty */
  const char* path;    /* the file of an OSError; may be empty */
  int number;          /* the errno of an OSError */
} ek_error;

/* The signature that the caller requires, in addition to this machine's policies. */
typedef struct {
  const char* const* keys; /* PEM files or PEM text; one valid signature is enough. No keys: none is required. */
  size_t key_count;
  const char* signature;         /* the signature file; NULL or empty: the package's name with .sig or .sigstore.json */
  const char* signature_content; /* the content of a signature file, in place of one; may be NULL */
  size_t signature_content_size;
} ek_demand;

/* What to remove from the cache, besides leftovers of killed processes. */
typedef struct {
  const int64_t* max_bytes; /* NULL: no limit */
  const double* unused_for; /* seconds; NULL: no limit */
  int everything;
} ek_prune_limits;

/* Increases with each change of this header that affects callers. */
EK_API int ek_abi_version(void);
EK_API const ek_error* ek_last_error(void);
/* The warnings of this thread's calls as a JSON list; this call clears them. */
EK_API ek_text ek_take_warnings(void);

/* A forked child has only the thread that forked. Between these two calls no thread is inside a function of this
 * library, so the child can use it. The first call waits for running functions: hold no lock that they may need. */
EK_API void ek_before_fork(void);
EK_API void ek_after_fork(int child);

/* --- packages ---------------------------------------------------------------------------------------------------- */

/* Takes a package piece by piece, into one copy in memory. `name` says in messages what was given. More bytes than the
 * limit are an error. A piece may change meanwhile: what was copied is what is checked. */
EK_API int ek_arriving_new(const char* name, uint64_t limit, ek_arriving** arriving);
EK_API int ek_arriving_write(ek_arriving* arriving, const void* piece, size_t size);
EK_API void ek_arriving_close(ek_arriving* arriving);

/* Opens a package, or the one in a folder, and checks rules 1 to 12. With a demand, it checks signatures before it
 * reads the manifest. */
EK_API int ek_package_open(const char* path, const ek_demand* demand, ek_package** package);
/* The same for the file of a descriptor, which stays the caller's. It must be a plain file. */
EK_API int ek_package_open_descriptor(int descriptor, const ek_demand* demand, ek_package** package);
/* The same for what arrived, which is sealed first: nothing can be written to it afterwards. */
EK_API int ek_package_open_arrived(ek_arriving* arriving, const ek_demand* demand, ek_package** package);
EK_API void ek_package_close(ek_package* package);
/* The name that messages use: the file's, or what the caller gave in place of a path. */
EK_API const char* ek_package_name(const ek_package* package);
/* The bytes of the checked manifest, valid until the package is closed. */
EK_API ek_text ek_package_manifest(const ek_package* package);
EK_API const char* ek_package_manifest_sha256(const ek_package* package);
EK_API uint64_t ek_package_size(const ek_package* package);
EK_API int ek_package_fd(const ek_package* package);
/* The sha256 of the whole file, which the first call reads. */
EK_API int ek_package_sha256(ek_package* package, const char** hex);
EK_API int ek_package_data_offset(const ek_package* package, const char* name, uint64_t* offset);
/* Reads a record into a buffer of exactly its size and checks its digest. */
EK_API int ek_package_read(const ek_package* package, const char* name, void* buffer, size_t size);
/* Writes a record to a file, which appears only if the digest matches. */
EK_API int ek_package_extract(const ek_package* package, const char* name, const char* destination, unsigned mode);
/* What the metadata `exportkit.state` of a file with this model's state must be (state_files.h). */
EK_API int ek_package_state_digest(const ek_package* package, ek_text* digest);
/* Matches a file with a session's state (state_files.h). `given` is {"path", "metadata", "tensors": [{"name", "dtype",
 * "shape"}]}, `sizes` the session's, by dimension. `values`: [{"index", "tensor" or null, "scale", "shape"}]. */
enum { EK_WHOLE_STATE, EK_PART_OF_STATE, EK_PART_OF_A_ROW };
EK_API int ek_package_match_state_file(const ek_package* package, const char* given, const char* sizes, int part,
                                       ek_text* values);
/* Checks every record's digest (rule 13). */
EK_API int ek_package_verify(const ek_package* package);
/* Checks every digest unless the cache knows the result (see exportkit/runtime/cache). `read`: whether it read them. */
EK_API int ek_package_verify_once(ek_package* package, int always, int* read);
/* Checks the content of a case's record, of the case with this index in the manifest (rule 14). */
EK_API int ek_package_check_case(const ek_package* package, size_t index, const void* content, size_t size);
/* Fails if the open file was written to. */
EK_API int ek_package_check_unchanged(const ek_package* package);
/* The signers found at opening, a JSON list of {"id", "source", "is_ed25519"}: the caller's, then each policy's. */
EK_API ek_text ek_package_signers(const ek_package* package);
/* The signature files beside the package, unchecked: a JSON list of {"path", "key_ids", "problem"}. */
EK_API int ek_package_signature_files(const ek_package* package, ek_text* files);

/* Maps the weights that have records. If other users can write to the file, or may have it open for writing, copies and
 * checks them instead. */
EK_API int ek_package_map(ek_package* package, ek_mapping** mapping);
EK_API const void* ek_mapping_data(const ek_mapping* mapping, const char* record);
EK_API void ek_mapping_close(ek_mapping* mapping);

/* --- the cache --------------------------------------------------------------------------------------------------- */

/* Unpack an operator library, named by its record, or a method's code of a target, named by its folder under
 * data/aotinductor. Files that are known to be correct are not hashed again, unless `always` is set. */
EK_API int ek_package_unpack_library(const ek_package* package, const char* record, int always, ek_entry** entry);
EK_API int ek_package_unpack_target(const ek_package* package, const char* folder, int always, ek_entry** entry);
/* The cache's folder for compiled code. `digest` is what it was compiled from: 64 hexadecimal digits. */
EK_API int ek_compiled_entry(const char* digest, ek_entry** entry);
/* Removes the least recently used of these until at most so many bytes are left. */
EK_API int ek_limit_compiled(int64_t max_bytes);
EK_API const char* ek_entry_folder(const ek_entry* entry);
/* The shared library in the folder. */
EK_API const char* ek_entry_library(const ek_entry* entry);
EK_API void ek_entry_close(ek_entry* entry);
EK_API int ek_cache_directory(ek_text* path);
/* Lists the cache, and leftovers in a directory for temporary files. With limits, removes what exceeds them. A JSON
 * list of {"kind", "path", "size", "used", "in_use", "removed"}, least recently used first. */
EK_API int ek_cache_items(const char* temporary, const ek_prune_limits* limits, ek_text* items);

/* --- targets ----------------------------------------------------------------------------------------------------- */

/* {"platform", "cpu_isa"} of this machine. */
EK_API int ek_host(ek_text* host);
/* Parses auto, cpu, cuda or cuda:<index> into {"kind", "index"}; index may be null. */
EK_API int ek_parse_device(const char* device, ek_text* parsed);
/* Which targets (JSON list), with the package's libraries (JSON list), run on a host {"platform", "cpu_isa", "torch",
 * "cuda", "capabilities", "current_cuda", "driver"}:
 * {"fitting": [[name, device index, "native" or "ptx"], ...], "rejected": {name: reason}}, best first. */
EK_API int ek_survey(const char* targets, const char* libraries, const char* device, const char* host, ek_text* survey);
/* Why a Library (JSON) does not work with a torch version; empty if it does. */
EK_API int ek_library_rejection(const char* library, const char* torch, ek_text* reason);
/* Why a driver that supports up to this CUDA does not compile the PTX in a library; empty if it does, or if there is
 * none. */
EK_API int ek_ptx_rejection(const char* code, size_t size, const char* driver, ek_text* reason);
/* The code in a library's fat binaries: a JSON list of [architecture, whether it is PTX]. */
EK_API int ek_fat_entries(const char* code, size_t size, ek_text* entries);
/* How machine code for some architectures and PTX of others, with spaces between, run on a GPU: native, ptx or no. */
EK_API int ek_gpu_degree(const char* machine, const char* ptx, const char* gpu, ek_text* degree);

/* --- checks without a package ------------------------------------------------------------------------------------ */

/* Checks rules 7, 8 and 9 on a manifest alone. */
EK_API int ek_check_manifest(const char* manifest, size_t size);
/* Whether a parameter, a named tuple or its field may have this name. */
EK_API int ek_is_name(const char* text);
/* Matches given tensors, a JSON list of {"name", "dtype", "shape"}, with the manifest's weights: {weight: [names]}.
 * Those of the manifest's state are left out. */
EK_API int ek_match_state(const char* weights, const char* state, const char* given, ek_text* names);
/* Reads a key from a PEM file or PEM text: {"id", "source", "is_ed25519"}. */
EK_API int ek_public_key(const char* source, ek_text* key);
/* The hash that a key's signatures are over: sha256, sha384 or sha512; empty for Ed25519, which has its own. */
EK_API int ek_public_key_hash(const char* source, ek_text* name);
/* Whether a signature is this key's signature of the message. */
EK_API int ek_verify_signature(const char* source, const void* signature, size_t signature_size, const void* message,
                               size_t size, int* valid);
/* The content of a signature file in this format's form, whose syntax it checks; empty if there is no file. */
EK_API int ek_signatures(const char* path, ek_text* content);
/* Who requires a signature, the caller or a policy; empty if nobody does. */
EK_API int ek_demanded(const ek_demand* demand, ek_text* by);
/* The content of a revocation list, whose syntax it checks; empty if there is no file. */
EK_API int ek_revocation_list(const char* path, ek_text* content);
/* The revocation lists of this machine's policies: a JSON list of {"path", "sequence", "keys", "packages"}, the last
 * two being numbers of entries. */
EK_API int ek_revocations(ek_text* lists);

/* --- accuracy ---------------------------------------------------------------------------------------------------- */

typedef struct {
  double rms, greatest;
} ek_accuracy;

typedef struct {
  ek_accuracy size;   /* relative to the reference's magnitude, or to the typical magnitude if that is greater */
  size_t compared;    /* elements */
  size_t beyond;      /* elements whose difference exceeds the limit */
  size_t greatest_at; /* the index of the greatest difference */
} ek_measured_error;

/* The median magnitude of the elements that are neither 0 nor infinite nor NaN; 1 if there is none. */
EK_API int ek_typical_magnitude(const double* reference, size_t count, double* magnitude);
/* Compares values with their reference. `selected` has a nonzero byte for each element to compare, or is null. */
EK_API int ek_measure_error(const double* reference, const double* values, const uint8_t* selected, size_t count,
                            double typical, double limit, ek_measured_error* error);
/* The greatest error that a package may have in an output of this dtype where eager has this one. */
EK_API int ek_allowed_error(const ek_accuracy* eager, const char* dtype, ek_accuracy* allowed);

/* --- writing ----------------------------------------------------------------------------------------------------- */

EK_API ek_writer* ek_writer_new(void);
/* Add a record from bytes, a file or another package. The source must exist until the writer is closed. */
EK_API int ek_writer_add_bytes(ek_writer* writer, const char* name, const void* data, size_t size);
EK_API int ek_writer_add_file(ek_writer* writer, const char* name, const char* path);
EK_API int ek_writer_add_record(ek_writer* writer, const char* name, const ek_package* package, const char* record);
/* Reads all records once and returns the manifest's `records`, with the records that torch looks for. */
EK_API int ek_writer_records(ek_writer* writer, ek_text* records);
/* Writes the package atomically. The manifest must list those records and pass the reader's checks. */
EK_API int ek_writer_finish(ek_writer* writer, const char* path, const char* manifest, size_t size);
EK_API void ek_writer_close(ek_writer* writer);

/* --- other files ------------------------------------------------------------------------------------------------- */

/* Writes a file atomically: its data reach the disk before it takes its name. */
EK_API int ek_write_file(const char* path, const void* data, size_t size);
/* Creates a private folder, which closing removes. First removes folders of the same prefix left by killed processes.
 */
EK_API int ek_folder_new(const char* parent, const char* prefix, ek_folder** folder);
EK_API const char* ek_folder_path(const ek_folder* folder);
EK_API void ek_folder_close(ek_folder* folder);

#ifdef __cplusplus
}
#endif

#endif
