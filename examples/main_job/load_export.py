"""Load an exported model with transformers alone, and let it continue a text."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    """Print the class, the parameter count and a continuation of a few words."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"from_pretrained: {type(model).__name__}, {total:,} parameters")
    prompt = tokenizer("The following ", return_tensors="pt")
    with torch.no_grad():
        written = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    print(f"continuation: {tokenizer.decode(written[0], skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main(sys.argv[1])
