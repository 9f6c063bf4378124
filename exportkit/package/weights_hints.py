"""What to do with weights of another form: a file of torch.save, or names that begin otherwise. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from exportkit.errors import WeightsError

_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # of torch.save: an archive, or a pickle


def to_safetensors(path: Path) -> str:
    """Returns the advice for a file that is not a safetensors file."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError:
        start = b""
    if not start.startswith(_STARTS):
        return "Write it with safetensors.torch.save_file(model.state_dict(), path)."
    # Clones, because safetensors refuses weights that share their memory.
    return (
        "torch.save wrote it. Convert the state_dict in it (of a whole model, save its state_dict() first): "
        + _python(
            "import sys, torch; from safetensors.torch import save_file; "
            'found = torch.load(sys.argv[1], map_location="cpu", weights_only=True); '
            'found = next((found[key] for key in ("state_dict", "model_state_dict", "model") if key in found), found); '
            "save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, sys.argv[2])",
            path,
            path.with_suffix(".safetensors"),
        )
    )


def renamed(path: Path | None, wanted: Collection[str], given: Collection[str]) -> str | None:
    """Returns the advice for weights whose names fit but for what they begin with; None for others.

    Args:
        path: Their file, if there is one.
        wanted: The model's names.
        given: Theirs.
    """
    for longer, shorter, how in ((given, wanted, "removeprefix"), (wanted, given, "add")):
        parts = next(iter(longer), "").split(".")
        for prefix in ("".join(f"{part}." for part in parts[:count]) for count in range(1, len(parts))):
            if {name.removeprefix(prefix) for name in longer} == set(shorter):
                name = f"name.removeprefix({prefix!r})" if how == "removeprefix" else f"{prefix!r} + name"
                said = f"The names fit {'without' if how == 'removeprefix' else 'with'} {prefix!r}"
                if path is None:
                    return f"{said}: {{{name}: tensor for name, tensor in weights.items()}}."
                code = (
                    "import sys; from safetensors.torch import load_file, save_file; "
                    f"save_file({{{name}: tensor for name, tensor in load_file(sys.argv[1]).items()}}, sys.argv[2])"
                )
                return f"{said}: {_python(code, path, path.with_name(f'renamed-{path.name}'))}"
    return None


@contextmanager
def advised(path: Path | None, wanted: Collection[str], given: Collection[str]) -> Iterator[None]:
    """Adds the advice of `renamed` to a WeightsError that the block raises."""
    try:
        yield
    except WeightsError as error:
        if hint := renamed(path, wanted, given):
            raise WeightsError(error.message, hint=hint) from error
        raise


def _python(code: str, source: Path, target: Path) -> str:
    return f"python -c {shlex.quote(code)} {shlex.quote(str(source))} {shlex.quote(str(target))}"
