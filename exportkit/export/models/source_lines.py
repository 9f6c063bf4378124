"""Finds the line of the user's code that an error or a traced operator comes from."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from exportkit.errors import ExportError, ExportkitError, MissingOperatorError
from exportkit.export.models.missing_operators import advice, advice_if_refused, missing_operator
from exportkit.installed import installed_models

_EXPORTERS = tuple(str(Path(__file__).parents[2] / part) for part in ("export", "onnx"))
_EXPORTKIT = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_PYTHON = "/lib/python3."
# What torch says if a device is missing, or if tensors of one call are on two devices.
_OTHER_DEVICE = "not compiled with CUDA|No CUDA GPUs|NVIDIA driver|device ordinal|same device|different devices"
_SAME_DEVICE = "Leave out .cuda(), and make tensors on an input's device (x.device): --device and `load` choose it."
_TRACED = re.compile(r'File "(.*?)", line (\d+), in (\w+)\n\s*(.*)')


def user_frame(stack: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the user's code: else of a package that it calls; never torch's or exportkit's.

    Frames outside of the exporter's first one called it. They are not part of the model.
    """
    return next(iter(_frames_of_model(stack)), None)


def _frames_of_model(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the innermost frame of the user's code, and that of a package which it called there, if there are any."""
    frames = list(stack)
    first = next((i for i, frame in enumerate(frames) if frame.filename.startswith(_EXPORTERS)), -1)
    inside = [frame for frame in reversed(frames[first + 1 :]) if not _is_machinery(frame)]
    users = next((i for i, f in enumerate(inside) if not any(p in f.filename for p in (*_PACKAGES, _PYTHON))), None)
    packages = [frame for frame in inside[:users] if any(part in frame.filename for part in _PACKAGES)]
    return [*([] if users is None else [inside[users]]), *packages[:1]]


def where_raised(error: BaseException) -> str:
    """Returns the line of the model's code that raised an error, as "model.py:12 in forward: `x + 1`", or "".

    Where that line calls a package, the package's line comes after it.
    """
    return ", in ".join(where(frame) for frame in _frames_of_model(traceback.extract_tb(error.__traceback__)))


def where(frame: traceback.FrameSummary) -> str:
    """Returns a frame as "model.py:12 in forward: `x + 1`". A file of an installed package has its folders."""
    code = f": `{frame.line}`" if frame.line else ""
    package = next((part for part in _PACKAGES if part in frame.filename), None)
    file = frame.filename.rpartition(package)[2] if package else Path(frame.filename).name
    return f"{file}:{frame.lineno} in {frame.name}{code}"


def where_now() -> str:
    """Returns the line of the model's code that is running, or ""."""
    frame = user_frame(traceback.extract_stack())
    return where(frame) if frame else ""


def where_traced(node: torch.fx.Node) -> str:
    """Returns the line of the model's code that a node of a graph was traced from, or ""."""
    return where_listed(node.meta.get("stack_trace") or "")


def called_at(node: torch.fx.Node) -> str:
    """Returns what a node calls and the line, if it is known: "aten.add.Tensor at model.py:12 in forward: `x + 1`"."""
    line = where_traced(node)
    return f"{node.target}{' at ' + line if line else ''}"


def where_listed(trace: str) -> str:
    """Returns the line of the model's code in a stack as Python prints it, or ""."""
    stack = _TRACED.findall(trace)
    frame = user_frame(traceback.FrameSummary(file, int(line), name, line=code) for file, line, name, code in stack)
    return where(frame) if frame else ""


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Runs the caller's code, and raises its errors as errors of that code.

    Args:
        doing: What the code does, for the message: "importing model.py".

    Raises:
        ExportError: The code raised an error, or tried to end the process.
    """
    try:
        yield
    except ExportkitError:
        raise
    except (Exception, SystemExit) as error:
        raise raised_by_user(f"{doing} failed", error, hint="--debug shows the whole traceback.") from error


def raised_by_user(what: str, error: BaseException, hint: str) -> ExportError:
    """Returns the error to raise for what the caller's code raised.

    `hint` is the advice if exportkit knows none for this error.
    """
    frame = user_frame(traceback.extract_tb(error.__traceback__))
    said = _said(error)
    if (cause := _first_cause(error)) is not error and _said(cause) not in said:
        said += f" (because of {type(cause).__name__}: {_said(cause)})"
    message = f"{what}{' at ' + where(frame) if frame else ''}: {type(error).__name__}: {said}"
    if operator := missing_operator(said):
        return MissingOperatorError(message, hint=advice(operator))
    if re.search(_OTHER_DEVICE, said):
        hint = f"{_SAME_DEVICE} {hint}"
    return ExportError(message, hint=advice_if_refused(said) or hint)


def _said(error: BaseException) -> str:
    return str(error).partition("Exception raised from")[0].strip()


def _first_cause(error: BaseException) -> BaseException:
    """Returns what an error was raised from, such as the dynamic linker's where torch cannot load a library."""
    return _first_cause(error.__cause__) if error.__cause__ else error


@functools.cache
def _plugins() -> tuple[str, ...]:
    """Returns where models lie that exportkit's own folder has as plugins: their lines are shown like a user's."""
    modules = (value.partition(":")[0].split(".") for value in installed_models().values())
    return tuple(str(Path(_EXPORTKIT, *inner)) for package, *inner in modules if package == "exportkit")


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    return (file.startswith(_EXPORTKIT) and not file.startswith(_plugins())) or file.startswith((_TORCH, "<"))
