"""What forkservers of tests import first, so that their children need not: torch's compiler and exporter."""

import importlib
import os

# Inductor asks whether there is a GPU. With this, torch asks NVML and not CUDA, which would not work in forks then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for module in ("torch._inductor.compile_fx", "torch.export"):
    importlib.import_module(module)
