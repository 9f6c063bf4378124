"""What loading a package leaves behind for the next load: unpacked files, and what was verified.

    <cache>/                                $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache
      libraries/<sha256>/lib*.so            an operator library, under the digest of its content
      targets/<digest>/*.so ...             a target's files, under the digest of their names and contents
      {libraries,targets}/*/~verified.json  whose content was seen to be right, and what the files were then
      {libraries,targets}/*/~lock           held by who writes
      packages/<device>-<inode>.json        that every digest of a package was seen to hold, and what the file was then

The library that reads packages (csrc/package/cache.cpp, trust_records.cpp) keeps it for Python and C++ alike.

All of it may be deleted at any time; `exportkit cache prune` does so without taking a file from a running model.

**Names.** A target's digest is the SHA-256 of one line `<sha256>  <name>` (ended by a newline) for each of its
records, sorted by name, the name without `data/aotinductor/<target>/`: what `sha256sum` would print in the entry. No
record's name has a `~`, so that none can be in the place of our own files.

**Whose it is.** Only we and root may be able to change the cache, each folder in it, and every folder above it: no
other user may own one or write to it, but for root's with the sticky bit, such as /tmp. A group may write to a folder
above if it is the user's own, of no other member. In a user namespace without root, as sandboxes make them, folders
above that belong to nobody in it count as root's: who they are of cannot be told there. Where none of that holds, a
load warns and takes a temporary directory instead, and `prune` refuses.

**Trust.** A file counts as verified as long as it has the device, inode, size, modification time and change time that
it had when its content was hashed, since nothing but the system's clock can set a change time back. Not if another
user could write to it, nor if it is a link. Not if it was changed so shortly before that a later change could leave
it the same times: what is here must be older than the record of it, by the clock of the file system that keeps both;
a package, which may be elsewhere, must have been two seconds old when its verification began. And not as long as the
clock shows a time before that. What does not count is hashed, and unpacked again if it is wrong. Of a package it is
the open file that is looked at, so that it does not matter who may rename things in its directory. None of this is a
defence against other processes of the same user, or of root.

A package's record trusts its medium, too: an image or a stick that is exchanged for another one can bring the same
times with it, and a store through a mapping that is older than the file's present owner changes none. So where a
signature is demanded, a package is hashed once in each process, whatever is on record.

**Locks.** Who uses an entry holds a shared `flock` on its folder as long as the model lives, because torch opens CUDA
kernels that lie beside a library when they are first called. `prune` tries for an exclusive one, and leaves alone
what is in use. Writers take turns by an exclusive lock on `~lock`. A lock that others hold is waited for a second at
most where it is not ours to write to, and a minute where it is. Files take their names when they are whole, so that
without locks (some network file systems) nothing goes wrong: more is written.

**Records** are JSON, and count for nothing if they have other keys. A *state* is `{"device", "inode", "size",
"mtime_ns", "ctime_ns"}`, integers, as stat has them; times are nanoseconds since 1970. `~verified.json` is
`{"checked_ns": <time>, "files": {<name>: {"sha256": <hex>, "state": <state>}}}`, a package's record `{"checked_ns":
<time>, "manifest_sha256": <hex>, "state": <state>}`. When something was last used is the modification time of its
folder, or of a package's record.
"""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path

from exportkit.errors import CacheError
from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Library, Target


class Entry:
    """Unpacked files that are in use: `prune` leaves them alone until this is closed, or nobody has it any more.

    Attributes:
        folder: Where they are.
        library: The shared library among them that is to be loaded.
    """

    def __init__(self, handle: int) -> None:
        """Takes over an `ek_entry`."""
        library = core.library()
        self.folder = Path(os.fsdecode(library.ek_entry_folder(handle)))
        self.library = Path(os.fsdecode(library.ek_entry_library(handle)))
        self.close = weakref.finalize(self, library.ek_entry_close, handle)


def cache_directory() -> Path:
    """$EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It need not exist yet."""
    return Path(os.fsdecode(core.text("ek_cache_directory")))


def unpack_library(reader: PackageReader, library: Library, *, always: bool) -> Entry:
    """An operator library of a package, unpacked if it is not there yet.

    Where the cache cannot be used, a warning says why and a temporary directory takes its place. `always` hashes files
    that count as verified, too. PackageError: a record does not hold. CacheError: there is no room there either.
    """
    return _unpack("ek_package_unpack_library", reader, library.record, always)


def unpack_target(reader: PackageReader, target: Target, *, always: bool) -> Entry:
    """The files of a target, as `unpack_library` unpacks a library."""
    entry = _unpack("ek_package_unpack_target", reader, target.name, always)
    try:
        str(entry.library).encode()
    except UnicodeEncodeError as error:
        raise CacheError(
            f"{entry.folder} is no UTF-8, and torch loads no code from there",
            hint="Set EXPORTKIT_CACHE to a directory whose name is UTF-8.",
        ) from error
    return entry


def _unpack(function: str, reader: PackageReader, name: str, always: bool) -> Entry:
    try:
        return Entry(core.handle(function, reader.handle, core.encoded(name), int(always)))
    finally:
        for message in core.warnings():
            warnings.warn(message, RuntimeWarning, stacklevel=3)
