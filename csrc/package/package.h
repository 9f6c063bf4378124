/* The one reader of packages, and their writer, behind a C interface: no torch and no Python.
 *
 * exportkit/package/FORMAT.md has the rules. Python binds this header (exportkit/package/core.py), the C++ runtime
 * and exportkit-run link the same library.
 *
 * A function that returns an int gives 0, or -1 and leaves the reason to ek_last_error. Any thread may call any of
 * them; objects may be used by several threads at once, and are closed once. Paths are bytes, other text is UTF-8,
 * both end with a NUL. What an ek_text has holds until the same thread's next call, unless it says otherwise. JSON in
 * and out has the keys of FORMAT.md, or those named here.
 */
#ifndef EXPORTKIT_PACKAGE_H_
#define EXPORTKIT_PACKAGE_H_

#include <stddef.h>
#include <stdint.h>

#define EK_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ek_package ek_package; /* an open package */
typedef struct ek_mapping ek_mapping; /* its weights in memory */
typedef struct ek_entry ek_entry;     /* what was unpacked of it, in use */
typedef struct ek_writer ek_writer;   /* a package to be */
typedef struct ek_folder ek_folder;   /* a temporary folder */

typedef struct {
  const char* data;
  size_t size;
} ek_text;

/* Why this thread's last call failed. */
typedef struct {
  const char* kind;    /* the class in exportkit/errors.py, or OSError */
  const char* message; /* what was given and what is allowed; of an OSError, what the system says */
  const char* hint;    /* what to do next; may be empty */
  const char* path;    /* of an OSError, may be empty */
  int number;          /* of an OSError: errno */
} ek_error;

/* Whose signature is asked for, beside what this machine's policies ask for. */
typedef struct {
  const char* const* keys; /* PEM files, or PEM text; any of them will do. None ask for no signature. */
  size_t key_count;
  const char* signature; /* the signature file; NULL or empty: the package's name with .sig or .sigstore.json */
} ek_demand;

/* What is to go of the cache, beside what is left over. */
typedef struct {
  const int64_t* max_bytes; /* NULL: any number */
  const double* unused_for; /* seconds; NULL: for ever */
  int everything;
} ek_prune_limits;

/* Goes up with each change of this header that callers notice. */
EK_API int ek_abi_version(void);
EK_API const ek_error* ek_last_error(void);
/* A JSON list of what this thread's calls had to say and was no error; forgotten afterwards. */
EK_API ek_text ek_take_warnings(void);

/* A fork has the thread that forks and no other. Between these two calls no thread is in the middle of a function of
 * this library, so that the child can use it. The first waits for those that are: hold no lock that they may need. */
EK_API void ek_before_fork(void);
EK_API void ek_after_fork(int child);

/* --- packages ---------------------------------------------------------------------------------------------------- */

/* Opens a package and checks rules 1 to 12. With a demand, signatures are checked before the manifest is read. */
EK_API int ek_package_open(const char* path, const ek_demand* demand, ek_package** package);
EK_API void ek_package_close(ek_package* package);
/* The manifest's bytes, checked. They hold as long as the package. */
EK_API ek_text ek_package_manifest(const ek_package* package);
EK_API const char* ek_package_manifest_sha256(const ek_package* package);
EK_API uint64_t ek_package_size(const ek_package* package);
EK_API int ek_package_fd(const ek_package* package);
/* Digest of the whole file, read when first asked for. */
EK_API int ek_package_sha256(ek_package* package, const char** hex);
EK_API int ek_package_data_offset(const ek_package* package, const char* name, uint64_t* offset);
/* A record's content, its digest checked, into a buffer of just its size. */
EK_API int ek_package_read(const ek_package* package, const char* name, void* buffer, size_t size);
/* To a file that appears only if the digest holds. */
EK_API int ek_package_extract(const ek_package* package, const char* name, const char* destination, unsigned mode);
/* Every record's digest (rule 13). */
EK_API int ek_package_verify(const ek_package* package);
/* The same unless that was done before, by the rules of exportkit/runtime/cache; `read` says whether it was done now.
 */
EK_API int ek_package_verify_once(ek_package* package, int always, int* read);
/* Fails where somebody wrote into the open file. */
EK_API int ek_package_check_unchanged(const ek_package* package);
/* Signers: JSON list of {"id", "source", "is_ed25519"}: a key that satisfies the caller, then one for each policy. */
EK_API int ek_package_check_trust(ek_package* package, const ek_demand* demand, ek_text* signers);
/* Those that were found when it was opened. */
EK_API ek_text ek_package_signers(const ek_package* package);
/* The signature files beside it, unchecked: JSON list of {"path", "key_ids", "problem"}. */
EK_API int ek_package_signature_files(const ek_package* package, ek_text* files);

