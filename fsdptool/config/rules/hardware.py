"""Rules on what settings do on hardware."""

from __future__ import annotations

from fsdptool.records.diagnostic import Rule

HARDWARE = (
    Rule("FSD501", "GPU does not support bf16 natively", "warning",
         "The GPU's tensor cores do not compute in bfloat16; torch emulates it slowly.",
         "Use fp16 on this GPU, or another GPU (--unsafe-fixes writes fp16).", "unsafe"),
    Rule("FSD502", "not enough host memory for offload", "error",
         "CPU offload keeps parameters, gradients and optimizer states of all ranks of a node in host "
         "memory.",
         "Use more nodes, a smaller optimizer, or no offload."),
    Rule("FSD503", "does not fit in GPU memory", "error",
         "The predicted peak exceeds the memory of the GPU (`fsdptool plan` shows its composition).",
         "Follow the suggestions that `fsdptool plan` prints."),
    Rule("FSD504", "number of processes differs from number of GPUs", "error",
         "The number of processes in the file differs from the number of GPUs that was given.",
         "Set num_processes to the total number of GPUs."),
    Rule("FSD505", "GPU does not support fp8", "error",
         "fp8 needs tensor cores of compute capability 8.9 or newer.",
         "Use bf16 on this GPU."),
    Rule("FSD506", "hardware not checked", "warning",
         "The rules on memory could not be checked.",
         "See the message; `fsdptool plan` gives details."),
)  # fmt: skip
