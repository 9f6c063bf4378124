"""What loading a package leaves behind for the next load: unpacked files, and what was verified.

    <cache>/                                $EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache
      libraries/<sha256>/lib*.so            an operator library, under the digest of its content
      targets/<digest>/*.so ...             a target's files, under the digest of their names and contents
      {libraries,targets}/*/~verified.json  whose content was seen to be right, and what the files were then
      {libraries,targets}/*/~lock           held by who writes
      packages/<device>-<inode>.json        that every digest of a package was seen to hold, and what the file was then

Python (`trust.py`, `entries.py`) and the C++ runtime (csrc/runtime/trust_records.cpp, cache.cpp) keep it by the same
rules, in the same files: what one of them unpacked or verified, the other does not unpack or hash again.

All of it may be deleted at any time; `exportkit cache prune` does so without taking a file from a running model.

**Names.** A target's digest is the SHA-256 of one line `<sha256>  <name>` (ended by a newline) for each of its
records, sorted by name, the name without `data/aotinductor/<target>/`: what `sha256sum` would print in the entry. No
record's name has a `~`, so that none can be in the place of our own files.

**Trust.** A file counts as verified as long as it has the device, inode, size, modification time and change time that
it had when its content was hashed, since nothing but the system's clock can set a change time back. Not if another
user could write to it, nor if it is a link. Not if it was changed so shortly before that a later change could leave
it the same times: what is here must be older than the record of it, by the clock of the file system that keeps both;
a package, which may be elsewhere, must have been two seconds old when its verification began. And not as long as the
clock shows a time before that. What does not count is hashed, and unpacked again if it is wrong. Of a package it is
the open file that is looked at, so that it does not matter who may rename things in its directory. None of this is a
defence against other processes of the same user, or of root.

**Locks.** Who uses an entry holds a shared `flock` on its folder as long as the model lives, because torch opens CUDA
kernels that lie beside a library when they are first called. `prune` tries for an exclusive one, and leaves alone
what is in use. Writers take turns by an exclusive lock on `~lock`. Files take their names when they are whole, so
that without locks (some network file systems) nothing goes wrong: more is written.

**Records** are JSON, and count for nothing if they have other keys. A *state* is `{"device", "inode", "size",
"mtime_ns", "ctime_ns"}`, integers, as stat has them; times are nanoseconds since 1970. `~verified.json` is
`{"checked_ns": <time>, "files": {<name>: {"sha256": <hex>, "state": <state>}}}`, a package's record `{"checked_ns":
<time>, "manifest_sha256": <hex>, "state": <state>}`. When something was last used is the modification time of its
folder, or of a package's record.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$EXPORTKIT_CACHE, or exportkit under $XDG_CACHE_HOME or ~/.cache. It need not exist yet."""
    if own := os.environ.get("EXPORTKIT_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path in it is to be ignored. No home is known to a user without a passwd entry.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "exportkit"
