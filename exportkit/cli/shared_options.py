"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from exportkit.export.models.model_names import check_model_name, check_not_weights
from exportkit.package.atomic import check_writable
from exportkit.package.trust import Trust
from exportkit.reference_model import ReferenceModel
from exportkit.verify.options import VerifyOptions

F = TypeVar("F", bound=Callable[..., Any])


class _Artifact(click.Path):
    """A file that exportkit wrote. The name of a model is answered with how one is made of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if re.fullmatch(r"[\w./-]+:[A-Za-z_]\w*", str(value)) and not Path(value).exists():
            self.fail(f"{value} is a model, not a file: `exportkit export {value} -o OUT.pt2` makes one", param, ctx)
        check_not_weights(Path(value))
        return super().convert(value, param, ctx)


class _OutputFile(click.Path):
    """A file to write. One that cannot be written is refused before the work on its content."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        check_writable(path)
        return super().convert(path, param, ctx)


EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
ARTIFACT = _Artifact(exists=True, dir_okay=False, path_type=Path)
PACKAGE = _Artifact(exists=True, path_type=Path)  # a file, or a folder: an OCI layout, or one with a .pt2
OUTPUT_FILE = _OutputFile(dir_okay=False, path_type=Path)


def flag(name: str, text: str, *, to: str | None = None) -> Callable[[F], F]:
    """A flag. The command gets it under its name, or as `to`."""
    return click.option(*filter(None, (name, to)), is_flag=True, help=text)


def repeatable(name: str, metavar: str, text: str, *, to: str | None = None, **settings: Any) -> Callable[[F], F]:
    """An option that may be given several times. The command gets the values under its name, or as `to`."""
    names = filter(None, (name, to))
    return click.option(*names, multiple=True, metavar=metavar, help=f"{text} Repeatable.", **settings)


def output_option(required: bool = True) -> Callable[[F], F]:
    """-o, --output: the file to write."""
    return click.option(
        "-o", "--output", type=OUTPUT_FILE, required=required, help="The .pt2 to write; replaced only on success."
    )


class _LibraryOrModule(click.ParamType):
    """A shared library's Path, or the name of a module that loads some."""

    name = "library"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path | str:
        if Path(value).is_file():
            return Path(value)
        if all(part.isidentifier() for part in str(value).split(".")) and not str(value).endswith(".so"):
            return str(value)
        self.fail(f"there is no file {value!r}, and no Python module can have such a name", parameter, context)


def op_library_option(text: str) -> Callable[[F], F]:
    """--op-library, repeatable: a file, or a module in place of it."""
    kind, shown = _LibraryOrModule(), "LIB|MODULE"
    return click.option("--op-library", "op_libraries", type=kind, multiple=True, metavar=shown, help=text)


def weights_option(text: str) -> Callable[[F], F]:
    """--weights: a safetensors file."""
    return click.option("--weights", type=EXISTING_FILE, metavar="FILE.safetensors", help=text)


