/* What the functions of exportkit.h return. */
#ifndef EXPORTKIT_CODES_H_
#define EXPORTKIT_CODES_H_

/* The classes of exportkit.errors. The hundreds are the exit codes of the command line: 1 a check failed, 2 wrong
 * usage, 3 a bad package, 4 this machine cannot do it; and 5 a bug in exportkit. A later library may have more codes.
 */
enum {
  EXPORTKIT_OK = 0,

  EXPORTKIT_ERROR = 100,
  EXPORTKIT_WRONG_RESULT_ERROR = 101,   /* a recorded case gives another result */
  EXPORTKIT_MODEL_RUN_ERROR = 102,      /* the compiled code failed on valid inputs */
  EXPORTKIT_MODEL_CLOSED_ERROR = 103,   /* the handle belongs to no open model */
  EXPORTKIT_SESSION_BUSY_ERROR = 104,   /* another caller uses the session */
  EXPORTKIT_SESSION_BROKEN_ERROR = 105, /* a call failed: the state may be half written */
  EXPORTKIT_SESSION_CLOSED_ERROR = 106, /* the handle belongs to no open session */
  EXPORTKIT_REFUSED_VALUE_ERROR = 107,  /* a value that the model refuses, such as an index out of range */

  EXPORTKIT_USAGE_ERROR = 200,   /* an argument is invalid, such as a null pointer */
  EXPORTKIT_INPUT_ERROR = 201,   /* the package does not allow these inputs */
  EXPORTKIT_WEIGHTS_ERROR = 202, /* the weights do not fit the model */
  EXPORTKIT_STATE_ERROR = 203,   /* the state does not fit the session */

  EXPORTKIT_PACKAGE_ERROR = 300,
  EXPORTKIT_NOT_AN_ARCHIVE_ERROR = 301,
  EXPORTKIT_NO_MANIFEST_ERROR = 302,
  EXPORTKIT_ARCHIVE_LAYOUT_ERROR = 303,
  EXPORTKIT_STOCK_RECORD_ERROR = 304,
  EXPORTKIT_DUPLICATE_RECORD_ERROR = 305,
  EXPORTKIT_UNSAFE_RECORD_NAME_ERROR = 306,
  EXPORTKIT_MANIFEST_TOO_LARGE_ERROR = 307,
  EXPORTKIT_MANIFEST_SYNTAX_ERROR = 308,
  EXPORTKIT_FORMAT_VERSION_ERROR = 309,
  EXPORTKIT_MANIFEST_CONSISTENCY_ERROR = 310,
  EXPORTKIT_MISSING_RECORD_ERROR = 311,
  EXPORTKIT_UNLISTED_RECORD_ERROR = 312,
  EXPORTKIT_DIGEST_MISMATCH_ERROR = 313,
  EXPORTKIT_MISSING_LIBRARY_ERROR = 314,
  EXPORTKIT_SCHEMA_CHANGED_ERROR = 315,
  EXPORTKIT_LIBRARY_CONFLICT_ERROR = 316,
  EXPORTKIT_LIBRARY_LOAD_ERROR = 317,
  EXPORTKIT_SIGNATURE_MISSING_ERROR = 318,
  EXPORTKIT_SIGNATURE_ERROR = 319,
  EXPORTKIT_CASE_ERROR = 320,
  EXPORTKIT_REVOKED_ERROR = 321,
  EXPORTKIT_ARTIFACT_ERROR = 322,

  EXPORTKIT_HOST_ERROR = 400,
  EXPORTKIT_NO_TARGET_ERROR = 401,
  EXPORTKIT_TORCH_VERSION_ERROR = 402,
  EXPORTKIT_MODEL_LOAD_ERROR = 403,
  EXPORTKIT_CACHE_ERROR = 404,
  EXPORTKIT_POLICY_ERROR = 405,
  EXPORTKIT_OS_ERROR = 406,     /* the operating system refused something */
  EXPORTKIT_MEMORY_ERROR = 407, /* there is not enough memory */

  EXPORTKIT_INTERNAL_ERROR = 500
};

#endif
