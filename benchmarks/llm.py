"""Language models of transformers through exportkit.transformers: the same tokens as `generate`, and how many a second.

    python -m benchmarks.llm --folder build/llm                # small models of all kinds: the whole way, on a CPU
    python -m benchmarks.llm --folder build/llm llama mixtral  # these
    python -m benchmarks.llm --folder build/llm --large bfloat16 --make     # 1.5 thousand million parameters, GPU
    python -m benchmarks.llm --folder build/llm --large bfloat16 --measure

The weights are random. Each model writes 200 tokens after three prompts of different lengths in one session, the
likeliest ones and drawn ones. transformers' `generate` writes them one prompt after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import exportkit
from exportkit import ExportSpec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "llm"))
from generate import generate, greedy, read, sampler  # noqa: E402 (its folder is put on the path first)

COUNT, PROMPTS = 200, (3, 11, 7)  # tokens that are written, and the lengths of the prompts
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
VOCABULARY, LENGTH, PROMPT = 320, 256, 32

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_EXPERTS: Mapping[str, Any] = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SPACE: Mapping[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 16}
# Name -> the class without "ForCausalLM", the configuration, and its values.
SMALL: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _SIZES),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_SIZES,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "initializer_range": 0.2,
        },
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**_SPACE, "head_dim": 16, "num_heads": 8, "n_groups": 2, "chunk_size": 16, "initializer_range": 0.2},
    ),
    # the rest: for `--all`
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_SPACE, "initializer_range": 0.5, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_SIZES, "sliding_window": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SIZES, "sliding_window": 24}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "attention_chunk_size": 32,
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", _SIZES),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {
            **_SIZES,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
SIX = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "mamba2")


def small_model(name: str) -> Any:
    """A small model of a kind."""
    import transformers

    kind, configuration, values = SMALL[name]
    return _made(getattr(transformers, kind), getattr(transformers, configuration)(**values))


def _made(kind: Any, config: Any) -> Any:
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, None)  # so that `generate` goes on
    torch.manual_seed(0)
    model = kind(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def small(name: str) -> ExportSpec:
    from exportkit.transformers import spec

    return spec(small_model(name), cache_length=LENGTH, prompt=PROMPT, name=name)


def large_model(dtype: str) -> Any:
    """A Llama of 1.5 thousand million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return _made(LlamaForCausalLM, config).to(getattr(torch, dtype))


def large(dtype: str = "bfloat16") -> ExportSpec:
    """The large model for one row. Of a size that is known, Inductor writes the products with a vector itself."""
    from exportkit.transformers import spec

    return spec(large_model(dtype), cache_length=1024, prompt=128, batch=1, name="llm")


# --- tokens -----------------------------------------------------------------------------------------------------------


