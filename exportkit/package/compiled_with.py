"""The options that a target was compiled with: AOTInductor keeps them in the metadata of its code."""

from __future__ import annotations

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


@dataclass(frozen=True)
class GivenOptions:
    """What was given in addition to exportkit's own options.

    Attributes:
        inductor_config: Options of torch._inductor.config.
        eager_kernels: Operators that the code leaves to eager's kernels.
    """

    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    eager_kernels: tuple[str, ...] = ()

    def encoded(self) -> str:
        """Returns it as JSON."""
        return json.dumps({"inductor_config": self.inductor_config, "eager_kernels": self.eager_kernels}, default=str)

    def with_more(self, other: GivenOptions) -> GivenOptions:
        """Adds other options, which override these."""
        kernels = tuple(dict.fromkeys((*self.eager_kernels, *other.eager_kernels)))
        return GivenOptions({**self.inductor_config, **other.inductor_config}, kernels)

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


def compiled_with(reader: PackageReader, target: Target) -> GivenOptions:
    """Reads the options of a target. Code that was compiled with exportkit's own options has none."""
    folders = [f"{AOTINDUCTOR_DIR}/{code_folder(target.name, method.name)}/" for method in reader.manifest.methods]
    for record in reader.manifest.records:
        if record.name.startswith(tuple(folders)) and record.name.endswith("_metadata.json"):
            try:
                return msgspec.json.decode(json.loads(reader.read(record.name))[COMPILED_WITH], type=GivenOptions)
            except (KeyError, TypeError, ValueError):  # of another tool, or without options
                continue
    return GivenOptions()
