"""Shared libraries written in a few lines of C, to be described: no torch headers, built in a fraction of a second."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

TORCH_LIB = Path(importlib.util.find_spec("torch").origin or "").with_name("lib")  # type: ignore[union-attr]

# The stable ABI's registration functions, as STABLE_TORCH_LIBRARY calls them.
PRELUDE = """
#include <stdint.h>
#include <stdlib.h>
extern int32_t aoti_torch_library_init_def(const char*, const char*, uint32_t, void**);
extern int32_t aoti_torch_library_def(void*, const char*);
extern int32_t aoti_torch_library_init_fragment(const char*, const char*, uint32_t, void**);
extern int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, void**);
extern int32_t aoti_torch_library_impl(void*, const char*, void (*)(uint64_t*, uint64_t, uint64_t));
static void define(const char* ns, const char* schema) {
  void* library;
  if (aoti_torch_library_init_def(ns, "toy.c", 1, &library) || aoti_torch_library_def(library, schema)) abort();
}
static void fragment(const char* ns, const char* schema) {
  void* library;
  if (aoti_torch_library_init_fragment(ns, "toy.c", 1, &library) || aoti_torch_library_def(library, schema)) abort();
}
static void run(uint64_t* stack, uint64_t arguments, uint64_t results) {}
static void kernel(const char* ns, const char* key) {
  void* library;
  if (aoti_torch_library_init_impl(ns, key, "toy.c", 1, &library) || aoti_torch_library_impl(library, "twice", run))
    abort();
}
"""


def build(folder: Path, source: str, *flags: str, name: str = "libtoy_cpu.so", compiler: str = "gcc") -> Path:
    """Compiles C, or C++ where the compiler says so, into a shared library."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} to build a library with")
    library = folder / name
    language = "c" if compiler == "gcc" else "c++"
    command = [compiler, "-shared", "-fPIC", "-O1", "-x", language, "-", "-o", str(library), *flags]
    # torch's symbols are found only by what asks for its library: Python opens it for itself alone.
    command += [f"-L{TORCH_LIB}", "-Wl,--as-needed", "-ltorch_cpu"] if source.startswith(PRELUDE) else []
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)
    return library


def operator_library(folder: Path, schema: str, *, namespace: str = "toy", name: str = "libtoy_cpu.so") -> Path:
    """A library that defines one operator, without a kernel."""
    body = f'__attribute__((constructor)) static void start(void) {{ define("{namespace}", "{schema}"); }}'
    return build(folder, PRELUDE + body, name=name)