def public_key_options(argument: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--public-key, repeatable, and --signature: the command gets them as `trust`.

    Both apply to the file that the command's argument names.
    """
    signature = click.option(
        "--signature",
        type=EXISTING_FILE,
        metavar="FILE",
        help="The signature file, if it is not beside the signed file.",
    )
    keys = click.option(
        "--public-key",
        "public_keys",
        type=EXISTING_FILE,
        multiple=True,
        metavar="KEY.pem",
        help=f"Require that this key signed {argument}. Repeatable: one of the keys is enough.",
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_trust(*args: Any, public_keys: Sequence[Path], signature: Path | None, **options: Any) -> Any:
            return function(*args, trust=Trust(public_keys, signature), **options)

        return keys(signature(with_trust))

    return decorate


def trusted_option(argument: str) -> Callable[[F], F]:
    """--trust: a program may be a file of torch.export.save."""
    text = (
        f"Read {argument} even if it is a file of torch.export.save, which runs what its author wrote. It changes "
        "nothing for a package: digests and signatures decide."
    )
    return click.option("--trust", "trusted", is_flag=True, help=text)


def eager_options(artifact: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--model, --weights and --op-library: the command gets them as `eager`."""
    model = model_option(artifact)
    weights = weights_option("The weights file that the model was exported with.")
    libraries = op_library_option(
        f"An operator library that {artifact} calls but does not contain, or a Python module that loads some. "
        "Repeatable."
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_eager(*args: Any, model: str | None, weights: Path | None, op_libraries: Any, **options: Any) -> Any:
            return function(*args, eager=ReferenceModel(model, weights, op_libraries), **options)

        return model(weights(libraries(with_eager)))

    return decorate


def device_option(text: str, default: str) -> Callable[[F], F]:
    """--device."""
    choices = "auto|cpu|cuda|cuda:N" if default == "auto" else "cpu|cuda|cuda:N"
    return click.option("--device", default=default, metavar=choices, help=text)


def model_option(artifact: str) -> Callable[[F], F]:
    """--model: the eager model."""
    text = (
        f"The eager model, such as net.py:Net. Default: the name that {artifact} recorded, if an installed package has "
        "registered it and no signature is required."
    )
    return click.option("--model", metavar="MODEL", help=text, callback=_eager_model)


def _eager_model(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value.endswith(".pt2"):
        raise click.UsageError(f"--model {value}: the eager model is Python code, such as net.py:Net, and no program.")
    if value is not None:
        check_model_name(value)
    return value


def seed_option(text: str) -> Callable[[F], F]:
    """--seed."""
    return click.option("--seed", type=click.IntRange(min=0), default=0, help=text)


def timeout_option(function: F) -> F:
    """--timeout: the limit of a call."""
    seconds = click.IntRange(min=1, max=7 * 86400)
    text = "Seconds a call may take. Loading always gets at least 600."
    return click.option("--timeout", type=seconds, default=int(VerifyOptions.timeout), help=text)(function)


def tolerance_options(function: F) -> F:
    """--rtol and --atol. Both or neither must be given, as for torch.testing.assert_close."""
    at_least_zero = click.FloatRange(min=0)
    text = "Allows this difference from eager in every floating output, whatever its error. Needs --{}."
    function = click.option("--atol", type=at_least_zero, help=text.format("rtol"))(function)
    return click.option("--rtol", type=at_least_zero, help=text.format("atol"))(function)


def check_tolerances(rtol: float | None, atol: float | None) -> None:
    """Refuses one without the other, infinity and nan, which would make every comparison pass."""
    for name, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not math.isfinite(value):
            raise click.UsageError(f"{name} {value}: give a finite number.")
    if (rtol is None) != (atol is None):
        given, other = ("--rtol", "--atol") if atol is None else ("--atol", "--rtol")
        raise click.UsageError(f"{given} without {other}: give both or neither.")


_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def byte_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Converts such as `2GB` or `500 MB` to bytes, in decimal units."""
    return None if value is None else int(_quantity(value, _BYTES, str.upper, "500MB, 2GB"))


def duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Converts such as `30d` or `12h` to seconds."""
    return None if value is None else _quantity(value, _SECONDS, str.lower, "90m, 12h, 30d")


def _quantity(text: str, units: Mapping[str, int], spelled: Callable[[str], str], examples: str) -> float:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([a-zA-Z]*)", text.strip())
    unit = units.get(spelled(match[2])) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is not a number with a unit, such as {examples}")
    return float(match[1]) * unit


def json_object(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any]:
    """Parses --model-kwargs: a JSON object of plain values."""
    if value is None:
        return {}
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise click.BadParameter(
            f"{value!r} is not JSON: {error}. Quote it for the shell: '{{\"depth\": 2}}'"
        ) from error
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object such as '{{\"depth\": 2}}'")
    for name, item in parsed.items():
        if not (item is None or isinstance(item, (bool, int, float, str))):
            raise click.BadParameter(f"{name} is {item!r}; values must be numbers, strings, booleans or null")
    return parsed


def assignments(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parses KEY=VALUE pairs."""
    pairs = {value: value.partition("=") for value in values}
    for value, (key, equals, _) in pairs.items():
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE, such as max_autotune=True")
    return {key: text for key, _, text in pairs.values()}
