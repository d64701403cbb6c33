"""The model's tokenizer, another one, or a byte-level one that needs no download."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data

BYTE_SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>", "<|im_start|>", "<|im_end|>")
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Encoder:
    """A tokenizer as the data needs it.

    Attributes:
        tokenizer: The transformers tokenizer.
        digest: Digest of everything that decides its output.
        pad, eos, mask: Token ids; pad falls back to eos, then 0; eos and mask may be None.
        frame: Tokens that the tokenizer itself puts before and after a text (``[CLS]``, ``[SEP]``).
    """

    def __init__(self, tokenizer: Any, *, name: str, is_bytes: bool = False) -> None:
        self.tokenizer = tokenizer
        self.name = name
        self._is_bytes = is_bytes
        self.vocabulary = len(tokenizer)
        self.eos: int | None = tokenizer.eos_token_id
        self.mask: int | None = tokenizer.mask_token_id
        pad = tokenizer.pad_token_id
        self.pad: int = pad if pad is not None else (self.eos or 0)
        self.frame: tuple[list[int], list[int]] = ([], []) if is_bytes else _frame(tokenizer)
        self.digest = _digest(tokenizer)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[NDArray[np.int64]]:
        """Return the tokens of each text; ``special`` adds what the tokenizer frames a text with."""
        if self._is_bytes:
            # A byte is its own token: the tokenizers library gives the same, more slowly (a test holds
            # the two against each other).
            return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]
        encoded = self.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)
        return [np.asarray(row, dtype=np.int64) for row in encoded["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer so that ``AutoTokenizer.from_pretrained`` loads it."""
        self.tokenizer.save_pretrained(str(folder))


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(probe) + 1):
        if framed[start : start + len(probe)] == probe:
            return framed[:start], framed[start + len(probe) :]
    return [], []


def _digest(tokenizer: Any) -> str:
    digest = hashlib.blake2b(digest_size=20)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation are set by whoever called last; they do not belong to the vocabulary.
        state = json.loads(backend.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
        digest.update(json.dumps(state, sort_keys=True).encode())
    else:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(str(type(tokenizer).__name__).encode())
    digest.update(str(tokenizer.special_tokens_map).encode())
    digest.update(str(tokenizer.chat_template).encode())
    return digest.hexdigest()


def _byte_characters() -> list[str]:
    """Return the printable character that byte-level tokenizers write each byte as (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def byte_tokenizer() -> Any:
    """Return a transformers tokenizer whose tokens are the bytes of UTF-8."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in BYTE_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(data: Data, spec: ModelSpec, *, vocabulary: int | None = None) -> Encoder:
    """Return the tokenizer a recipe asks for. Never goes to the network when the hub is offline.

    Args:
        data: The recipe's data section.
        spec: The model.
        vocabulary: Tokens the model knows; None looks for ``vocab_size`` in its configuration.

    Raises:
        ConfigError: There is none, it cannot be read, or it has more tokens than the model.
    """
    if data.tokenizer == "bytes":
        encoder = Encoder(byte_tokenizer(), name="bytes", is_bytes=True)
    else:
        encoder = _pretrained(data.tokenizer, spec)
    _check_vocabulary(encoder, spec, vocabulary)
    return encoder


def _pretrained(name: str, spec: ModelSpec) -> Encoder:
    from transformers import AutoTokenizer

    place, options = _place_of(name, spec)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=spec.trust_remote_code, use_fast=True, **options
        )
    except Exception as error:  # transformers raises anything from OSError to KeyError here
        if Path(place).is_dir() and not holds_tokenizer(Path(place)):
            reason = "the folder holds no tokenizer"
        else:
            # The first sentence, which may be wrapped; what follows suggests other causes.
            reason = " ".join(str(error).split()).partition(". ")[0].removesuffix(".") or type(error).__name__
        raise ConfigError(
            f"no tokenizer can be loaded from {place}: {reason}",
            help="set data.tokenizer to a folder with tokenizer.json, or to bytes",
        ) from error
    return Encoder(tokenizer, name=str(place))


def holds_tokenizer(folder: Path) -> bool:
    """Say whether a model's folder has files of a tokenizer, in itself or in ``tokenizer`` below it."""
    return (folder / "tokenizer").is_dir() or any(os.path.lexists(folder / name) for name in _FILES)


def _place_of(name: str, spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    if name != "auto":
        return name, {}
    if spec.folder is not None:
        folder = Path(spec.folder)
        inside = folder / "tokenizer"
        return str(inside if inside.is_dir() else folder), {}
    if spec.reference.kind == "hub":
        return spec.reference.id, {"revision": spec.reference.revision}
    raise ConfigError(
        f"{spec.reference.id} has no tokenizer",
        help="set data.tokenizer: bytes, or name a folder or hub id",
    )


def _check_vocabulary(encoder: Encoder, spec: ModelSpec, size: int | None) -> None:
    if size is None:
        config = spec.config.get("text_config", spec.config)
        size = config.get("vocab_size") if isinstance(config, Mapping) else None
    if isinstance(size, int) and encoder.vocabulary > size:
        raise ConfigError(
            f"tokenizer {encoder.name} has {encoder.vocabulary} tokens, the model {spec.reference.id} "
            f"only {size}",
            help=f"choose the model's own tokenizer, or set model.overrides.vocab_size: {encoder.vocabulary}",
        )
