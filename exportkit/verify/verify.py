"""Verifies an artifact: in a process that has nothing else, against its recorded cases and against the eager model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from exportkit.errors import ExportkitError, PolicyError, SignatureError, SignatureMissingError, UsageError
from exportkit.libraries import built_in_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import temporary_folder
from exportkit.package.libraries import describe_library
from exportkit.package.manifest import Call, Manifest, Node
from exportkit.package.sizes import label_of, plan_sizes, shape_at
from exportkit.package.trust import check_trust
from exportkit.verify.outcomes import (
    CallFailed,
    Check,
    Crashed,
    EagerDiffers,
    EagerFailed,
    EagerUnavailable,
    LoadFailed,
    MissingOperator,
    NotRun,
    Report,
    Signed,
    TimedOut,
    Verdict,
    WrongStructure,
)
from exportkit.verify.worker import Worker

Against = Literal["cases", "eager", "both"]

# What the replay process itself is made of: a MODEL such as torch.nn:Linear does not take it away.
_NEVER_BLOCKED = frozenset({"torch", "exportkit", "numpy", "safetensors", "msgspec", "typing_extensions"})
_LOAD_TIMEOUT = 120.0  # seconds at least: importing torch from a cold disk takes up to a minute
_MAX_DEAD = 2  # replay processes that may die before the remaining calls are given up


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify against, and how strictly.

    Attributes:
        against: Recorded cases, the eager model, or both; with "both", an eager model that cannot be made is skipped.
        shapes: How many sizes to compare with eager at.
        rtol: With `atol`, replaces the recorded tolerances of floating outputs.
        atol: See `rtol`.
        device: "auto", "cpu", "cuda" or "cuda:1".
        model: MODEL, where it is no longer what the artifact recorded.
        weights: Of the eager model, where it was exported with a weights file.
        op_libraries: Operator libraries that an artifact without libraries needs.
        seed: Of the sizes and the inputs drawn for eager.
        timeout: Seconds a call may take. Importing torch and loading get 120 at least.
        max_input_bytes: Of one call's inputs; sizes beyond it are left out, and named.
        public_keys: PEM files, of which any must have signed the artifact; what a policy asks for comes on top.
        signature: The signature file, where it is not beside the artifact under its name.
    """

    against: Against = "both"
    shapes: int = 8
    rtol: float | None = None
    atol: float | None = None
    device: str = "auto"
    model: str | None = None
    weights: Path | None = None
    op_libraries: Sequence[Path] = ()
    seed: int = 0
    timeout: float = 600.0
    max_input_bytes: int = 32 * 10**6
    public_keys: Sequence[Path] = ()
    signature: Path | None = None


def verify(
    artifact: Path, options: VerifyOptions | None = None, *, progress: Callable[[str], None] = lambda step: None
) -> Report:
    """Runs an artifact in a fresh process, and compares what it returns.

    Signatures come first, where somebody asks for them: an artifact that is not trusted is not looked into any further.

    That process imports torch and the runtime; the exporter, the operators' Python and the model's source are refused
    to it. The eager model runs in a process of its own. Whatever either does, a crash included, is a verdict.

    Args:
        artifact: A `.pt2` that exportkit wrote.
        options: See VerifyOptions.
        progress: Told what is about to be done.

    Raises:
        UsageError: The options contradict the artifact: cases are asked for, and it has none.
    """
    options = options or VerifyOptions()
    progress(f"checking {artifact.name}")
    try:
        with PackageReader(artifact) as reader, temporary_folder(None, "exportkit-verify") as folder:
            keys = check_trust(reader, options.public_keys or None, options.signature)
            signed = [Check("package", "signature", {}, Signed(tuple(key.id for key in keys)))] if keys else []
            reader.verify()
            if options.against == "cases" and not reader.manifest.cases:
                raise UsageError(
                    f"{artifact.name} has no recorded cases", hint="Export with --cases N, or use --against eager."
                )
            libraries = _needed_libraries(reader.manifest, options)
            if isinstance(libraries, MissingOperator):
                missing = Check("package", "operators", {}, libraries)
                return Report(str(artifact), None, None, None, None, (*signed, missing))
            run = _Verification(artifact, reader, options, folder, libraries, progress, checks=signed)
            with run:
                return run.report()
    except UsageError:
        raise
    except ExportkitError as error:
        failed = LoadFailed(type(error).__name__, str(error), error.exit_code)
        label = "signature" if isinstance(error, (SignatureMissingError, SignatureError, PolicyError)) else "load"
        return Report(str(artifact), None, None, None, None, (Check("package", label, {}, failed),))


