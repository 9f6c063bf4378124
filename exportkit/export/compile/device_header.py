"""A header of torch's that parses "cuda:1" without std::regex, for the code that AOTInductor writes."""

from __future__ import annotations

from pathlib import Path

import torch

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
