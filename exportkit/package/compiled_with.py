"""The options that a target was compiled with, which AOTInductor keeps in its code's metadata."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exportkit.package.archive import PackageReader
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import Target, code_folder

COMPILED_WITH = "exportkit.compiled_with"
"""The key of the metadata, which `AOTIModelPackageLoader.load_metadata_from_package` gives as well."""

EVERY = "aten"
"""Stands for all of torch's operators among those that are left to eager's kernels."""

REFUSED = "refused value: "
"""Begins the message of the error of a call that met a value which the code refuses (docs/adr/0074)."""

REFUSED_PLACES = "exportkit_refused_places"
"""The function of the code that lists where it refuses values."""

MOST_PLACES = 64
REFUSED_LENGTH = 1 + 2 * MOST_PLACES
"""Of the memory for refused values, int64: whether any was refused; for each place, the value, and the size plus one
(negative: the value is not known)."""


@dataclass(frozen=True)
class GivenOptions:
    """What was given in addition to exportkit's own options.

    Attributes:
        inductor_config: Options of torch._inductor.config.
        eager_kernels: Operators that the code leaves to eager's kernels: all uses, or one, `operator@node`.
    """

    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    eager_kernels: tuple[str, ...] = ()

    def encoded(self) -> str:
        """Returns it as JSON."""
        return json.dumps({"inductor_config": self.inductor_config, "eager_kernels": self.eager_kernels}, default=str)

    @property
    def plain(self) -> GivenOptions:
        """Those whose values are numbers or truths: none names a program, a file or a function."""
        kept = {name: value for name, value in self.inductor_config.items() if isinstance(value, (bool, int, float))}
        return GivenOptions(kept, self.eager_kernels)

    @property
    def arguments(self) -> str:
        """Them as arguments of `exportkit export`."""
        given = [f"--inductor-config {name}={value}" for name, value in self.inductor_config.items()]
        return " ".join([*given, *(f"--eager-kernel {name}" for name in self.eager_kernels)])


def leave_one(left: tuple[str, ...], place: str) -> tuple[str, ...]:
    """Adds a place, such as `aten.div.Tensor@div_2`, to what is left to eager's kernels, if it is not.

    That is all of its operator, if another place of it is left.
    """
    operator = place.partition("@")[0]
    if {EVERY, operator, place} & {*left}:
        return left
    again = any(each.startswith(f"{operator}@") for each in left)
    return (*left, operator if again else place)


def compiled_with(reader: PackageReader, target: Target) -> GivenOptions:
    """Reads the options of a target. Code that was compiled with exportkit's own options has none."""
    folders = [f"{AOTINDUCTOR_DIR}/{code_folder(target.name, method.name)}/" for method in reader.manifest.methods]
    for record in reader.manifest.records:
        if record.name.startswith(tuple(folders)) and record.name.endswith("_metadata.json"):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another tool, or without this
                return msgspec.json.decode(json.loads(reader.read(record.name))[COMPILED_WITH], type=GivenOptions)
    return GivenOptions()