def _needed_libraries(manifest: Manifest, options: VerifyOptions) -> dict[Path, list[str]] | MissingOperator:
    """The libraries that the replay process must load first, because the artifact does not bring them.

    Each with the operator namespaces it defines.
    """
    brought = {operator.name for library in manifest.libraries for operator in library.defines}
    missing = [operator.name for operator in manifest.operators if operator.name not in brought]
    if not missing:
        return {}
    libraries = [Path(library).resolve() for library in options.op_libraries]
    if any(name.startswith("arr_coc::") for name in missing):
        devices = {target.device for target in manifest.targets} if options.device != "cpu" else set()
        libraries += [path for device, path in built_in_libraries().items() if device == "cpu" or device in devices]
    given = {library: [operator.name for operator in describe_library(library).defines] for library in libraries}
    for name in missing:
        if not any(name in names for names in given.values()):
            advice = "name one with --op-library, or `exportkit package` the artifact with it"
            return MissingOperator(name, f"the artifact brings no library that defines it; {advice}")
    return {library: sorted({name.partition("::")[0] for name in names}) for library, names in given.items()}


@dataclass
class _Verification:
    """One run. The replay process starts with the first call, and again after it died."""

    artifact: Path
    reader: PackageReader
    options: VerifyOptions
    folder: Path
    libraries: Mapping[Path, Sequence[str]]
    progress: Callable[[str], None]
    replay: Worker | None = None
    loaded: dict[str, Any] = field(default_factory=dict)
    dead: int = 0
    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __enter__(self) -> _Verification:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.replay is not None:
            self.replay.close()

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    def report(self) -> Report:
        self.progress("loading in a fresh process")
        if (verdict := self._start()) is not None:
            self.checks.append(Check("package", "load", {}, verdict))
        else:
            if self.options.against != "eager":
                self._check_cases()
            if self.options.against != "cases":
                self._check_eager()
            others = (target.name for target in self.manifest.targets if target.name != self.loaded["target"])
            self.skipped += [f"target {name}: another one was run here; --device chooses" for name in others]
        loaded = self.loaded
        return Report(
            artifact=str(self.artifact),
            target=loaded.get("target"),
            device=loaded.get("device"),
            torch=loaded.get("torch"),
            load_seconds=loaded.get("seconds"),
            checks=tuple(self.checks),
            skipped=tuple(self.skipped),
        )

    # --- the packaged model -------------------------------------------------------------------------------------------

    def _start(self) -> Verdict | None:
        """Starts a replay process and loads the artifact; what went wrong, if something did."""
        self.replay = Worker("exportkit.verify.child", folder=self.folder, cwd=self.folder)
        command = {
            "do": "load",
            "artifact": str(self.artifact.absolute()),  # a link's own name, beside which its signature may be
            "program": not self.manifest.targets,
            "tf32": self.manifest.provenance.tf32,
            "device": self.options.device,
            "libraries": [[str(library), namespaces] for library, namespaces in self.libraries.items()],
            "public_keys": [str(key.absolute()) for key in self.options.public_keys] or None,
            "signature": str(self.options.signature.absolute()) if self.options.signature else None,
            "blocked": _blocked(self.options.model or self.manifest.source.model),
        }
        timeout = max(self.options.timeout, _LOAD_TIMEOUT)
        answer = self.replay.ask(command, doing="loading the artifact", timeout=timeout)
        if isinstance(answer, (Crashed, TimedOut)):
            return answer
        if "error" in answer:
            return _load_failure(answer)
        self.loaded = answer
        return None

    def _check_cases(self) -> None:
        for index, case in enumerate(self.manifest.cases):
            label = f"case {index} ({label_of(case.sizes)})"
            self.progress(f"running {label}")
            file = self.folder / f"case-{index}.safetensors"
            self.reader.extract(case.record, file)
            self._check("cases", label, case.sizes, inputs=file, expected=file, doing=f"running {label}")
            file.unlink()

    def _check(
        self,
        against: Literal["cases", "eager"],
        label: str,
        sizes: Mapping[str, int],
        *,
        inputs: Path,
        expected: Path,
        doing: str,
    ) -> None:
        """One call of the packaged model."""
        seconds = None
        verdict: Verdict | None = None
        if self.replay is None or not self.replay.alive:
            verdict = self._restart()
        if verdict is None:
            assert self.replay is not None
            outputs = self.folder / "outputs.safetensors"
            command = {"do": "run", "inputs": str(inputs), "outputs": str(outputs)}
            answer = self.replay.ask(command, doing=doing, timeout=self.options.timeout)
            if isinstance(answer, (Crashed, TimedOut)):
                self.dead += 1
                verdict = answer
            elif "error" in answer:
                # Some operators' messages reach stderr only: torch's C interface drops them.
                verdict = CallFailed(
                    answer["error"], "\n".join(filter(None, [answer["detail"], self.replay.printed()]))
                )
            else:
                seconds = answer["seconds"]
                verdict = self._judge(answer["structure"], expected, outputs)
                outputs.unlink()
        self.checks.append(Check(against, label, dict(sizes), verdict, seconds))

    def _restart(self) -> Verdict | None:
        if self.dead >= _MAX_DEAD:
            return NotRun(f"{self.dead} processes died in earlier calls")
        return self._start()

    def _judge(self, structure: str, expected: Path, outputs: Path) -> Verdict:
        from safetensors.torch import load_file

        from exportkit.verify.compare import compare_outputs

        call = self.manifest.call
        if (wrong := _compare_structure(call.result, structure)) is not None:
            return wrong
        want, got = load_file(expected), load_file(outputs)
        names = [f"output.{i}" for i in range(len(call.outputs))]
        return compare_outputs(
            call.outputs,
            [want[name] for name in names],
            [got[name] for name in names],
            rtol=self.options.rtol,
            atol=self.options.atol,
        )

    # --- against the eager model --------------------------------------------------------------------------------------

    def _check_eager(self) -> None:
        model = self.options.model or self.manifest.source.model
        plan = plan_sizes(
            self.manifest.call, self.options.shapes, seed=self.options.seed, max_bytes=self.options.max_input_bytes
        )
        self.skipped += plan.skipped
        if model is None:
            reason = "the artifact was exported from an object, not from a MODEL that can be imported; name it: --model"
            self._no_eager(EagerUnavailable(reason, self._eager_required))
            return
        self.progress(f"making the eager model {model}")
        with Worker("exportkit.verify.eager_child", folder=self.folder, cwd=Path.cwd()) as eager:
            if (verdict := self._resolve(eager, model)) is not None:
                self._no_eager(verdict)
                return
            for number, sizes in enumerate(plan.sizes):
                self._compare_with_eager(eager, number, sizes)
                if not eager.alive:
                    break

    @property
    def _eager_required(self) -> bool:
        """Where nothing else was compared, a verification that skips eager would have verified nothing."""
        return self.options.against == "eager" or not self.manifest.cases

    def _no_eager(self, verdict: Verdict) -> None:
        self.checks.append(Check("eager", "the eager model", {}, verdict))

    def _resolve(self, eager: Worker, model: str) -> Verdict | None:
        source = self.manifest.source
        command = {
            "do": "resolve",
            "model": model,
            "model_kwargs": source.model_kwargs,
            "dtype": source.dtype,
            "inputs": input_texts(self.manifest.call),
            "seed": source.seed,
            "weights": str(self.options.weights.resolve()) if self.options.weights else None,
            "libraries": [str(Path(library).resolve()) for library in self.options.op_libraries],
            "artifact": str(self.artifact.absolute()),  # a link's own name, beside which its signature may be
            "device": self.loaded["device"],
        }
        timeout = max(self.options.timeout, _LOAD_TIMEOUT)
        answer = eager.ask(command, doing=f"making the eager model {model}", timeout=timeout)
        if isinstance(answer, (Crashed, TimedOut)):
            return answer
        if "error" in answer:
            if answer["error"] == "ModelNotFoundError":
                return EagerUnavailable(answer["detail"], self._eager_required)
            return EagerFailed(answer["error"], answer["detail"], f"making {model}")
        if answer["state_sha256"] != source.state_sha256:
            return EagerDiffers(source.state_sha256, answer["state_sha256"], model)
        return None

    def _compare_with_eager(self, eager: Worker, number: int, sizes: Mapping[str, int]) -> None:
        label = label_of(sizes)
        self.progress(f"comparing with eager at {label}")
        inputs, expected = self.folder / "eager-inputs.safetensors", self.folder / "eager-outputs.safetensors"
        command = {
            "do": "run",
            "sizes": sizes,
            "seed": self.options.seed + number,
            "inputs": str(inputs),
            "outputs": str(expected),
        }
        doing = f"running the eager model at {label}, which is inside the exported range"
        answer = eager.ask(command, doing=doing, timeout=self.options.timeout)
        verdict: Verdict | None = None
        if isinstance(answer, (Crashed, TimedOut)):
            verdict = answer
        elif "error" in answer:
            verdict = EagerFailed(answer["error"], answer["detail"], doing)
        elif (wrong := _compare_structure(self.manifest.call.result, answer["structure"])) is not None:
            verdict = wrong
        if verdict is not None:
            self.checks.append(Check("eager", label, dict(sizes), verdict))
        else:
            doing = f"running the packaged model at {label}"
            self._check("eager", label, sizes, inputs=inputs, expected=expected, doing=doing)


