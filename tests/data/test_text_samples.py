"""Text to samples: nothing lost, labels where they belong, the same on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Recipe
from fsdptool.training.data import build_batches, build_evaluation, load_tokenizer, prepare
from fsdptool.training.data.order import fit, wrap
from fsdptool.training.data.tokenizer import BYTE_SPECIALS, byte_tokenizer

pytestmark = pytest.mark.slow

PAD, BOS, EOS, MASK, START, END = range(256, 262)
SpecOf = Callable[[str], ModelSpec]
RecipeFor = Callable[..., Recipe]


def rows_of(batches: list[dict[str, torch.Tensor]], name: str) -> list[list[int]]:
    return [row for batch in batches for row in batch[name].tolist()]


def test_byte_tokenizer_is_the_bytes_of_utf8(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    text = "héllo\n  wörld 日本\t" + "".join(map(chr, range(0x20, 0x250)))
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 256 + len(BYTE_SPECIALS)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    assert again(text)["input_ids"] == list(text.encode())
    assert (again.pad_token_id, again.eos_token_id, again.mask_token_id) == (PAD, EOS, MASK)
    assert again.chat_template == tokenizer.chat_template


def test_wrapped_packing_keeps_every_token_and_marks_documents(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    texts = [f"document {number} " + "x" * (number * 7 % 90) for number in range(40)]
    recipe = recipe_for("causal_lm", source="jsonl", path=write_rows([{"text": t} for t in texts]))
    spec = spec_of("causal_lm")
    batches = build_batches(recipe, spec, cache=tmp_path / "c")
    steps = -(-batches.samples_per_epoch // 2)
    results = [batch for _ in range(steps) for batch in next(batches)]
    rows = list(zip(*(rows_of(results, n) for n in ("input_ids", "labels", "position_ids")), strict=True))
    documents: dict[tuple[int, ...], int] = {}
    pieces = []
    for tokens, labels, positions in rows[: batches.samples_per_epoch]:
        starts = [i for i, p in enumerate(positions) if p == 0] + [len(tokens)]
        for start, stop in itertools.pairwise(starts):
            assert positions[start:stop] == list(range(stop - start))
            assert labels[start] == -100
            piece = tokens[start:stop]
            if set(piece) == {PAD}:
                assert set(labels[start:stop]) == {-100}
                continue
            assert labels[start + 1 : stop] == piece[1:]
            pieces.append(piece)
    total = sorted(token for piece in pieces for token in piece)
    assert total == sorted(token for text in texts for token in [*text.encode(), EOS])
    for piece in pieces:
        documents[tuple(piece)] = documents.get(tuple(piece), 0) + 1
    whole = [text for text in texts if (*text.encode(), EOS) in documents]
    assert len(whole) >= 5


@pytest.mark.parametrize("objective", ["causal_lm", "masked_lm", "classification", "seq2seq"])
def test_samples_do_not_depend_on_ranks(
    objective: str,
    spec_of: SpecOf,
    recipe_for: RecipeFor,
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    rows = [
        {"text": "word " * (n % 13 + 1), "label": n % 3, "source": "s" * (n + 1), "target": "t" * (n % 5)}
        for n in range(23)
    ]
    path = write_rows(rows)
    spec = spec_of(objective)

    def line(world: int, micro: int) -> list[list[tuple[Any, ...]]]:
        recipe = recipe_for(
            objective,
            source="jsonl",
            path=path,
            packing=objective == "causal_lm",
            batch={"micro_batch": micro, "global_batch": 8, "sequence_length": 32},
        )
        ranks = [build_batches(recipe, spec, rank=r, world=world, cache=tmp_path) for r in range(world)]
        steps = []
        for _ in range(7):
            turns = zip(*(next(rank) for rank in ranks), strict=True)
            batches = [batch for turn in turns for batch in turn]
            names = sorted(batches[0])
            joined = {name: torch.cat([batch[name] for batch in batches]) for name in names}
            steps.append([tuple(map(str, (joined[n][i].tolist() for n in names))) for i in range(8)])
        return steps

    alone = line(1, 8)
    assert line(2, 2) == alone
    assert line(4, 1) == alone
    assert line(2, 4) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_continues_exactly_and_on_other_ranks(
    workers: int, spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    spec = spec_of("causal_lm")

    def loaders(world: int) -> list[Any]:
        recipe = recipe_for(
            "causal_lm",
            source="text",
            path="pydoc",
            workers=workers,
            options={"start_method": "fork"},
            batch={"micro_batch": 2, "global_batch": 8, "sequence_length": 128},
        )
        return [build_batches(recipe, spec, rank=r, world=world, cache=tmp_path) for r in range(world)]

    def step(ranks: list[Any]) -> torch.Tensor:
        turns = zip(*(next(rank) for rank in ranks), strict=True)
        return torch.cat([batch["input_ids"] for turn in turns for batch in turn])

    undisturbed = loaders(1)
    expected = [step(undisturbed) for _ in range(9)]
    first = loaders(2)
    for number in range(4):
        assert torch.equal(step(first), expected[number])
    states = [rank.state_dict() for rank in first]
    assert states[0] == states[1]
    assert first[0].samples == 32
    for world in (4, 1, 2):
        second = loaders(world)
        for rank in second:
            rank.load_state_dict(states[0])
        for number in range(4, 9):
            assert torch.equal(step(second), expected[number])
        for rank in second:
            rank.close()
    for rank in [*first, *undisturbed]:
        rank.close()


def test_positions_of_other_data_are_refused(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    spec = spec_of("causal_lm")
    one = write_rows([{"text": "a" * 300}], "one.jsonl")
    two = write_rows([{"text": "b" * 300}], "two.jsonl")
    state = build_batches(
        recipe_for("causal_lm", source="jsonl", path=one), spec, cache=tmp_path
    ).state_dict()
    other = build_batches(recipe_for("causal_lm", source="jsonl", path=two), spec, cache=tmp_path)
    with pytest.raises(Exception, match="not the data the checkpoint was trained on"):
        other.load_state_dict(state)


def test_masking_depends_on_sample_and_epoch_only(
    spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    recipe = recipe_for(
        "masked_lm", source="text", path="pydoc", batch={"micro_batch": 8, "sequence_length": 128}
    )
    spec = spec_of("masked_lm")
    loader = build_batches(recipe, spec, cache=tmp_path)
    samples = loader._samples
    first, again, later = samples.sample(3, 0), samples.sample(3, 0), samples.sample(3, 1)
    assert np.array_equal(first["labels"], again["labels"])
    assert not np.array_equal(first["labels"], later["labels"])
    batch = [next(loader)[0] for _ in range(40)]
    labels = torch.cat([b["labels"] for b in batch])
    tokens = torch.cat([b["input_ids"] for b in batch])
    chosen = labels != -100
    share = chosen.float().mean().item()
    assert 0.14 < share < 0.16
    masked = (tokens[chosen] == MASK).float().mean().item()
    kept = (tokens[chosen] == labels[chosen]).float().mean().item()
    assert 0.78 < masked < 0.82
    assert 0.08 < kept < 0.12
    assert not torch.isin(labels[chosen], torch.tensor([PAD, BOS, EOS, MASK])).any()


def test_only_what_the_assistant_says_is_learned(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    said = [f"answer {n}" for n in range(6)]
    rows = [
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": text}]}
        for text in said
    ]
    recipe = recipe_for(
        "causal_lm", source="jsonl", path=write_rows(rows), assistant_only_loss=True, shuffle=False
    )
    loader = build_batches(recipe, spec_of("causal_lm"), cache=tmp_path)
    heard = []
    rows_seen = [row for _ in range(loader.samples_per_epoch) for row in next(loader)[0]["labels"].tolist()]
    for row in rows_seen[: loader.samples_per_epoch]:
        run: list[int] = []
        for token in [*row, -100]:
            if token != -100:
                run.append(token)
            elif run:
                heard.append(run)
                run = []
    expected = sorted([*text.encode(), END] for text in said)
    assert sorted(heard) == expected
    # The whole conversation stays together: six of them, several to a sequence.
    assert loader.samples_per_epoch < 6


def test_completions_learn_the_answer_only(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    path = write_rows([{"question": "why?", "text": "because"}])
    recipe = recipe_for(
        "causal_lm",
        source="jsonl",
        path=path,
        packing=False,
        options={"prompt_column": "question"},
        batch={"micro_batch": 1},
    )
    batch = next(build_batches(recipe, spec_of("causal_lm"), cache=tmp_path))[0]
    labels = [token for token in batch["labels"][0].tolist() if token != -100]
    assert labels == [*b"because", EOS]
    assert batch["input_ids"][0].tolist()[:11] == list(b"why?because")


def test_pairs_and_labels(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    pairs = write_rows([{"source": "long text " * 20, "target": "short"}], "pairs.jsonl")
    recipe = recipe_for(
        "seq2seq",
        source="jsonl",
        path=pairs,
        options={"prefix": "summarize: "},
        batch={"micro_batch": 1, "sequence_length": 32},
    )
    batch = next(build_batches(recipe, spec_of("seq2seq"), cache=tmp_path))[0]
    assert bytes(batch["input_ids"][0].tolist()[:11]) == b"summarize: "
    assert batch["input_ids"][0, -1] == EOS, "the last token survives the cut"
    assert batch["labels"][0].tolist() == [*b"short", EOS] + [-100] * 26
    assert batch["attention_mask"].sum() == 32

    table = tmp_path / "labels.csv"
    table.write_text("text,label\ngood,pos\nbad,neg\nmeh,neutral\n", encoding="utf-8")
    recipe = recipe_for("classification", source="jsonl", path=str(table), shuffle=False, packing=False)
    loader = build_batches(recipe, spec_of("classification"), cache=tmp_path)
    batch = next(loader)[0]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["labels"].tolist() == [2, 0], "names in alphabetic order: neg, neutral, pos"
    assert batch["labels"].shape == (2,)


def test_hidden_documents_are_never_trained_on(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    texts = [f"<{number:03d}>" for number in range(200)]
    rows = [{"text": text} for text in texts]

    def seen(path: str) -> tuple[set[str], set[str]]:
        recipe = recipe_for(
            "causal_lm",
            source="jsonl",
            path=path,
            packing=False,
            batch={"micro_batch": 4, "sequence_length": 8},
            evaluation={"holdout": 0.2, "batches": 1000},
        )
        spec = spec_of("causal_lm")
        train = build_batches(recipe, spec, cache=tmp_path)
        trained = [next(train)[0]["input_ids"] for _ in range(-(-train.samples_per_epoch // 4))]
        evaluation = build_evaluation(recipe, spec, cache=tmp_path)
        assert evaluation is not None
        first = [batch["input_ids"] for step in evaluation for batch in step]
        second = [batch["input_ids"] for step in evaluation for batch in step]
        assert torch.equal(torch.cat(first), torch.cat(second)), "every pass is the same"
        text = [{bytes(row[:5].tolist()).decode() for row in torch.cat(part)} for part in (trained, first)]
        return text[0], text[1]

    trained, evaluated = seen(write_rows(rows, "a.jsonl"))
    assert not trained & evaluated
    assert 20 <= len(evaluated) <= 60
    assert len(trained) + len(evaluated) >= 197  # an incomplete last evaluation batch is left out
    trained_again, _ = seen(write_rows(rows[::-1], "b.jsonl"))
    assert trained_again == trained, "the split goes by content, not by place"


def test_evaluation_is_the_same_on_any_number_of_ranks(
    spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    spec = spec_of("causal_lm")

    def tokens(world: int, micro: int) -> torch.Tensor:
        recipe = recipe_for(
            "causal_lm",
            source="text",
            path="pydoc",
            batch={"micro_batch": micro, "global_batch": 8},
            evaluation={"holdout": 0.05, "batches": 3},
        )
        ranks = [build_evaluation(recipe, spec, rank=r, world=world, cache=tmp_path) for r in range(world)]
        steps = zip(*(rank for rank in ranks if rank is not None), strict=True)
        parts = [b["input_ids"] for step in steps for turn in zip(*step, strict=True) for b in turn]
        return torch.cat(parts)

    alone = tokens(1, 8)
    assert len(alone) == 24
    assert torch.equal(tokens(4, 2), alone)
    assert torch.equal(tokens(2, 1), alone)


def test_tokens_are_made_once(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    recipe = recipe_for("causal_lm", source="jsonl", path=write_rows([{"text": "abc" * 50}]))
    spec = spec_of("causal_lm")
    first = prepare(recipe, spec, cache=tmp_path / "c")
    tables = list((tmp_path / "c" / "tokens").glob("[!.]*"))
    assert len(tables) == 1
    stamp = (tables[0] / "table.json").stat().st_mtime_ns
    assert prepare(recipe, spec, cache=tmp_path / "c") == first
    assert (tables[0] / "table.json").stat().st_mtime_ns == stamp


def test_a_large_file_is_read_in_blocks(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(250_000))
    (tmp_path / "big.txt").write_text(text, encoding="utf-8")
    recipe = recipe_for("causal_lm", source="text", path=str(tmp_path / "big.txt"), shuffle=False)
    loader = build_batches(recipe, spec_of("causal_lm"), cache=tmp_path / "c")
    table = cast("Any", loader)._samples._table
    assert len(table) == 1, "one file is one document"
    assert bytes(table.row("input_ids", 0)[:-1].astype(np.uint8)) == text.encode()


def test_a_model_tokenizer_frames_documents(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[UNK]": 4, "hello": 5, "world": 6}
    core = Tokenizer(models.WordLevel(vocab=words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", mask_token="[MASK]", sep_token="[SEP]", cls_token="[CLS]"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("hello world", encoding="utf-8")
    recipe = recipe_for(
        "masked_lm",
        source="text",
        path=str(tmp_path / "a.txt"),
        tokenizer=str(tmp_path / "tokenizer"),
        packing=False,
        batch={"micro_batch": 1, "sequence_length": 8},
    )
    encoder = load_tokenizer(recipe.data, spec_of("masked_lm"))
    assert encoder.frame == ([1], [2])
    batch = next(build_batches(recipe, spec_of("masked_lm"), cache=tmp_path / "c"))[0]
    restored = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    assert restored[0].tolist() == [1, 5, 6, 2, 0, 0, 0, 0]


def test_fitted_packing_keeps_documents_whole() -> None:
    lengths = np.random.Generator(np.random.Philox(key=1)).integers(1, 140, size=300)
    packing = fit(lengths, np.arange(300), length=100)
    seen = sorted(document for row in range(len(packing)) for document, _, _ in packing.pieces(row))
    assert seen == list(range(300))
    fill = [sum(stop - start for _, start, stop in packing.pieces(row)) for row in range(len(packing))]
    assert max(fill) <= 100
    assert len(packing) <= 1.05 * np.minimum(lengths, 100).sum() / 100 + 1


def test_wrapped_packing_of_empty_and_single_documents() -> None:
    packing = wrap(np.asarray([5]), np.asarray([0]), length=3, seed=0)
    assert [packing.pieces(row) for row in range(len(packing))] == [[(0, 0, 3)], [(0, 3, 5)]]
    assert len(wrap(np.asarray([], dtype=np.int64), np.asarray([], dtype=np.int64), length=3, seed=0)) == 0
