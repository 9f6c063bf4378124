"""A traced model: a program for each method, its state and its cases, with their description for the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from exportkit.export.record.record import RecordedCase
from exportkit.package.archive import Content
from exportkit.package.manifest import (
    Call,
    Operator,
    PackagedMethod,
    Provenance,
    Source,
    StateTensor,
    StateUse,
)


@dataclass(frozen=True)
class TracedMethod:
    """A traced method.

    Attributes:
        name: Its name.
        program: The program, on the device it was traced for. It takes the state that it uses as a tuple, the keyword
            argument `exportkit_state`, and writes into it.
        call: The signature and the structure of the output.
        state: What state it uses.
    """

    name: str
    program: torch.export.ExportedProgram
    call: Call
    state: tuple[StateUse, ...] = ()

    @property
    def packaged(self) -> PackagedMethod:
        """Its description for the manifest."""
        return PackagedMethod(name=self.name, call=self.call, state=self.state)


@dataclass(frozen=True)
class Traced:
    """Programs and their description for the manifest.

    Attributes:
        methods: The methods, in the order of the spec.
        operators: The custom operators of the graphs.
        cases: The recorded calls.
        source: The description of the eager model.
        provenance: The versions of the software and the commit.
        name: The package's name.
        state: The state.
        initial: What it begins with, by record.
    """

    methods: tuple[TracedMethod, ...]
    operators: tuple[Operator, ...]
    cases: tuple[RecordedCase, ...]
    source: Source
    provenance: Provenance
    name: str
    state: tuple[StateTensor, ...] = ()
    initial: Mapping[str, Content] = field(default_factory=dict)
