"""Calls one target and compares its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from exportkit.errors import CaseError
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import Node
from exportkit.progress import Progress
from exportkit.sizes import SizePlan, label_of
from exportkit.verify.commands import InputsDrawn, ModelCalled
from exportkit.verify.eager import EagerProcess
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import EagerUnavailable, LoadFailed, Verdict, WrongStructure
from exportkit.verify.replay import ReplayProcess
from exportkit.verify.report import Check


@dataclass(frozen=True)
class TargetCalls:
    """The calls of a loaded target.

    Attributes:
        target: The target's name.
        replay: The process that runs the target.
        reader: The artifact.
        options: The verification's options.
        folder: A private directory for tensors.
        progress: Called with each step before it starts.
    """

    target: str
    replay: ReplayProcess
    reader: PackageReader
    options: VerifyOptions
    folder: Path
    progress: Progress

    def with_cases(self) -> Iterator[Check]:
        """Compares with each recorded case."""
        from exportkit.runtime.case_tensors import read_case

        for index, case in enumerate(self.reader.manifest.cases):
            label = f"case {index} ({label_of(case.sizes)})"
            doing = f"running {label} of {self.target}"
            self.progress(doing)
            try:
                read_case(self.reader, case)
            except CaseError as error:
                failed = LoadFailed.of(error)
                yield Check("cases", label, case.sizes, failed, target=self.target)
                continue
            file = self.folder / f"case-{index}.safetensors"
            self.reader.extract(case.record, file)
            yield self._call("cases", label, case.sizes, inputs=file, expected=file, doing=doing)
            file.unlink()

    def with_eager(self, eager: EagerProcess, plan: SizePlan) -> Iterator[Check]:
        """Compares with the eager model at each planned size."""
        if not plan.sizes:
            nothing = EagerUnavailable("; ".join(plan.skipped), eager.required)
            yield Check("eager", "the sizes", {}, nothing, target=self.target)
            return
        if not eager.alive and eager.model is not None:
            self.progress(f"making the eager model {eager.model}")
        if (objection := eager.make()) is not None:
            yield Check("eager", "the eager model", {}, objection, target=self.target)
            return
        inputs, expected = self.folder / "eager-inputs.safetensors", self.folder / "eager-outputs.safetensors"
        for number, sizes in enumerate(plan.sizes):
            label = label_of(sizes)
            self.progress(f"comparing {self.target} with eager at {label}")
            answer = eager.draw(sizes, label=label, seed=self.options.seed + number, inputs=inputs, outputs=expected)
            if not isinstance(answer, InputsDrawn):
                yield Check("eager", label, dict(sizes), answer, target=self.target)
            elif (wrong := self._compare_structure(answer.structure)) is not None:
                yield Check("eager", label, dict(sizes), wrong, target=self.target)
            else:
                doing = f"running {self.target} at {label}"
                yield self._call("eager", label, sizes, inputs=inputs, expected=expected, doing=doing)
            if not eager.alive:
                return

    def _call(
        self,
        against: Literal["cases", "eager"],
        label: str,
        sizes: Mapping[str, int],
        *,
        inputs: Path,
        expected: Path,
        doing: str,
    ) -> Check:
        outputs = self.folder / "outputs.safetensors"
        answer = self.replay.call(inputs, outputs, doing=doing)
        if not isinstance(answer, ModelCalled):
            return Check(against, label, dict(sizes), answer, target=self.target)
        verdict = self._judge(answer.structure, expected, outputs, sizes, fresh=against == "eager")
        outputs.unlink()
        return Check(against, label, dict(sizes), verdict, answer.seconds, self.target)

    def _judge(
        self, structure: str, expected: Path, outputs: Path, sizes: Mapping[str, int], *, fresh: bool
    ) -> Verdict:
        from safetensors.torch import load_file

        from exportkit.package.case_files import recorded_errors, references_in
        from exportkit.verify.compare import Reference, compare_outputs

        if (wrong := self._compare_structure(structure)) is not None:
            return wrong
        manifest = self.reader.manifest
        described = manifest.call.outputs
        want, got = load_file(expected), load_file(outputs)
        names = [f"output.{i}" for i in range(len(described))]
        return compare_outputs(
            described,
            [want[name] for name in names],
            [got[name] for name in names],
            reference=Reference(references_in(described, want), recorded_errors(manifest.cases), fresh),
            sizes=sizes,
            rtol=self.options.rtol,
            atol=self.options.atol,
        )

    def _compare_structure(self, structure: str) -> WrongStructure | None:
        expected = self.reader.manifest.call.result
        if msgspec.json.decode(structure, type=Node) == expected:
            return None
        return WrongStructure(msgspec.json.encode(expected).decode(), structure)
