"""Scripts that are started as commands of click, typer and Modal."""

from __future__ import annotations

import pytest

from fsdptool.config.described import describe_run
from fsdptool.config.script_classes import absent_classes
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun

COMMAND = """
import click, modal, torch, typer
from click import option
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

DECORATORS
def main(PARAMETERS):
    model = AutoModelForCausalLM.from_pretrained(name)
    Trainer(model, TrainingArguments("o", per_device_train_batch_size=rows)).train()
END
"""


def described(text: str, *words: str) -> DescribedRun:
    """Return the run of a script that starts one."""
    run = describe_run(SourceText(text, "train.py"), words=words)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("decorators", "parameters", "end", "words"),
    [
        ("@app.command()", "name: str = 'gpt2', rows: int = typer.Option(3)", "app()", ()),
        ("@app.command()", "name: str = typer.Option('gpt2', '--name'), rows: int = 1", "", ("--rows", "3")),
        ("@app.function(gpu='H100')", "name, rows=1", "main.remote('gpt2', rows=3)", ()),
        (
            "@click.command()\n@click.option('--name', default='gpt2')\n@option('-b', 'rows', default=3)",
            "name, rows",
            "main()",
            (),
        ),
        (
            "@click.command()\n@click.option('--name', default='a')\n@click.option('--rows', '-r', type=int)",
            "name, rows",
            "main()",
            ("--name", "gpt2", "-r", "3"),
        ),
    ],
)
def test_commands_of_click_typer_and_modal_have_their_defaults(
    decorators: str, parameters: str, end: str, words: tuple[str, ...]
) -> None:
    text = COMMAND.replace("DECORATORS", decorators).replace("PARAMETERS", parameters).replace("END", end)
    run = described(text, *words)
    assert (run.model, run.micro_batch, run.problems) == ("gpt2", 3, ())


@pytest.mark.parametrize("parameters", ["name='gpt2', rows=4, **kwargs", "name='gpt2', rows=4, other=1"])
def test_defaults_of_a_function_that_nothing_calls_are_no_facts(parameters: str) -> None:
    text = COMMAND.replace("DECORATORS", "").replace("PARAMETERS", parameters).replace("END", "")
    keywords = "rows, **kwargs" if "kwargs" in parameters else "rows"
    run = described(text.replace("_size=rows", f"_size={keywords}"))
    assert (run.model, run.micro_batch) == (None, None)
    assert any("per_device_train_batch_size is not read: it is rows" in item for item in run.problems)
    assert any("takes further arguments" in item for item in run.problems) is ("kwargs" in parameters)


@pytest.mark.parametrize("decorator", ["", "@app.command()", "@click.command()"])
def test_a_default_says_nothing_of_the_classes_of_a_model(decorator: str) -> None:
    text = COMMAND.replace("DECORATORS", decorator).replace("PARAMETERS", "name='gpt2', rows=4")
    wrapped = "fsdp_config={'transformer_layer_cls_to_wrap': ['LlamaDecoderLayer']}"
    text = text.replace("_size=rows", f"_size=rows, {wrapped}").replace("END", "")
    assert absent_classes(SourceText(text, "train.py"), None) == ()
