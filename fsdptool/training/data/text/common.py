"""What kinds of samples of text share: the kind itself, reading columns, framing and padding tokens,
conversations to tokens, and which tokens of a conversation are learned.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.loader import Samples
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.sources import Row, SampleSource
from fsdptool.training.data.tokenizer import Encoder

Span = tuple[int, int]
"""Characters of a rendered conversation, from the first to the one after the last."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which transformers lets a template mark what the assistant says."""


class ChatTemplate:
    """A tokenizer's chat template, and where it lets the assistant speak.

    transformers' own mask (5.23, ``tokenization_utils_base.py``: ``apply_chat_template``) asks for the token
    of a span's first and last character. Where the tokenizer leaves spaces out of its offsets there is none:
    then it learns nothing, or everything up to the end. Here every token is judged by its own characters.

    Args:
        tokenizer: A transformers tokenizer.
        name: What messages call it.
        turns: The texts that begin and end a turn of the assistant, for templates that mark none.

    Raises:
        ConfigError: There is no template.
    """

    def __init__(self, tokenizer: Any, name: str, turns: tuple[str, str] | None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer {name} has no chat template, which a messages column needs",
                help="choose an instruct tokenizer, or data.tokenizer: bytes",
            )
        self._tokenizer = tokenizer
        self._name = name
        self._turns = turns
        self._core: Any = None

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> NDArray[np.int64]:
        """Return a conversation's tokens."""
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True
        )
        return np.asarray(encoded["input_ids"], dtype=np.int64)

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> NDArray[np.int64]:
        """Return the tokens of a conversation that the assistant is about to answer."""
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, add_generation_prompt=True
        )
        return np.asarray(encoded["input_ids"], dtype=np.int64)

    def encode_learned(
        self, messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return a conversation's tokens, and 1 for those that the assistant says.

        A token belongs to the assistant if its first character that is not a space does; a token of spaces
        alone, if its first character does. So a token that holds the end of a turn and what follows it is
        learned, and the user's first word is not, even if the space before it was the assistant's.

        Raises:
            ConfigError: The template marks no turns, or the tokenizer does not say where its tokens are.
        """
        tokens = self.encode(messages, tools)
        text, spans = self._render(messages, tools)
        core = self._without_trimming()
        encoding = core.encode(text, add_special_tokens=False)
        if encoding.ids != tokens.tolist():
            raise ConfigError(
                f"tokenizer {self._name} does not say which characters its tokens cover",
                help="leave data.assistant_only_loss off, or choose a tokenizer with a tokenizer.json",
            )
        return tokens, _inside(text, encoding.offsets, spans)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(None, tools)
        if self._turns is None and not _MARK.search(template):
            raise ConfigError(
                f"the chat template of tokenizer {self._name} does not mark the turns of the assistant",
                help="set data.options.assistant_turns to the two texts that begin and end a turn, or add "
                "{% generation %}...{% endgeneration %} to the template",
            )
        rendered, marked = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        if self._turns is None:
            return rendered[0], [(start, stop) for start, stop in marked[0]]
        return rendered[0], _between(rendered[0], *self._turns)

    def _without_trimming(self) -> Any:
        """Return the tokenizers library's object, made to count a token's leading space as the token's.

        The post-processors of byte-level tokenizers move offsets past it (tokenizers 0.22, ``trim_offsets``).
        """
        if self._core is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise ConfigError(
                    f"tokenizer {self._name} does not say which characters its tokens cover",
                    help="leave data.assistant_only_loss off, or choose a tokenizer with a tokenizer.json",
                )
            self._core = type(backend).from_str(backend.to_str())
            self._core.post_processor = None
            self._core.no_truncation()
            self._core.no_padding()
        return self._core


def _between(text: str, begin: str, end: str) -> list[Span]:
    """Return what follows each ``begin``, up to and with the next ``end``."""
    spans, at = [], 0
    while (start := text.find(begin, at)) >= 0:
        start += len(begin)
        stop = text.find(end, start)
        at = len(text) if stop < 0 else stop + len(end)
        spans.append((start, at))
    return spans


def _inside(text: str, offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.uint8]:
    """Return 1 for each token whose deciding character is inside a span."""
    marks = np.zeros(len(text) + 1, dtype=np.uint8)
    for start, stop in spans:
        marks[start:stop] = 1
    deciding = [start + _spaces(text[start:stop]) for start, stop in offsets]
    return marks[np.asarray(deciding, dtype=np.int64)]


def _spaces(part: str) -> int:
    """Return how many spaces precede a token's first other character; 0 if it has no other."""
    rest = part.lstrip()
    return len(part) - len(rest) if rest else 0


def problem_with(messages: Any, turns: tuple[str, str] | None) -> str | None:
    """Say what keeps a value from being a conversation, or None."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "does not contain a list of messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            return f"message {number} is {type(message).__name__}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return f"message {number} has no content"
        if isinstance(content, str) and turns is not None and any(mark in content for mark in turns):
            return f"message {number} contains a text of data.options.assistant_turns"
    return None


IGNORED = -100
"""Label of a token that is not learned (torch's ``cross_entropy`` default)."""

_GROUP, _GROUP_CHARACTERS = 512, 1 << 21

Wanted = Mapping[str, TensorSpec]
"""What the family says a micro-batch is, by name."""


@dataclass(frozen=True, slots=True)
class Material:
    """What samples are made of: a tokenised table, its rows of one part, and what a batch holds."""

    table: Ragged
    rows: NDArray[np.int64]
    encoder: Encoder
    recipe: Recipe
    data: Data
    wanted: Wanted


class TextSamples(ABC):
    """A kind of samples of text: how a row becomes tokens, once, and how tokens become a sample."""

    options: tuple[str, ...] = ()
    """Names in ``data.options`` on which the tokens depend."""

    @abstractmethod
    def columns(self, tokens: str) -> dict[str, str]:
        """Return the columns of the table of tokens and their numpy types; ``tokens`` is that of a token.

        One of them is ``input_ids``.
        """

    @abstractmethod
    def tokenise(
        self, data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the columns of one row after another.

        Args:
            data: The recipe's data section.
            encoder: The tokenizer.
            source: The rows.
            facts: Kept with the table; ``open`` joins the row that is yielded next to this one.

        Raises:
            ConfigError: A row lacks a column, or its content is not what it should be.
        """

    @abstractmethod
    def samples(self, of: Material) -> Samples:
        """Return the samples of a table.

        Raises:
            ConfigError: The model or the recipe does not suit them.
        """

    def check(self, table: Ragged, wanted: Wanted, spec: ModelSpec) -> None:
        """Refuse a table that the model cannot learn from.

        Raises:
            ConfigError: It cannot.
        """
        return


def digest_of(*parts: Any) -> str:
    """Return the digest of values by their representation."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()


def padded(row: NDArray[Any], length: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a row cut or filled to ``length``, and where it is real (1) or filled (0)."""
    found = np.full(length, pad, dtype=np.int64)
    if len(row) > length:
        found[: length - 1] = row[: length - 1]
        found[-1] = row[-1]
    else:
        found[: len(row)] = row
    return found, (np.arange(length) < len(row)).astype(np.int64)


def column(row: Row, name: str, source: SampleSource, setting: str) -> Any:
    """Return a row's column.

    Raises:
        ConfigError: It is not there, or empty; the message names the row, and the columns it has.
    """
    try:
        value = row[name]
    except KeyError:
        place = source.where(lambda other: name not in other)
        raise ConfigError(
            f"{place}: no column {name!r}; there is {', '.join(map(str, sorted(row)))}",
            help=f"set {setting} to one of them",
        ) from None
    if value is None:
        raise ConfigError(
            f"{source.where(lambda other: other.get(name) is None)}: column {name!r} is empty",
            help="take the rows without a value out of the file",
        )
    return value


def text_column(row: Row, name: str, source: SampleSource, setting: str) -> str:
    """Return a row's column of text.

    Raises:
        ConfigError: It is not there, or not text.
    """
    value = column(row, name, source, setting)
    if not isinstance(value, str):
        place = source.where(lambda other: not isinstance(other.get(name), str))
        raise ConfigError(
            f"{place}: column {name!r} holds {type(value).__name__}, expected text",
            help=f"set {setting} to a column of text",
        )
    return value


def groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield rows that are tokenised together: enough for all cores, few enough for progress and Ctrl-C."""
    group: list[Row] = []
    characters = 0
    for row in rows:
        group.append(row)
        characters += sum(len(text) for text in row.values() if isinstance(text, str))
        if len(group) >= _GROUP or characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def start_tokens(encoder: Encoder) -> list[int]:
    """Return what the tokenizer itself puts before a text (Llama's begin-of-text; nothing for most)."""
    return encoder.frame[0]


def stop_tokens(encoder: Encoder) -> list[int]:
    """Return what the tokenizer itself puts behind a text, else its end-of-text token if it has one."""
    if encoder.frame[1]:
        return encoder.frame[1]
    return [encoder.eos] if encoder.eos is not None else []


def framed(tokens: Any, encoder: Encoder) -> Any:
    """Return tokens with what belongs before and behind them, [length] int64."""
    return np.concatenate([start_tokens(encoder), tokens, stop_tokens(encoder)]).astype(np.int64)