def prompts(vocabulary: int, lengths: Sequence[int] = PROMPTS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def wanted(model: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    """What `generate` writes after a prompt."""
    tokens = torch.tensor([list(prompt)], device=model.device)
    options = {"do_sample": False, **options}
    written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=COUNT, **options)
    return list(written[0, len(prompt) :].tolist())


def written(session: Any, texts: Sequence[Sequence[int]], choose: Any = greedy, device: Any = "cpu") -> list[list[int]]:
    """What a session writes, a row each."""
    logits = read(session, texts, PROMPT, device)
    return torch.cat(list(islice(generate(session, logits, choose), COUNT)), dim=1).tolist()


def same_drawn(model: Any, open_session: Callable[[], Any], prompt: Sequence[int]) -> bool:
    """Whether drawn tokens of the same seed are the same."""
    session = open_session()  # which may make a model with drawn weights
    torch.manual_seed(5)
    expected = wanted(model, prompt, do_sample=True, **DRAWN)
    torch.manual_seed(5)
    return written(session, [prompt], sampler(**DRAWN), model.device)[0] == expected


# --- the small ones ---------------------------------------------------------------------------------------------------


def make(folder: Path, name: str, model: str, kwargs: Mapping[str, Any], *flags: str, verify: bool) -> Path:
    """Makes a package by the command line, unless it is there."""
    packaged, exported = folder / f"{name}.pt2", folder / f"{name}_aoti.pt2"
    if packaged.exists():
        return packaged
    folder.mkdir(parents=True, exist_ok=True)
    source = f"{ROOT / 'benchmarks' / 'llm.py'}:{model}"
    export = ["export", source, "--model-kwargs", json.dumps(kwargs), *flags, "-o", exported]
    package = ["package", exported, "-o", packaged, *([] if verify else ["--no-verify"])]
    check = [["verify", packaged, "--model", source]] if verify else []
    for command in (export, package, *check):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "exportkit", *map(str, command)], check=True, cwd=ROOT, stdout=sys.stderr)
        print(f"{command[0]} {name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    exported.unlink()
    return packaged


def small_row(name: str, folder: Path) -> list[str]:
    """Goes the whole way with a model."""
    packaged = make(folder, name, "small", {"name": name}, verify=True)
    model, texts = small_model(name), prompts(VOCABULARY)
    with torch.no_grad(), exportkit.load(packaged) as loaded:
        expected = [wanted(model, text) for text in texts]
        with loaded.session(batch=len(texts)) as session:
            found = written(session, texts)
        same = sum(one == other for one, other in zip(found, expected))
        drawn = same_drawn(model, lambda: loaded.session(batch=1), texts[0])
        seconds = [
            _seconds(lambda: wanted(model, texts[0])),
            _seconds(lambda: written(loaded.session(batch=1), texts[:1])),
        ]
    kinds = len({token for row in expected for token in row})
    speeds = [f"{COUNT / each:.0f}" for each in seconds]
    return [name, f"{same} of {len(texts)}", "yes" if drawn else "no", str(kinds), *speeds]


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# --- the large one ----------------------------------------------------------------------------------------------------


def copy_rate(gigabytes: float = 2.0) -> float:
    """Bytes that the GPU reads and writes in a second, copying."""
    source = torch.empty(int(gigabytes * 1e9) // 4, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        times.append(_seconds(lambda: (target.copy_(source), torch.cuda.synchronize())))
    return 2 * source.nbytes / min(times)


def large_rows(dtype: str, package: Path, rounds: int) -> None:
    """Prints tokens a second by all that can write them, with the limit that memory sets, and whether they agree."""
    model, text = large_model(dtype), prompts(128_256, (64,))[0]
    weights = sum(each.nbytes for each in model.parameters()) - model.get_input_embeddings().weight.nbytes
    rate = copy_rate()
    config = model.config
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 1024 * model.dtype.itemsize
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {rate / 1e12:.2f} TB/s", flush=True)
    print(f"weights that a token reads {weights / 1e9:.2f} GB, cache {cache / 1e9:.3f} GB", flush=True)
    print(f"limit: {rate / (weights + cache):.0f} tokens/s", flush=True)
    answers: dict[str, list[int]] = {}

    def row(name: str, call: Callable[[], list[int]], warm: int = 1) -> None:
        ready = _seconds(lambda: [call() for _ in range(warm)])
        answers[name] = call()
        times = [_seconds(call) for _ in range(rounds)]
        same = next((i for i, pair in enumerate(zip(answers[name], answers["generate"])) if pair[0] != pair[1]), COUNT)
        speed = COUNT / statistics.median(times)
        print(f"{name}: {speed:.0f} tokens/s, first {same} tokens as generate's, ready in {ready:.1f} s", flush=True)

    with torch.no_grad():
        row("generate", lambda: wanted(model, text))
        for label, options in (("session", {}), ("session, CUDA graphs", {"cuda_graphs": True})):
            with exportkit.load(package, "cuda", **options) as loaded, loaded.session() as session:

                def call(session: Any = session) -> list[int]:
                    session.reset()
                    logits = read(session, [text], 128, "cuda")
                    return torch.cat(list(islice(generate(session, logits), COUNT)), dim=1)[0].tolist()

                row(label, call, warm=2)
        same = same_drawn(model, exportkit.load(package, "cuda").session, text)
        print(f"drawn tokens as generate's: {'yes' if same else 'no'}", flush=True)
        if dtype != "float32":
            row("generate, static cache, torch.compile", lambda: wanted(model, text, cache_implementation="static"), 2)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=SIX)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--large", metavar="DTYPE")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.large:
        name, flags = f"large_{options.large}", ["--device", "cuda", "--cases", "1"]
        if options.make:
            make(options.folder, name, "large", {"dtype": options.large}, *flags, verify=False)
        if options.measure:
            large_rows(options.large, options.folder / f"{name}.pt2", rounds=2)
        return
    print("| model | greedy, rows as generate's | drawn the same | tokens | generate, tokens/s | session |")
    print("| --- | --- | --- | ---: | ---: | ---: |", flush=True)
    for name in options.names:
        print("| " + " | ".join(small_row(name, options.folder)) + " |", flush=True)


if __name__ == "__main__":
    main()
