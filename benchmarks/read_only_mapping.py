"""Whether a process can map memory of a GPU so that it cannot write there, as CUDA IPC's handles cannot be opened.

    python -m benchmarks.read_only_mapping

Maps the same memory twice by the driver's virtual memory calls, for reading and writing and for reading only, and reads
and writes at both. Prints what the driver said, as JSON.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch

_SIZE = ctypes.c_size_t(2 << 20)
_ZERO = ctypes.c_ulonglong()
_READ, _BOTH = 1, 3  # CUmemAccess_flags


def main() -> None:
    torch.zeros(1, device="cuda:0")  # makes the context
    driver = ctypes.CDLL("libcuda.so.1")
    said: dict[str, str] = {}

    def call(what: str, name: str, *arguments: Any) -> None:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(getattr(driver, name)(*arguments), ctypes.byref(text))
        said[what] = (text.value or b"?").decode()

    handle = ctypes.c_ulonglong()
    # CUmemAllocationProp: pinned memory, which may become a file descriptor, on device 0.
    properties = (ctypes.c_int * 8)(1, 1, 1, 0)
    call("create", "cuMemCreate", ctypes.byref(handle), _SIZE, properties, _ZERO)
    for what, flags in (("read and write", _BOTH), ("read only", _READ)):
        place, byte = ctypes.c_ulonglong(), ctypes.c_ubyte()
        call(f"{what}: reserve", "cuMemAddressReserve", ctypes.byref(place), _SIZE, _ZERO, _ZERO, _ZERO)
        call(f"{what}: map", "cuMemMap", place, _SIZE, _ZERO, handle, _ZERO)
        access = (ctypes.c_int * 3)(1, 0, flags)  # CUmemAccessDesc: of device 0
        call(f"{what}: set access", "cuMemSetAccess", place, _SIZE, access, ctypes.c_size_t(1))
        call(f"{what}: read", "cuMemcpyDtoH_v2", ctypes.byref(byte), place, ctypes.c_size_t(1))
        call(f"{what}: write", "cuMemsetD8_v2", place, ctypes.c_ubyte(1), _SIZE)
        call(f"{what}: finish", "cuCtxSynchronize")
    print(json.dumps({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "said": said}, indent=1))


if __name__ == "__main__":
    main()
