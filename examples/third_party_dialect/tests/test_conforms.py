"""What a plugin's author runs: fsdptool's own conformance test on this dialect."""

from fsdptool_minitrain import Minitrain

from fsdptool.testing.dialects import assert_conforms

FSDP1 = """\
# Kept when the file is migrated.
minitrain: 1
sharding:
  engine: fsdp1
  free_after_forward: false
  blocks: [LlamaDecoderLayer]
"""

RUN = """\
minitrain: 1
gpus: 8
precision: bf16
model: Qwen/Qwen3-8B
data: {path: org/texts, rows: 2, length: 4096, packed: true}
optimizer: adamw
learning_rate: 0.00002
keep_average: true
log_every: 10
steps: 100
sharding:
  engine: fsdp2
  free_after_forward: false
  blocks: [Qwen3DecoderLayer]
  recompute: true
"""


def test_it_conforms() -> None:
    assert_conforms(Minitrain(), fsdp1=[FSDP1], runs=[RUN])
