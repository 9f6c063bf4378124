"""Libraries with kernels for NVIDIA's GPUs, each with a model that calls some of its operators, or why it has none."""

from __future__ import annotations

from tools.libraries import data_kernels as data
from tools.libraries import language_kernels as language
from tools.libraries.library import Library

_GPU = ("cuda",)
_VLLM = "vllm==0.33.0"
_SGLANG = "sglang-kernel==0.4.2"


def _without(name: str, distribution: str, library: str, note: str) -> Library:
    return Library(name, distribution, None, library, _GPU, note)


_TRIED = (
    Library("vLLM 0.33.0, decoder block", _VLLM, language.vllm_block, language.VLLM, _GPU),
    Library("vLLM 0.33.0, float8 layer", _VLLM, language.vllm_float8, language.VLLM, _GPU),
    Library("vLLM 0.33.0, 4-bit layer", _VLLM, language.vllm_int4, language.VLLM, _GPU),
    Library("vLLM 0.33.0, experts", _VLLM, language.vllm_experts, language.VLLM_MOE, _GPU),
    Library("vLLM 0.33.0, FlashAttention 3", _VLLM, language.vllm_paged_attention, language.VLLM_FA3, _GPU),
    Library("vLLM 0.33.0, FlashKDA", _VLLM, language.vllm_delta_attention, language.VLLM_KDA, _GPU),
    Library(
        "vLLM 0.33.0, FlashMLA",
        _VLLM,
        language.vllm_sparse_attention,
        language.VLLM_MLA,
        _GPU,
        "Its decoding returns the tensor that it writes (`-> (Tensor(c!), ...)`), which torch.export refuses.",
    ),
    Library(
        "sglang-kernel 0.4.2, decoder block",
        _SGLANG,
        language.sglang_block,
        language.SGLANG,
        _GPU,
        "sgl-kernel 0.3.21, under its former name, needs torch 2.9.1 and CUDA 12.",
    ),
    Library("sglang-kernel 0.4.2, float8 layer", _SGLANG, language.sglang_float8, language.SGLANG, _GPU),
    Library("sglang-kernel 0.4.2, FlashMLA", _SGLANG, language.sglang_latent_decoding, language.SGLANG_MLA, _GPU),
    Library(
        "torchvision 0.26.0, detector",
        "torchvision==0.26.0",
        data.torchvision_detector,
        "torchvision",
        _GPU,
        data.ROI_ALIGN,
    ),
    Library("torchvision 0.26.0, boxes", "torchvision==0.26.0", data.torchvision_boxes, "torchvision", _GPU),
    Library("torchaudio 2.11.0, transducer", "torchaudio==2.11.0", data.torchaudio_transducer, "torchaudio", _GPU),
    Library(
        "torchaudio 2.11.0, alignment",
        "torchaudio==2.11.0",
        data.torchaudio_alignment,
        "torchaudio",
        _GPU,
        "Its lfilter returns the tensor that it writes (`-> Tensor(a!)`); its prefix decoder takes a pointer as int.",
    ),
    Library("fbgemm-gpu 1.6.0", "fbgemm-gpu==1.6.0", data.fbgemm_jagged, data.FBGEMM, _GPU),
    Library("torchao 0.17.0", "torchao==0.17.0", data.torchao_sparse, "torchao", _GPU),
    Library(
        "xformers 0.0.35",
        "xformers==0.0.35",
        data.xformers_pruned,
        data.XFORMERS,
        _GPU,
        "It needs CUDA 12's runtime: `libcudart.so.12` must be on LD_LIBRARY_PATH, for its packages too.",
    ),
    Library("torch_scatter 2.1.2", "torch-scatter==2.1.2", data.torch_scatter_segments, "torch_scatter", _GPU),
    Library("torch_cluster 1.6.3", "torch-cluster==1.6.3", data.torch_cluster_neighbours, data.TORCH_CLUSTER, _GPU),
    Library("torch_sparse 0.6.18", "torch-sparse==0.6.18", data.torch_sparse_graph, data.TORCH_SPARSE, _GPU),
)

_WITHOUT = (
    _without(
        "vLLM 0.33.0, FlashAttention 2",
        _VLLM,
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "It has machine code for compute capability 8 only, and 65 MB of PTX for others.",
    ),
    _without(
        "vLLM 0.33.0, DeepGEMM",
        _VLLM,
        "vllm/third_party/deep_gemm/_C_extension.abi3.so",
        "It has no kernels: a call of it runs nvcc on headers of its Python package.",
    ),
    _without(
        "vLLM 0.33.0, DeepSelect",
        _VLLM,
        "vllm/_deepselect_C.abi3.so",
        "It has machine code for compute capability 10 only.",
    ),
    _without(
        "vLLM 0.33.0, QuTLASS",
        _VLLM,
        "vllm/_qutlass_C.abi3.so",
        "It has machine code for compute capability 10 only.",
    ),
    _without(
        "bitsandbytes 0.50.2",
        "bitsandbytes==0.50.2",
        "bitsandbytes",
        "Its operators are Python's, and their CUDA kernels are called through ctypes: no C++ kernel is registered.",
    ),
    _without(
        "causal-conv1d 1.7.0",
        "causal-conv1d==1.7.0",
        "causal_conv1d",
        "Its operators are Python's (torch.library.custom_op), and their bodies call functions of pybind11.",
    ),
    _without(
        "mamba-ssm 2.3.2",
        "mamba-ssm==2.3.2.post1",
        "mamba_ssm",
        "It registers no operators: an autograd.Function calls functions of pybind11.",
    ),
    _without(
        "natten 0.21.7",
        "natten==0.21.7",
        "natten",
        "Its operators are Python's (torch.library.custom_op), and their bodies call functions of pybind11.",
    ),
    _without(
        "gsplat 1.5.3",
        "gsplat==1.5.3",
        "gsplat",
        "It registers no operators: its functions are pybind11's, compiled when it is first used.",
    ),
    _without(
        "cuequivariance-ops-torch 0.13.0",
        "cuequivariance-ops-torch-cu13==0.13.0",
        "cuequivariance_ops_torch",
        "Its operators are Python's (torch.library.custom_op), and their bodies call functions of nanobind.",
    ),
    _without(
        "torchmd-net 3.1.0",
        "torchmd-net==3.1.0",
        "torchmdnet",
        "Python runs Warp's kernels. Version 2.4.10 has C++ operators, which need an older torch.",
    ),
)

ROWS = (*_TRIED, *_WITHOUT)
