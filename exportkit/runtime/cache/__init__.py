"""The cache of loaded packages: unpacked files and records of verified digests.

    <cache>/                                $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache
      libraries/<sha256>/lib*.so            an operator library, under the digest of its content
      targets/<digest>/*.so ...             a target's files, under the digest of their names and contents
      compiled/<digest>/                    code that an export compiled (exportkit.export.compile.compiled_cache)
      {libraries,targets}/*/~verified.json  the verified digests of the files, and the files' state at that time
      {libraries,targets}/*/~lock           held by the writer
      packages/<device>-<inode>.json        a package with verified digests, and the file's state at that time

The library that reads packages (csrc/package/cache.cpp, trust_records.cpp) keeps the cache for Python and C++.

The cache may be deleted at any time. `exportkit doctor --prune-cache` deletes no file that a running model uses.

**Names.** A target's digest is the SHA-256 of one line `<sha256>  <name>` (ended by a newline) for each of its
records, sorted by name. The name is without `data/aotinductor/<target>/`, so the lines are the output of `sha256sum`
in the entry. A record's name never has a `~`, so it cannot collide with the cache's own files.

**Ownership.** Only the user and root may be able to change the cache, each folder in it and every folder above it. No
other user may own or write to one of these, except for root's folders with the sticky bit, such as /tmp. A group may
write to a folder above the cache if the user is its only member. A link on the way to the cache must be the user's or
root's. In a user namespace without root, such as a sandbox, folders above the cache without an owner in the namespace
count as root's, because their owner is unknown there. If these rules are broken, a load warns and uses a temporary
directory instead, and `prune` refuses.

**Trust.** A file counts as verified while it has the same device, inode, size, modification time and change time as
when it was hashed, because only the system's clock can set a change time back. It does not count if it is a link, or
if another user could write to it. It does not count if it was so new that a later change could leave the same times:
a file in the cache must be older than its record, by the clock of their file system, and a package, which may be on
another file system, must have been two seconds old when its verification began. It does not count while the clock
shows an earlier time than that. Other files are hashed, and unpacked again if they are wrong. A package is checked
through its open file, so renames in its directory do not matter. These rules do not protect against other processes of
the same user or of root.

A package's record also trusts its medium. An exchanged image or stick can have the same times, and a write through a
mapping from before the file changed its owner does not change them. So if a signature is required, each process hashes
a package once, regardless of records.

**Locks.** A model holds a shared `flock` on the folders of its entries, because torch opens CUDA kernels beside a
library on their first call. `prune` tries an exclusive lock, and skips entries in use. Writers take turns with an
exclusive lock on `~lock`. A process waits for another's lock at most a second if it cannot write there, and a minute if
it can. Files get their names when they are complete, so without locks (on some network file systems) the only loss is
duplicate work.

**Records** are JSON and are ignored if they have other keys. A *state* is `{"device", "inode", "size", "mtime_ns",
"ctime_ns"}`, integers as in stat; times are nanoseconds since 1970. `~verified.json` is `{"checked_ns": <time>,
"files": {<name>: {"sha256": <hex>, "state": <state>}}}`. A package's record is `{"checked_ns": <time>,
"manifest_sha256": <hex>, "state": <state>}`. The time of last use is the modification time of the entry's folder or of
the package's record.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from pathlib import Path

from exportkit.errors import CacheError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Library, Target, code_folder

_EXPORTKIT = str(Path(__file__).parents[2]) + os.sep


class Entry:
    """Unpacked files in use, with the library to load. `prune` keeps them until the entry is closed or collected."""

    def __init__(self, handle: int) -> None:
        """Takes over an `ek_entry`."""
        library = core.library()
        self.folder = Path(os.fsdecode(library.ek_entry_folder(handle)))
        self.library = Path(os.fsdecode(library.ek_entry_library(handle)))
        self.close = weakref.finalize(self, library.ek_entry_close, handle)


def cache_directory() -> Path:
    """Returns $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    return Path(os.fsdecode(core.text("ek_cache_directory")))


def unpack_library(reader: PackageReader, library: Library, *, always: bool) -> Entry:
    """Unpacks an operator library of a package, unless the cache has it.

    `always` also hashes files that count as verified. If the cache cannot be used, a warning says why, and a temporary
    directory is used instead. PackageError: a record is damaged. CacheError: the temporary directory has no room
    either.
    """
    return _unpack("ek_package_unpack_library", reader, library.record, always)


def unpack_target(reader: PackageReader, target: Target, method: str, *, always: bool) -> Entry:
    """Unpacks the code of a target's method, as `unpack_library` unpacks a library."""
    entry = _unpack("ek_package_unpack_target", reader, code_folder(target.name, method), always)
    try:
        str(entry.library).encode()
    except UnicodeEncodeError as error:
        said = f"the name of {entry.folder} is not UTF-8, so torch cannot load code from it"
        raise CacheError(said, hint="Set EXPORTKIT_CACHE to a directory with a UTF-8 name.") from error
    return entry


def _unpack(function: str, reader: PackageReader, name: str, always: bool) -> Entry:
    try:
        return Entry(core.handle(function, reader.handle, core.encoded(name), int(always)))
    finally:
        for message in core.warnings():
            warnings.warn(message, RuntimeWarning, stacklevel=callers_level())


def callers_level() -> int:
    """Returns the stacklevel of the line that called exportkit: one load, which unpacks several things, warns once."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_EXPORTKIT):
        frame, level = frame.f_back, level + 1
    return level
