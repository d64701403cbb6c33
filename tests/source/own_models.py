"""Models of your own for tests: a transformers folder that comes with code."""

from __future__ import annotations

import json
from pathlib import Path

_CODE = """\
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TallyConfig(PretrainedConfig):
    model_type = "tally"

    def __init__(self, vocab_size=64, hidden_size=32, num_hidden_layers=2, **options):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**options)


class TallyBlock(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = torch.nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = torch.nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class TallyForCausalLM(PreTrainedModel):
    config_class = TallyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = torch.nn.ModuleList(TallyBlock(config) for _ in range(config.num_hidden_layers))
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, use_cache=None, **ignored):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return CausalLMOutput(logits=self.head(hidden))
"""


def own_transformers_model(folder: Path) -> Path:
    """Write a causal language model whose ``model_type`` transformers does not have."""
    folder.mkdir(parents=True)
    auto = {"AutoConfig": "tally.TallyConfig", "AutoModelForCausalLM": "tally.TallyForCausalLM"}
    config = {"model_type": "tally", "architectures": ["TallyForCausalLM"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (folder / "tally.py").write_text(_CODE)
    return folder
