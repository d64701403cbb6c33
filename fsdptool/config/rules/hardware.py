"""Rules of the family ``hardware``: judged with ``--gpu`` and ``--gpus``."""

from fsdptool.records.diagnostic import Rule

HARDWARE = (
    Rule("FSD501", "bf16 is not native on this GPU", "warning",
         "The GPU's tensor cores do not compute in bfloat16; torch emulates it slowly.",
         "Use fp16 on this GPU, or another GPU (--unsafe-fixes writes fp16).", "unsafe"),
    Rule("FSD502", "offload needs more host memory than there is", "error",
         "CPU offload keeps parameters, gradients and optimizer states of all ranks of a node in host "
         "memory.",
         "Use more nodes, a smaller optimizer, or no offload."),
    Rule("FSD503", "does not fit", "error",
         "The predicted peak exceeds what the GPU can give (see `fsdptool plan` for the ladder).",
         "Follow the next steps that `fsdptool plan` prints."),
    Rule("FSD504", "process count and GPU count differ", "error",
         "The file asks for another number of processes than GPUs were named.",
         "Make num_processes equal to the number of GPUs in all."),
    Rule("FSD505", "fp8 is not native on this GPU", "error",
         "fp8 needs tensor cores of compute capability 8.9 or newer.",
         "Use bf16 on this GPU."),
    Rule("FSD506", "hardware could not be judged", "warning",
         "The rules of this family were not judged.",
         "See the message; `fsdptool plan` says more."),
)  # fmt: skip
