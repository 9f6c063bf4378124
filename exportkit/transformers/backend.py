"""exportkit as a backend of `transformers.exporters`, of transformers 5.24."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.exporters import (
    ExportConfigMixin,
    ExportedComponent,
    ExportedModel,
    ExportMetadata,
    HfExporter,
    ModelRunner,
    register_backend,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from exportkit.errors import UsageError, WrongResultError
from exportkit.export.artifact import export_aoti
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.packaging import PackOptions, build_package
from exportkit.runtime.loader import load
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.spec import ExportSpec
from exportkit.transformers.language_model import spec
from exportkit.transformers.session_model import text_config
from exportkit.verify.options import VerifyOptions

FORMAT = "exportkit"
_CACHE = 4096  # tokens of a cache by default, where the model has so many positions


@dataclass
class ExportkitConfig(ExportConfigMixin):
    """How to export.

    Attributes:
        export_format: "exportkit".
        cache_length: For generation: how many tokens, prompt and answer, a row can have. Default: the model's
            positions, at most 4096.
        prompt: For generation: how many tokens one call can add. Default: 512, or the cache's length.
        batch: For generation: how many rows a session can have.
        dynamic_shapes: For `export`: the sizes that vary, such as {"input_ids": {0: "batch[1:8]", 1: "length[2:64]"}}.
        inductor: Options of torch._inductor.config.
        verify: Whether the package replays recorded calls in a fresh process, and is compared with them.
    """

    export_format: str = FORMAT
    cache_length: int | None = None
    prompt: int | None = None
    batch: int = 8
    dynamic_shapes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=dict)
    verify: bool = True


class WrittenPackage:
    """A package that an exporter has written. It is removed when nothing refers to it any more.

    Attributes:
        path: The file.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="exportkit-")
        self.path = Path(self._folder.name) / "model.pt2"


class ExportkitExporter(HfExporter):
    """Makes packages: compiled, with their operators, and verified."""

    export_format = FORMAT
    config_class = ExportkitConfig
    program_suffix = ".pt2"
    requires_trust_remote_code = True  # a package has machine code
    required_packages: ClassVar[list[str]] = ["torch"]

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: ExportkitConfig
    ) -> tuple[WrittenPackage, ExportMetadata]:
        """Exports one call of a model without a cache.

        Args:
            model: The model.
            sample_inputs: The arguments of `forward`, as tensors.
            config: How to export it.
        """
        inputs = {name: value for name, value in sample_inputs.items() if isinstance(value, torch.Tensor)}
        if left := sorted(name for name, value in sample_inputs.items() if name not in inputs and value is not None):
            said = f"the inputs {', '.join(left)} are no tensors"
            raise UsageError(said, hint="Leave them out; a cache belongs to export_for_generation.")
        one = ExportSpec(model=model, example_kwargs=inputs, dynamic_shapes=config.dynamic_shapes)
        with _without_cache(model):
            return _packaged(one, model, config), _metadata(model, inputs)

    def export_for_generation(
        self,
        model: Any,
        sample_inputs: MutableMapping[str, Any],
        config: ExportkitConfig | dict[str, Any],
        *,
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
    ) -> ExportedModel:
        """Exports a language model as one package with `prefill` and `decode`, which share weights and cache.

        Args:
            model: The model.
            sample_inputs: What `generate` takes. Only `input_ids` and `attention_mask` may be there; their sizes do not
                limit the package's.
            config: How to export it.
            generation_config: Goes with the package; `max_cache_len` is its cache's length, if `config` has none.
            multi_token_decode: Makes no difference: `prefill` continues a row that has tokens.
        """
        if isinstance(config, dict):
            config = ExportkitConfig(**config)
        if left := sorted(set(sample_inputs) - {"input_ids", "attention_mask"}):
            raise UsageError(
                f"{type(model).__name__} is to generate from {', '.join(left)}",
                hint="A model that generates from tokens is supported. Export the encoders of other inputs one by one.",
            )
        length = config.cache_length or getattr(generation_config, "max_cache_len", None)
        length = length or min(_CACHE, getattr(text_config(model), "max_position_embeddings", _CACHE))
        prompt = config.prompt or min(512, length)
        made = spec(model, cache_length=length, prompt=prompt, batch=config.batch)
        component = ExportedComponent(_packaged(made, model, config), _metadata(model, sample_inputs))
        return ExportedModel({"model": component}, FORMAT, config=model.config, generation_config=generation_config)

    @classmethod
    def save_program(cls, program: WrittenPackage, path: str | Path) -> None:
        """Copies the package."""
        shutil.copyfile(program.path, path)

    @classmethod
    def load_program(cls, path: str | Path) -> Path:
        """Returns the package's path; the runner loads it."""
        return Path(path)


class ExportkitRunner(ModelRunner):
    """Runs a package.

    Attributes:
        model: The loaded package: `runner.session(batch=2)` and what docs/state.md says.
    """

    def __init__(self, model: Model, metadata: ExportMetadata) -> None:
        self.metadata = metadata
        self.model = model

    @classmethod
    def from_program(
        cls, program: WrittenPackage | Path, metadata: ExportMetadata, device: Any = None
    ) -> ExportkitRunner:
        """Loads a package, on the best target's device by default."""
        path = program.path if isinstance(program, WrittenPackage) else program
        return cls(load(path, device="auto" if device is None else str(device)), metadata)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self.model.device)

    def session(self, batch: int = 1) -> Session:
        """Returns a session with this many rows."""
        return self.model.session(batch=batch)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        """Answers one call. A package for generation answers with the logits after each row's last token.

        Args:
            share_inputs: Makes no difference: inputs are read in place.
            share_outputs: Makes no difference: outputs are the caller's.
            kwargs: The inputs, by name.
        """
        if "prefill" not in self.model.methods:
            answer = self.model(**kwargs)
            return ModelOutput(answer) if isinstance(answer, Mapping) else answer
        tokens = kwargs["input_ids"]
        mask = kwargs.get("attention_mask")
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        order = torch.argsort(~real, dim=1, stable=True)  # each row's tokens first, wherever the padding is
        with self.session(batch=len(tokens)) as session:
            logits = session.prefill(tokens.gather(1, order), real.sum(1))
        return CausalLMOutput(logits=logits[:, None])


def _packaged(spec: ExportSpec, model: Any, config: ExportkitConfig) -> WrittenPackage:
    """Exports, packs and verifies."""
    file = WrittenPackage()
    artifact = file.path.with_name("artifact.pt2")
    device = "cuda" if next(model.parameters()).device.type == "cuda" else "cpu"
    export_aoti(spec, artifact, TraceOptions(device=device), CompileOptions(inductor_config=dict(config.inductor)))
    options = PackOptions(VerifyOptions(against="cases"), verify=config.verify)
    _, report = build_package([artifact], file.path, options)
    if report is not None and report.wrong:
        raise WrongResultError(
            "the package does not answer what was recorded",
            hint="`exportkit export` and `exportkit package` of the same model say what differs.",
        )
    artifact.unlink()
    return file


def _metadata(model: Any, inputs: Mapping[str, Any]) -> ExportMetadata:
    from exportkit import __version__

    return ExportMetadata(
        architecture=type(model).__name__,
        packages={"exportkit": __version__, "torch": torch.__version__},
        export_dtype=str(model.dtype).removeprefix("torch."),
        export_device=str(model.device),
        kwargs={name: {"rank": value.dim(), "shape": list(value.shape)} for name, value in inputs.items()},
    )


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    before = getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    try:
        yield
    finally:
        model.config.use_cache = before


register_backend(ExportkitExporter, ExportkitRunner)