def _blocked(model: str | None) -> list[str]:
    """The top-level package of MODEL, which the replay process must do without."""
    if model is None or ":" not in model or model.partition(":")[0].endswith(".py"):
        return []
    top = model.partition(":")[0].partition(".")[0]
    return [] if top in _NEVER_BLOCKED else [top]


def input_texts(call: Call) -> list[str]:
    """The tensors of a call as --input has them, for parameters that are one tensor each."""
    # Their values are what inputs of other sizes are drawn from, so there should be some.
    sizes = {dimension.name: min(max(dimension.min, 8), dimension.max) for dimension in call.dimensions}
    return [
        f"{tensor.name}={tensor.dtype}{shape_at(tensor, sizes)}" for tensor in call.inputs if "." not in tensor.name
    ]


def _load_failure(answer: Mapping[str, Any]) -> Verdict:
    """Why the artifact could not be loaded."""
    # What our loader says where an operator is neither in a library of the package nor registered otherwise; and torch.
    pattern = r"operator ([\w:.]+) is not loaded|Could not find schema for ([\w:.]+?)\.?(?:\s|$)"
    if missing := re.search(pattern, answer["detail"]):
        return MissingOperator(missing[1] or missing[2], answer["detail"])
    # An error that is none of exportkit's comes from torch's loader: it did not understand what it was given.
    return LoadFailed(answer["error"], answer["detail"], answer["exit_code"] or 3)


def _compare_structure(expected: Node, structure: str) -> WrongStructure | None:
    actual = msgspec.json.decode(structure, type=Node)
    if actual == expected:
        return None
    return WrongStructure(msgspec.json.encode(expected).decode(), structure)