/* The weights that have records: mapped from the file; where others may write to that, a checked copy. */
EK_API int ek_package_map(ek_package* package, ek_mapping** mapping);
EK_API const void* ek_mapping_data(const ek_mapping* mapping, const char* record);
EK_API void ek_mapping_close(ek_mapping* mapping);

/* --- the cache --------------------------------------------------------------------------------------------------- */

/* An operator library by its record, a target's files by the target's name. Files are hashed unless they are known to
 * hold; `always` hashes them all the same. */
EK_API int ek_package_unpack_library(const ek_package* package, const char* record, int always, ek_entry** entry);
EK_API int ek_package_unpack_target(const ek_package* package, const char* target, int always, ek_entry** entry);
EK_API const char* ek_entry_folder(const ek_entry* entry);
/* The shared library among its files. */
EK_API const char* ek_entry_library(const ek_entry* entry);
EK_API void ek_entry_close(ek_entry* entry);
EK_API int ek_cache_directory(ek_text* path);
/* What is in the cache, and what was left in a directory for temporary files; with limits, what goes beyond them is
 * removed: JSON list of {"kind", "path", "size", "used", "in_use", "removed"}, what was used least recently first. */
EK_API int ek_cache_items(const char* temporary, const ek_prune_limits* limits, ek_text* items);

/* --- targets ----------------------------------------------------------------------------------------------------- */

/* {"platform", "cpu_isa"} of this machine. */
EK_API int ek_host(ek_text* host);
/* {"kind", "index"} of auto, cpu, cuda or cuda:<index>; index may be null. */
EK_API int ek_parse_device(const char* device, ek_text* parsed);
/* Targets (JSON list) held against a host {"platform", "cpu_isa", "torch", "cuda", "capabilities", "current_cuda"}:
 * {"fitting": [[name, device index], ...], "rejected": {name: reason}}, the best first. */
EK_API int ek_survey(const char* targets, const char* device, const char* host, ek_text* survey);
/* Why a Library (JSON) does not work with a torch; empty if it does. */
EK_API int ek_library_rejection(const char* library, const char* torch, ek_text* reason);

/* --- rules for others -------------------------------------------------------------------------------------------- */

/* Rules 7, 8 and 9 for a manifest by itself. */
EK_API int ek_check_manifest(const char* manifest, size_t size);
/* Whether a parameter, a named tuple or its field may have this name. */
EK_API int ek_is_name(const char* text);
/* Which of the given tensors, a JSON list of {"name", "dtype", "shape"}, are taken for which of the manifest's weights:
 * {weight: [names]}. */
EK_API int ek_match_state(const char* weights, const char* given, ek_text* names);
/* {"id", "source", "is_ed25519"} of a PEM file, or PEM text. */
EK_API int ek_public_key(const char* source, ek_text* key);
/* The content of a signature file of ours, checked for its form; empty where there is none. */
EK_API int ek_signatures(const char* path, ek_text* content);
/* Whether the caller or a policy asks for a signature: `by` says who, and is empty where nobody does. */
EK_API int ek_demanded(const ek_demand* demand, ek_text* by);

/* --- writing ----------------------------------------------------------------------------------------------------- */

EK_API ek_writer* ek_writer_new(void);
/* A record's content: bytes, a file or another package's record, each there until the writer is closed. */
EK_API int ek_writer_add_bytes(ek_writer* writer, const char* name, const void* data, size_t size);
EK_API int ek_writer_add_file(ek_writer* writer, const char* name, const char* path);
EK_API int ek_writer_add_record(ek_writer* writer, const char* name, const ek_package* package, const char* record);
/* Reads them all once: the manifest's `records`, with those that torch looks for. */
EK_API int ek_writer_records(ek_writer* writer, ek_text* records);
/* Writes the package, whole or not at all; the manifest must have those records, and is checked as a reader would. */
EK_API int ek_writer_finish(ek_writer* writer, const char* path, const char* manifest, size_t size);
EK_API void ek_writer_close(ek_writer* writer);

/* --- other files ------------------------------------------------------------------------------------------------- */

/* Writes a file, whole or not at all; it has reached the disk before it takes its name. */
EK_API int ek_write_file(const char* path, const void* data, size_t size);
/* A private folder, which goes away when it is closed; those of the same prefix whose makers were killed, before it. */
EK_API int ek_folder_new(const char* parent, const char* prefix, ek_folder** folder);
EK_API const char* ek_folder_path(const ek_folder* folder);
EK_API void ek_folder_close(ek_folder* folder);

#ifdef __cplusplus
}
#endif

#endif
