"""Checks that an output is the gradient that the package says it is: of the package, and of eager in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UnsetType
from msgspec.structs import replace

from exportkit.package.manifest import Call, Case, GradientOf, Manifest, PackagedMethod
from exportkit.sizes import case_sizes
from exportkit.verify.comparisons import GradientFinding
from exportkit.verify.outcomes import GradientsHold, Verdict, WrongGradient
from exportkit.verify.replayer import ReplayedTarget, ReplayEndedError, ReplayTask
from exportkit.verify.report import Check

if TYPE_CHECKING:
    import torch

_CASES = 2  # of each method
_DOING = "comparing gradients with differences at"

CallAll = Callable[[Sequence[Sequence["torch.Tensor"]]], Sequence[Sequence["torch.Tensor"]]]


def declared_gradients(call: Call) -> dict[str, GradientOf]:
    """Returns what the outputs of a call are the gradients of, by the output's name."""
    found = {output.name: output.tolerance.gradient_of for output in call.outputs}
    return {name: of for name, of in found.items() if not isinstance(of, UnsetType)}


@dataclass(frozen=True)
class GradientChecks:
    """Holds the gradients of a loaded target to differences of its outputs."""

    target: ReplayedTarget

    def checks(self, tasks: Iterable[ReplayTask]) -> Iterator[Check]:
        """Yields a check for each of the first cases of a method that has gradients."""
        seen: dict[str, int] = {}
        for task in tasks:
            method = self.target.manifest.method(task.case.calls[0].method)
            seen[method.name] = seen.get(method.name, 0) + 1
            if seen[method.name] > _CASES:
                continue
            self.target.progress(f"{_DOING} {task.label} of {self.target.name}")
            yield self._check(task, method)

    def _check(self, task: ReplayTask, method: PackagedMethod) -> Check:
        from safetensors.torch import load_file

        tensors = load_file(task.file)
        inputs = [tensors[f"0.input.{i}"] for i in range(len(method.call.inputs))]

        def answers(places: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
            return self._answers(task, places, len(method.call.outputs))

        verdict: Verdict
        try:
            verdict = verdict_of(gradient_findings(method.call, inputs, answers, seed=self.target.options.seed), "")
        except ReplayEndedError as ended:
            verdict = ended.verdict
        return Check("gradients", task.label, case_sizes(task.case), verdict, target=self.target.name)

    def _answers(
        self, task: ReplayTask, places: Sequence[Sequence[torch.Tensor]], outputs: int
    ) -> list[list[torch.Tensor]]:
        """Calls the package with each of several inputs."""
        from safetensors.torch import save_file

        file = self.target.folder / "gradients.safetensors"
        save_file({f"{n}.input.{i}": t.clone() for n, each in enumerate(places) for i, t in enumerate(each)}, file)
        case = replace(task.case, calls=task.case.calls[:1] * len(places))
        with self.target.replayer(ReplayTask(task.label, case, file), doing=_DOING) as replayer:
            replayer.run()
        file.unlink()
        return [[replayer.tensors[f"{n}.output.{i}"] for i in range(outputs)] for n in range(len(places))]


def cases_with_gradients(manifest: Manifest, method: str | None = None) -> list[int]:
    """Returns the numbers of the recorded cases that call a method that has gradients, or this one."""
    found = [number for number, case in enumerate(manifest.cases) if _has_gradients(manifest, case)]
    return [number for number in found if method in (None, manifest.cases[number].calls[0].method)]


def _has_gradients(manifest: Manifest, case: Case) -> bool:
    return bool(len(case.calls) == 1 and declared_gradients(manifest.method(case.calls[0].method).call))


def verdict_of(findings: Sequence[GradientFinding], who: str) -> Verdict:
    """Returns the verdict on the gradients of one call. `who` they are of, if not of the package: "eager"."""
    if wrong := tuple(each for each in findings if each.wrong):
        return WrongGradient(wrong, who)
    return GradientsHold(tuple(findings), who)


def gradient_findings(
    call: Call,
    inputs: Sequence[torch.Tensor],
    answers: CallAll,
    *,
    seed: int,
    precision: float | None = None,
) -> list[GradientFinding]:
    """Compares each declared gradient of a call with differences of what it is the gradient of.

    `precision` is the epsilon of the least precise dtype that is computed in; by default that of inputs and outputs.
    """
    import torch

    from exportkit.verify.gradient_paths import held_along_paths

    names = [output.name for output in call.outputs]
    found = []
    for name, of in declared_gradients(call).items():
        place = next(i for i, each in enumerate(call.inputs) if each.name == of.input)
        dtypes = {
            call.inputs[place].dtype,
            call.outputs[names.index(name)].dtype,
            call.outputs[names.index(of.output)].dtype,
        }
        coarsest = max(torch.finfo(getattr(torch, dtype)).eps for dtype in dtypes)

        def evaluate(
            starts: Sequence[torch.Tensor], place: int = place, of: GradientOf = of, name: str = name
        ) -> list[tuple[float, torch.Tensor]]:
            device = inputs[place].device
            calls = [[*inputs[:place], start.to(device), *inputs[place + 1 :]] for start in starts]
            return [
                (
                    float(outputs[names.index(of.output)].double().sum()),
                    outputs[names.index(name)].detach().double().cpu() / of.scale,
                )
                for outputs in answers(calls)
            ]

        start = inputs[place].detach().cpu()
        along = held_along_paths(evaluate, start, seed=seed, precision=coarsest if precision is None else precision)
        found.append(GradientFinding(**vars(along), output=name, of=of.output, input=of.input, scale=of.scale))
    return found
