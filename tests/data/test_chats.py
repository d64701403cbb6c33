"""What of a conversation is learned, for tokenizers that report their offsets in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fsdptool.errors import ConfigError
from fsdptool.training.data.text.common import ChatTemplate
from fsdptool.training.data.tokenizer import byte_tokenizer

CORPUS = [
    "user: why is the sky blue? assistant: because of air.",
    "a b c d e f",
    "Ünïcode and\nlines \t tabs",
]
TALK = [
    {"role": "user", "content": "why is the sky blue?"},
    {"role": "assistant", "content": " because of Ünïcode"},
    {"role": "user", "content": "user asks: a  b"},
    {"role": "assistant", "content": "air. \n"},
    {"role": "user", "content": "thanks"},
]
PLAIN = "{% for m in messages %}{{ m['role'] + ':' }}{{ m['content'] }}{{ '|' }}{% endfor %}"
MARKED = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '|' }}{% endfor %}"
)


def byte_level(*, trims: bool) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trims)
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    return core


def metaspace() -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace()
    core.train_from_iterator([*CORPUS, *map(chr, range(256))], trainers.BpeTrainer(vocab_size=500))
    return core


def words() -> Tokenizer:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    return core


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level, trimmed offsets": lambda: byte_level(trims=True),
    "byte level, whole offsets": lambda: byte_level(trims=False),
    "metaspace": metaspace,
    "words between spaces": words,
}


def wrapped(core: Tokenizer, template: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def said(template: ChatTemplate, tokenizer: Any) -> tuple[list[str], int]:
    """Return the texts of each run of learned tokens, and how many tokens there are."""
    tokens, learned = template.encode_learned(TALK, None)
    runs: list[list[int]] = []
    for number, token in enumerate(tokens):
        if learned[number]:
            if number == 0 or not learned[number - 1]:
                runs.append([])
            runs[-1].append(int(token))
    return [tokenizer.decode(run) for run in runs], len(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_exactly_what_the_assistant_says_is_learned(name: str) -> None:
    tokenizer = wrapped(TOKENIZERS[name](), MARKED)
    runs, count = said(ChatTemplate(tokenizer, name, None), tokenizer)
    texts = ["".join(run.split()).replace("##", "") for run in runs]
    expected = ["".join(turn["content"].split()) for turn in TALK if turn["role"] == "assistant"]
    assert texts == ([text.lower() for text in expected] if name == "words between spaces" else expected)
    assert count > 20


def test_spaces_belong_to_the_turn_that_says_them() -> None:
    tokenizer = wrapped(byte_level(trims=True), MARKED)
    runs, _ = said(ChatTemplate(tokenizer, "x", None), tokenizer)
    assert runs == [" because of Ünïcode", "air. \n"]


def test_turns_are_found_by_the_texts_around_them() -> None:
    tokenizer = wrapped(byte_level(trims=True), PLAIN)
    runs, _ = said(ChatTemplate(tokenizer, "x", ("assistant:", "|")), tokenizer)
    assert runs == [" because of Ünïcode|", "air. \n|"]


def test_a_template_without_marks_is_refused_although_it_says_generation() -> None:
    tokenizer = wrapped(byte_level(trims=True), PLAIN + "{% if add_generation_prompt %}assistant:{% endif %}")
    with pytest.raises(ConfigError, match="does not mark the turns of the assistant") as caught:
        ChatTemplate(tokenizer, "x", None).encode_learned(TALK, None)
    assert "data.options.assistant_turns" in str(caught.value.help)


def test_the_byte_tokenizer_learns_the_end_of_a_turn() -> None:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(tokenizer, "bytes", None)
    tokens, learned = template.encode_learned(TALK, None)
    assert tokenizer.decode(tokens[learned.astype(bool)]) == " because of Ünïcode<|im_end|>air. \n<|im_end|>"
