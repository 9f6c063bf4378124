"""Compiles the two C++ sources of a model, the wrapper and the kernels: side by side, and each only once.

An object file is kept under the digest of what the compiler reads and is told: the preprocessed source, the options and
the compiler's version. So a changed header, option or compiler is compiled again. Objects are kept in `exportkit` in
Inductor's cache folder: $TORCHINDUCTOR_CACHE_DIR, or torchinductor_<user> in the temporary folder.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config, cpp_builder
from torch._inductor.runtime.cache_dir_utils import cache_dir

from exportkit.export.within_torch.torch_internals import replaced
from exportkit.package.atomic import write_whole

KEPT_OBJECTS = 256  # of about 200 KB each

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


@contextmanager
def compiling_model_sources(*, keep: bool = True) -> Iterator[None]:
    """Lets AOTInductor compile a model's two sources at the same time; it runs one compiler after the other.

    The first compilation of the two returns at once. The link waits for both, and raises what they raised.

    Args:
        keep: Whether objects are kept, and taken from an earlier compilation.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        sources: list[Future[None]] = []

        def in_the_background(build: Callable[[Any], None]) -> Callable[[Any], None]:
            def start(builder: Any) -> None:
                target = builder.get_target_file_path()
                if target.endswith((".wrapper.o", ".kernel.o")):
                    folder = _object_folder() if keep and not config.force_disable_caches else None
                    sources.append(pool.submit(_compile, _Command.read(builder.get_command_line()), folder))
                    return
                if target.endswith(".so"):
                    wait()
                build(builder)

            return start

        def wait() -> None:
            while sources:
                sources.pop(0).result()

        with replaced(cpp_builder.CppBuilder, "build", in_the_background):
            yield
            wait()


@dataclass(frozen=True)
class _Command:
    """A command that compiles a source.

    Attributes:
        compiler: The program and its first arguments, such as ccache's.
        source: The source file.
        options: The other arguments.
        object: The object file.
    """

    compiler: Sequence[str]
    source: Path
    options: Sequence[str]
    object: Path

    @classmethod
    def read(cls, line: str) -> _Command:
        *arguments, c_option, o_option, target = shlex.split(line)
        assert (c_option, o_option) == ("-c", "-o"), line
        place = next(place for place, argument in enumerate(arguments) if argument.endswith(".cpp"))
        return cls(arguments[:place], Path(arguments[place]), arguments[place + 1 :], Path(target))

    @property
    def arguments(self) -> list[str]:
        """The command up to what it makes.

        The wrapper's messages quote __FILE__. Without the folder's name, which is another one each time, the same model
        gives the same code.
        """
        folder = self.source.parent
        headers = ["-I", str(folder / "include")] if (folder / "include").exists() else []
        return [*self.compiler, str(self.source), *headers, *self.options, f"-ffile-prefix-map={folder}=."]

    def digest(self) -> str | None:
        """The digest of what the compiler reads and is told, or None if it cannot preprocess the source."""
        version = _output([*self.compiler, "--version"])
        text = _output([*self.arguments, "-E", "-P"])
        if version is None or text is None:
            return None
        told = b"\0".join([version, *map(os.fsencode, self.options)])
        return hashlib.sha256(hashlib.sha256(told).digest() + text).hexdigest()


def _output(command: Sequence[str]) -> bytes | None:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return done.stdout if done.returncode == 0 else None


def _compile(command: _Command, objects: Path | None) -> None:
    """Compiles a source, or takes the object file of an earlier compilation of the same.

    Args:
        command: What AOTInductor would run.
        objects: The folder of kept objects, or None to keep none.

    Raises:
        CppCompileError: The compiler refused the source.
    """
    if command.source.name.endswith(".wrapper.cpp"):
        _write_header_without_regex(command.source.parent / "include")
    digest = command.digest() if objects else None
    kept = objects / f"{digest}.o" if objects and digest else None
    if kept is not None:
        with suppress(OSError):  # it is not there, or another process removed it meanwhile
            shutil.copyfile(kept, command.object)
            os.utime(kept)
            return
    line = shlex.join([*command.arguments, "-c", "-o", str(command.object)])
    cpp_builder.run_compile_cmd(line, cwd=str(command.source.parent))
    if kept is not None:
        with suppress(OSError):  # a full disk: the next export compiles it again
            write_whole(kept, command.object.read_bytes())
            _remove_oldest(kept.parent)


def _write_header_without_regex(folder: Path) -> None:
    """Writes torch's header that parses "cuda:1" with std::regex, without that, unless torch has changed it.

    Compiling std::regex takes a third of the wrapper's time, and makes half of its code.
    """
    text = (Path(torch.__file__).parent / "include" / _DEVICE_HEADER).read_text()
    namespace = "\nnamespace torch::aot_inductor {\n"
    if text.count("std::regex") != 2 or _WITH_REGEX not in text or namespace not in text:
        return
    text = text.replace(_WITH_REGEX, _WITHOUT_REGEX).replace("#include <regex>\n", _INCLUDES)
    header = folder / _DEVICE_HEADER
    header.parent.mkdir(parents=True)
    header.write_text(text.replace(namespace, namespace + _DEVICE_TEXT, 1))


def _object_folder() -> Path | None:
    """Returns the folder of the kept objects. None: another user could change it, or it cannot be made."""
    try:
        folder = Path(cache_dir()).resolve() / "exportkit"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if all(_only_ours(path.stat()) for path in (folder, *folder.parents)) else None
    except OSError:
        return None


def _only_ours(status: os.stat_result) -> bool:
    sticky = status.st_mode & stat.S_ISVTX and status.st_uid == 0
    return status.st_uid in (0, os.getuid()) and (bool(sticky) or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _remove_oldest(folder: Path) -> None:
    objects = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
    for path in objects[:-KEPT_OBJECTS]:
        path.unlink(missing_ok=True)
