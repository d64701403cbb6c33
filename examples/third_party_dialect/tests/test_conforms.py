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


def test_it_conforms() -> None:
    assert_conforms(Minitrain(), fsdp1=[FSDP1])
