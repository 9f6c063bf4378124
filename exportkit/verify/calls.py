"""Makes calls of one target and compares what it answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from exportkit.errors import CaseError
from exportkit.package.archive import PackageReader
from exportkit.package.case_files import OUT_OF_RANGE, edge_case_in, moves_of
from exportkit.sizes import case_label, case_sizes, has_state, label_of
from exportkit.verify.commands import CallsDrawn, CompareGradients, DrawCalls, GradientsCompared
from exportkit.verify.eager import EagerProcess
from exportkit.verify.eager_plan import EagerPlan
from exportkit.verify.filled_memory import CONTENTS
from exportkit.verify.gradient_checks import GradientChecks, cases_with_gradients, declared_gradients, verdict_of
from exportkit.verify.layouts import MAX_LAID_OUT, Layouts, label_of_layouts, layouts_of
from exportkit.verify.outcomes import (
    CallFailed,
    EagerUnavailable,
    LoadFailed,
    Match,
    Mismatch,
    NotRefused,
    RefusedToo,
    Verdict,
)
from exportkit.verify.replayer import ReplayedTarget, ReplayEndedError, ReplayTask
from exportkit.verify.report import Check
from exportkit.verify.session_checks import SessionChecks


@dataclass(frozen=True)
class TargetCalls:
    """The calls of a loaded target.

    Attributes:
        target: The target.
        reader: The artifact.
        compiled: Whether the target is compiled code.
    """

    target: ReplayedTarget
    reader: PackageReader
    compiled: bool

    def with_cases(self) -> Iterator[Check]:
        """Compares with each recorded case, in a session of its own if the case has state."""
        from exportkit.runtime.loaded_cases import read_case

        manifest, laid_out = self.reader.manifest, 0
        for index in self.target.options.cases or range(len(manifest.cases)):
            case = manifest.cases[index]
            edge_case = edge_case_in(self.reader, case)
            label = f"case {index} ({case_label(case, edge_case)})"
            self.target.progress(f"running {label} of {self.target.name}")
            try:
                read_case(self.reader, case)
            except CaseError as error:
                failed = LoadFailed.of(error)
                yield Check("cases", label, case_sizes(case), failed, target=self.target.name)
                continue
            task = self._task(index, label)
            check = self._replayed("cases", task)
            if edge_case:
                check = replace(check, calls=0, edge_cases=check.calls)
            layouts = layouts_of(manifest, case, index, edge_case, compiled=self.compiled)
            if layouts and laid_out < MAX_LAID_OUT and not manifest.onnx and isinstance(check.verdict, Match):
                laid_out += 1
                check = self._laid_out(check, task, layouts)
            yield check
            task.file.unlink()

    def _laid_out(self, plain: Check, task: ReplayTask, layouts: Layouts) -> Check:
        """Makes the calls of a case again, with inputs in other layouts. Returns one check of both.

        A program is eager's code: a layout that it refuses is one that the model does not take.
        """
        named = f"{task.label[:-1]}; {label_of_layouts(self.reader.manifest, layouts)})"
        check = self._replayed("cases", replace(task, label=named, layouts=layouts))
        if isinstance(check.verdict, CallFailed) and not self.compiled:
            return plain
        if check.failed:
            return check
        return replace(plain, layouts=check.calls)

    def with_sessions(self) -> Iterator[Check]:
        """Compares sessions with one another. The two first recorded cases that have state say what is called."""
        manifest = self.reader.manifest
        found = [index for index, case in enumerate(manifest.cases) if has_state(manifest, case)][:2]
        if not found:
            return
        tasks = [self._task(index, f"case {index}") for index in found]
        yield from SessionChecks(self.target, tasks[0], tasks[-1]).checks()
        for task in tasks:
            task.file.unlink()

    def with_gradients(self) -> Iterator[Check]:
        """Holds outputs that are gradients to differences, at recorded cases."""
        manifest = self.reader.manifest
        # Between two values that tie, or at an infinity, there is no gradient to hold them to.
        smooth = [n for n in cases_with_gradients(manifest) if not edge_case_in(self.reader, manifest.cases[n])]
        tasks = [self._task(index, f"case {index}") for index in smooth]
        yield from GradientChecks(self.target).checks(tasks)
        for task in tasks:
            task.file.unlink()

    def with_eager(self, eager: EagerProcess, plans: Sequence[EagerPlan]) -> Iterator[Check]:
        """Compares with the eager model: a sequence of calls, or a call, at each planned size."""
        for plan in plans:
            if not plan.sizes.sizes:
                nothing = EagerUnavailable("; ".join(plan.sizes.skipped), eager.required)
                yield Check("eager", plan.labelled("the sizes"), {}, nothing, target=self.target.name)
        if not any(plan.sizes.sizes for plan in plans):
            return
        if not eager.made and eager.model is not None:
            self.target.progress(f"making the eager model {eager.model}")
        if (objection := eager.make()) is not None:
            yield Check("eager", "the eager model", {}, objection, target=self.target.name)
            return
        for plan in plans:
            yield from self._beside_eager(eager, plan)
            if not eager.alive:
                return
            yield from self._refusals_beside_eager(eager, plan)
            if not eager.alive:
                return
            if plan.method and plan.sizes.sizes and declared_gradients(self.reader.manifest.method(plan.method).call):
                yield from self._gradients_of_eager(eager, plan)

    def _gradients_of_eager(self, eager: EagerProcess, plan: EagerPlan) -> Iterator[Check]:
        """Holds the gradients of eager to differences: an operator with a wrong one misleads both.

        At the last of the planned sizes, and where these show nothing, such as those of a single atom, at a case's.
        """
        assert plan.method is not None
        manifest = self.reader.manifest
        recorded = [case_sizes(manifest.cases[n]) for n in cases_with_gradients(manifest, plan.method)[:1]]
        check = None
        for sizes in (plan.sizes.sizes[-1], *recorded):
            label = f"{plan.label(sizes)}, eager in a wider dtype"
            self.target.progress(f"comparing gradients of eager with differences at {plan.label(sizes)}")
            command = CompareGradients(plan.method, dict(sizes), self.target.options.seed)
            answer = eager.gradients(command, label=label)
            if not isinstance(answer, GradientsCompared):
                check = Check("gradients", label, dict(sizes), answer, target=self.target.name)
                break
            if answer.findings:
                verdict = verdict_of(answer.findings, "eager")
                check = Check("gradients", label, dict(sizes), verdict, target=self.target.name)
            if not any(finding.blind for finding in answer.findings):
                break
        if check is not None:
            yield check

    def _refusals_beside_eager(self, eager: EagerProcess, plan: EagerPlan) -> Iterator[Check]:
        """Gives integers that are out of range as an index. Where eager refuses them, the target must.

        On a GPU, eager would lose its process to them.
        """
        manifest = self.reader.manifest
        on_cpu = any(each.name == self.target.name and each.device == "cpu" for each in manifest.targets)
        if plan.method is None or not plan.sizes.sizes or not on_cpu:
            return
        indices = [each.name for each in manifest.method(plan.method).call.inputs if each.dtype in ("int32", "int64")]
        sizes, file = plan.sizes.sizes[0], self._eager_file(0)
        for name, kind in itertools.product(indices, OUT_OF_RANGE):
            label = plan.labelled(f"{label_of(sizes)}; a value {kind} in {name}".removeprefix("; "))
            self.target.progress(f"comparing {self.target.name} with eager at {label}")
            answer = eager.draw(
                DrawCalls(plan.method, dict(sizes), self.target.options.seed, str(file), {name: kind}), label=label
            )
            if not isinstance(answer, CallsDrawn):
                yield Check("eager", label, dict(sizes), answer, target=self.target.name)
                return
            if answer.refused:
                verdict = self._refusal(ReplayTask(label, answer.case, file))
                yield Check("eager", label, dict(sizes), verdict, target=self.target.name)

    def _refusal(self, task: ReplayTask) -> Verdict:
        try:
            with self.target.replayer(task) as replayer:
                replayer.run()
        except ReplayEndedError as ended:
            refused = isinstance(ended.verdict, CallFailed) and ended.verdict.error in (
                "RefusedValueError",
                "ModelRunError",
            )
            return RefusedToo() if refused else ended.verdict
        return NotRefused()

    def _beside_eager(self, eager: EagerProcess, plan: EagerPlan) -> Iterator[Check]:
        """Compares at each planned size. Eager makes the next calls while the target makes these."""
        commands = [
            DrawCalls(plan.method, dict(sizes), self.target.options.seed + number, str(self._eager_file(number)), {})
            for number, sizes in enumerate(plan.sizes.sizes)
        ]
        for command, then in zip(commands, [*commands[1:], None]):
            label = plan.label(command.sizes)
            self.target.progress(f"comparing {self.target.name} with eager at {label}")
            answer = eager.draw(command, label=label, then=then)
            yield self._drawn(answer, label, command)
            if not isinstance(answer, CallsDrawn) and not eager.alive:
                return

    def _eager_file(self, number: int) -> Path:
        """Returns where eager writes calls: not where those are that the target makes meanwhile."""
        return self.target.folder / f"eager-{number % 2}.safetensors"

    def _drawn(self, answer: CallsDrawn | Verdict, label: str, command: DrawCalls) -> Check:
        """Makes the calls that eager has answered in a file, and judges the answers."""
        from exportkit.verify.judging import Judge

        sizes, file = command.sizes, Path(command.file)
        if not isinstance(answer, CallsDrawn):
            return Check("eager", label, dict(sizes), answer, target=self.target.name)
        task = ReplayTask(label, answer.case, file, moves=moves_of(file.read_bytes()))
        judge = Judge(self.reader.manifest, self.target.options, fresh=True)
        for call, structure in enumerate(answer.structures):
            if (wrong := judge.structure(task, call, structure)) is not None:
                return Check("eager", label, dict(sizes), wrong, target=self.target.name)
        check = self._replayed("eager", task)
        file.unlink()
        return check

    def _replayed(self, against: Literal["cases", "eager"], task: ReplayTask) -> Check:
        """Makes the calls of a task in memory of each content, and judges the answers."""
        for content in CONTENTS:
            check = self._replayed_in(replace(task, memory=content), against)
            if check.wrong:
                break
        if isinstance(check.verdict, Mismatch) and not self._replayed_in(task, against).failed:
            return replace(check, verdict=replace(check.verdict, memory=content))
        return check

    def _replayed_in(self, task: ReplayTask, against: Literal["cases", "eager"]) -> Check:
        from safetensors.torch import load_file

        from exportkit.verify.judging import Judge

        sizes = case_sizes(task.case)
        seconds: float | None = None
        verdict: Verdict
        try:
            with self.target.replayer(task) as replayer:
                replayer.run()
                seconds = replayer.seconds
                expected = load_file(task.file)
                if any(key.startswith("state.") for key in expected):
                    replayer.read_state()
            judge = Judge(self.reader.manifest, self.target.options, fresh=against == "eager")
            verdict = judge.verdict(task, expected, replayer.tensors, replayer.structures)
        except ReplayEndedError as ended:
            verdict = ended.verdict
        calls = 0 if seconds is None else len(task.case.calls)
        return Check(against, task.label, sizes, verdict, seconds, self.target.name, calls)

    def _task(self, index: int, label: str) -> ReplayTask:
        case, file = self.reader.manifest.cases[index], self.target.folder / f"case-{index}.safetensors"
        self.reader.extract(case.record, file)
        return ReplayTask(label, case, file, moves=moves_of(file.read_bytes()))
