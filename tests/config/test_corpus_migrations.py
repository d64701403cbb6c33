"""Every file of the corpus in every dialect: the same settings there, or one line that says why not."""

from __future__ import annotations

from pathlib import Path

import corpus
import jsonschema
import pytest
import yaml

from fsdptool.config import read_settings
from fsdptool.config.canonical import facts_from
from fsdptool.config.described import describe_path
from fsdptool.config.dialects import load_registry, run_writers
from fsdptool.config.migrate import migrate_file, repair
from fsdptool.errors import ConfigError
from fsdptool.files.values import load_schema

FILES = corpus.files()
LAUNCH = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
ENDINGS = {"trainer": ".json", "simpletuner": ".json", "env": ".env", "flags": ".sh", "torchtitan": ".toml"}


def test_other_dialects_are_refused_where_there_is_nothing_to_say(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_family": "flux", "model_type": "full"}')
    assert migrate_file(path).after == path.read_text()
    refused = migrate_file(path, to="accelerate")
    assert refused.after is None and refused.refusal == "the file does not configure FSDP"


def _describes_a_run(path: Path) -> bool:
    try:
        run = describe_path(path)
    except ConfigError:
        return False
    return run is not None and run.model is not None


if corpus.folder() is not None:

    @pytest.mark.slow
    @pytest.mark.parametrize("to", load_registry().names)
    def test_another_dialect_says_the_same(to: str, tmp_path: Path) -> None:
        written = 0
        few = "wrap_classes" in load_registry().get(to).cannot
        for path in FILES[:: 4 if few else 1]:
            reading = corpus.reading(path)
            if reading.dialect in (None, to):
                continue
            if to in run_writers() and _describes_a_run(path):
                continue  # translated as a whole: tests/config/test_translation.py
            made = migrate_file(path, to=to)
            if made.after is None:
                assert made.refusal and "\n" not in made.refusal, path.name
                continue
            copy = tmp_path / f"{path.stem}{ENDINGS.get(to, '.yaml')}"
            copy.write_text(made.after)
            again = read_settings(copy)
            assert again.dialect == to and again.version == 2, path.name
            assert not again.errors, (path.name, [item.message for item in again.errors])
            assert reading.settings is not None and again.settings is not None
            before, after = facts_from(reading.settings), facts_from(again.settings)
            # What belongs to the launch is said, not lost in silence.
            for name in LAUNCH:
                same = before.pop(name) == after.pop(name)
                assert same or any(note.startswith(f"give {name} = ") for note in made.notes), path.name
            if any(note.startswith("wrap_classes ") for note in made.notes):
                assert before.pop("wrap_classes") and not after.pop("wrap_classes"), path.name
            for name in ("rdzv_backend", "debug"):
                before.pop(name), after.pop(name)
            assert after == before, path.name
            assert migrate_file(copy, to=to).after == made.after, path.name
            written += 1
        # Without words for classes there is little to write.
        assert written > (0 if few else 50) or load_registry().get(to).base is not None

    @pytest.mark.slow
    def test_the_schema_alone_accepts_every_good_file() -> None:
        """Good: FSDP2 without a finding, as it is or after all fixes. What was FSDP1 it rejects."""
        schema = jsonschema.Draft202012Validator(load_schema("accelerate-fsdp2"))
        good = rejected = 0
        for path in FILES:
            reading = corpus.reading(path)
            if reading.dialect != "accelerate":
                continue
            for judged in (reading, repair(reading, unsafe=True).reading):
                assert judged.source is not None
                accepted = schema.is_valid(yaml.safe_load(judged.source.text))
                worst = {item.severity for item in judged.diagnostics}
                if judged.version == 2 and worst <= {"info"}:
                    assert accepted, path.name
                    good += 1
                elif judged.version == 1:
                    assert not accepted, path.name
                    rejected += 1
        assert good > 100 and rejected > 50
