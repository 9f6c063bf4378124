"""What is timed: a call of a method, or one step of a session."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from exportkit.bench.results import Measurement, Row
from exportkit.bench.timed_models import (
    NoOperators,
    OperatorCalledError,
    PackageOptions,
    WithReferences,
    described_of,
    dtype_of,
)
from exportkit.errors import DigestMismatchError, ExportError, UsageError
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.eager_run import run_eagerly
from exportkit.export.record.record import record_run
from exportkit.export.record.sequences import DrawnCall, draw_call, draw_session, session_call
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import edge_case_in, moves_of
from exportkit.package.manifest import Accuracy, Call, Case, Manifest, PackagedMethod
from exportkit.runtime.model import Model
from exportkit.sizes import case_label, checked_sizes, label_of

_MAX_SETS = 4
_ENOUGH_BYTES = 128 << 20  # of inputs to rotate through


@dataclass(frozen=True)
class Steps:
    """Calls in one session, of which number `timed`, the last one that is made, is timed.

    `tensors` are what eager was given and answered, and `moves` how far it moves when it rounds otherwise, as the file
    of a recorded case has it. `fresh`: eager was asked now, and not at export. `replaced`: references replaced its
    operators for that. `others` are other inputs of the only call, as `tensors` has them.
    """

    case: Case
    tensors: Mapping[str, Tensor]
    moves: Mapping[str, Accuracy]
    timed: int
    fresh: bool = False
    replaced: bool = False
    others: Sequence[Mapping[str, Tensor]] = ()

    @property
    def count(self) -> int:
        """The number of calls that are made."""
        return self.timed + 1

    @property
    def label(self) -> str:
        """What is timed, in words."""
        label = case_label(self.case)
        return label if len(self.case.calls) == 1 else f"call {self.timed} of {label}"

    def row(self, manifest: Manifest, measurements: tuple[Measurement, ...]) -> Row:
        """Returns the row of the timed call."""
        call = self.case.calls[self.timed]
        several = len(manifest.methods) > 1
        return Row(
            subject=f"{manifest.name}{f' {call.method}' if several else ''}",
            size=label_of(call.sizes),
            dtype=dtype_of(manifest.method(call.method).call),
            direction="forward",
            moved_bytes=None,
            limit=None,
            measurements=measurements,
        )


@dataclass(frozen=True)
class StepsOf:
    """Finds what of a package, which is loaded, is timed."""

    path: Path
    model: Model
    method: PackagedMethod
    eager: EagerMethods | None
    device: torch.device
    options: PackageOptions

    def all(self) -> Iterator[Steps]:
        """Yields the calls at each size of --size, or the recorded ones. UsageError: there are none."""
        if not self.options.sizes:
            yield from self._recorded()
        elif self.eager is None:
            hint = "Leave it out to time the recorded cases."
            raise UsageError("--size needs the eager model to draw inputs", hint=hint)
        else:
            for text in self.options.sizes:
                yield self._drawn(text, self.eager)

    def _recorded(self) -> Iterator[Steps]:
        """Yields the recorded sequences up to the last call of the method."""
        manifest, method, found = self.model.manifest, self.method.name, False
        with PackageReader(self.path) as reader:
            if reader.manifest != manifest:
                raise DigestMismatchError(f"{self.path} was replaced while it was read", hint="Run it again.")
            for place, case in enumerate(manifest.cases):
                calls = [number for number, call in enumerate(case.calls) if call.method == method]
                if edge_case_in(reader, case) or not calls:
                    continue
                found, timed = True, calls[-1]
                if self.eager is None:
                    content = reader.read(case.record)
                    yield Steps(case, load_safetensors(content), moves_of(content), timed)
                    continue
                loaded, bind = self.model.cases[place].calls, self.eager.bind
                drawn = [
                    DrawnCall(each.method, bind(each.method, each.args, each.kwargs), each.sizes) for each in loaded
                ]
                yield self._asked(self.eager, drawn, timed)
        if not found:
            raise UsageError(f"the package {manifest.name} has no recorded call of {method}", hint="Give --size.")

    def _drawn(self, text: str, eager: EagerMethods) -> Steps:
        """Draws a sequence at a size of --size; for a method without state a call, and other inputs of it."""
        methods, method, seed = self.model.manifest.methods, self.method, self.options.seed
        if method.state:
            drawn = draw_session(DescribedModel(eager, methods), parse_sizes(text, session_call(methods)), seed)
            numbers = [number for number, call in enumerate(drawn) if call.method == method.name]
            if not numbers:
                raise UsageError(f"the spec's draw_sequence draws no call of {method.name}", hint="Leave out --size.")
            return self._asked(eager, drawn, numbers[-1])
        sizes = parse_sizes(text, method.call)
        first = draw_call(eager, method, sizes, seed)
        sets = min(_MAX_SETS, math.ceil(_ENOUGH_BYTES / max(1, sum(t.nbytes for t in first.bound.tensors))))
        if any(each.written for each in method.call.inputs):
            sets = 1  # what is put back is that of one call
        others = [draw_call(eager, method, sizes, seed + 1 + i).bound.tensors for i in range(sets - 1)]
        return self._asked(eager, [first], 0, others)

    def _asked(
        self,
        eager: EagerMethods,
        drawn: Sequence[DrawnCall],
        timed: int,
        others: Sequence[Sequence[Tensor]] = (),
    ) -> Steps:
        """Asks eager for what a recorded case has of calls, with references for its operators where it allows them."""
        manifest = self.model.manifest
        model = DescribedModel(eager, manifest.methods, manifest.state, self.device, manifest.provenance.tf32)
        forms = described_of(manifest)
        try:
            with WithReferences(forms.values()), NoOperators({name.partition("::")[0] for name in forms}):
                made, replaced = record_run(run_eagerly(model, drawn)), bool(forms)
        except ExportError as error:
            if not isinstance(error.__cause__, OperatorCalledError):
                raise
            made, replaced = record_run(run_eagerly(model, drawn)), False
        accuracy = dict(made.state_accuracy)
        case = Case(record="", calls=made.calls, reference_dtype=made.reference_dtype, state_accuracy=accuracy)
        named = [{f"0.input.{place}": tensor for place, tensor in enumerate(each)} for each in others]
        tensors, moves = load_safetensors(made.tensors), moves_of(made.tensors)
        return Steps(case, tensors, moves, timed, fresh=True, replaced=replaced, others=named)


def parse_sizes(text: str, call: Call) -> dict[str, int]:
    """Parses `batch=8,gh=28` to a number for each dimension of a call. UsageError says what is wrong with one."""
    sizes = {}
    for part in filter(None, text.split(",")):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not number.isdecimal():
            wanted = ",".join(f"{each.name}=N" for each in call.dimensions)
            raise UsageError(f"--size {text}: {part!r} is not DIMENSION=NUMBER", hint=f"Write --size {wanted}.")
        sizes[name] = int(number)
    return checked_sizes("the package", {each.name: (each.min, each.max) for each in call.dimensions}, sizes)
