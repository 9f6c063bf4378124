"""Compiles the C++ sources of a model, the wrapper and the kernels, side by side, by ccache where it is installed."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config, cpp_builder

from exportkit.export.torch_patches.patched import Function, patched

_INCLUDE = "include"
"""The folder beside a source whose headers are read in place of torch's."""


@contextmanager
def compiling_model_sources(*, keep: bool = True) -> Iterator[None]:
    """Lets AOTInductor compile a model's two sources at the same time; it runs one compiler after the other.

    The first compilation of the two returns at once. The link waits for both, and raises what they raised. With `keep`,
    ccache is used.
    """
    ccache = shutil.which("ccache") if keep and not config.force_disable_caches else None
    with ThreadPoolExecutor(max_workers=2) as pool:
        sources: list[Future[None]] = []

        def in_the_background(build: Function, builder: Any) -> None:
            target = builder.get_target_file_path()
            if target.endswith((".wrapper.o", ".kernel.o")):
                write_header_without_regex(Path(target).with_name(_INCLUDE))
                sources.append(pool.submit(_compile, builder.get_command_line(), ccache))
                return
            if target.endswith(".so"):
                wait()
            build(builder)

        def wait() -> None:
            while sources:
                sources.pop(0).result()

        with patched("CppBuilder.build", in_the_background):
            yield
            wait()


def _compile(line: str, ccache: str | None) -> None:
    """Compiles a source in its folder.

    The folder is another one each time, and neither the command nor the code has its name. So ccache knows the command
    again, and the same model has the same bytes.
    """
    told = shlex.split(line)
    position = next(position for position, argument in enumerate(told) if argument.endswith(".cpp"))
    source = Path(told[position])
    told[position : position + 1] = [source.name, "-I", _INCLUDE, f"-ffile-prefix-map={source.parent}=.", "-w"]
    cpp_builder.run_compile_cmd(shlex.join([*([ccache] if ccache else []), *told]), cwd=str(source.parent))


_DEVICE_HEADER = "torch/csrc/inductor/aoti_runtime/model_base.h"
_WITH_REGEX = """  std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");
  std::smatch sm;
  bool matched = std::regex_match(device_str, sm, re);
"""
_WITHOUT_REGEX = """  const DeviceText sm(device_str);
  const bool matched = sm.matched;
"""
_INCLUDES = "".join(f"#include <{name}>\n" for name in ("algorithm", "functional", "locale", "sstream", "string"))
_DEVICE_TEXT = """
// The groups of "(cpu|cuda|xpu|mps)(:([0-9]+))?": 1 is the kind, 3 the number.
struct DeviceText {
  struct Group {
    bool matched;
    std::string text;
    const std::string& str() const { return text; }
  };
  explicit DeviceText(const std::string& device) : colon(device.find(':')), kind(device.substr(0, colon)) {
    const bool known = kind == "cpu" || kind == "cuda" || kind == "xpu" || kind == "mps";
    if (colon != std::string::npos) number = device.substr(colon + 1);
    const bool digits = number.find_first_not_of("0123456789") == std::string::npos;
    matched = known && digits && number.empty() == (colon == std::string::npos);
  }
  Group operator[](int group) const {
    return group == 1 ? Group{true, kind} : Group{!number.empty(), number};
  }
  std::string::size_type colon;
  std::string kind;
  std::string number;
  bool matched;
};
"""


def write_header_without_regex(folder: Path) -> None:
    """Writes torch's header that parses "cuda:1" with std::regex, without that, unless torch has changed it.

    Compiling std::regex takes 40 % of the wrapper's time, and makes 40 % of its code (docs/evidence/export.md).
    """
    header = folder / _DEVICE_HEADER
    if header.exists():  # a compiler may be reading it
        return
    text = (Path(torch.__file__).parent / "include" / _DEVICE_HEADER).read_text()
    namespace = "\nnamespace torch::aot_inductor {\n"
    if text.count("std::regex") != 2 or _WITH_REGEX not in text or namespace not in text:
        return
    text = text.replace(_WITH_REGEX, _WITHOUT_REGEX).replace("#include <regex>\n", _INCLUDES)
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(text.replace(namespace, namespace + _DEVICE_TEXT, 1))
