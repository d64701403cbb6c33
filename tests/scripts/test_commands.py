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


@pytest.mark.parametrize(
    ("decorators", "parameters", "end", "words"),
    [
        ("@app.command()", "name='gpt2', rows: int = typer.Option(8, '--bs', '-b')", "", ("--bs", "3")),
        ("@app.command()", "name='gpt2', rows: Annotated[int, typer.Option('-b')] = 8", "", ("-b", "3")),
        ("@app.command()", "name: str = typer.Argument('a'), rows: int = 8", "", ("--rows", "3", "gpt2")),
        ("@app.command()", "name: str, rows: int = 3", "", ("gpt2",)),
        ("", "name: str = typer.Argument('a'), rows: int = 8", "typer.run(main)", ("gpt2", "--rows=3")),
        ("@app.command('fit')\n", "name='gpt2', rows: int = 8", "", ("--rows", "3")),
        (
            "@click.command()\n@click.argument('name', default='a')\n@click.option('--rows', default=8)",
            "name, rows",
            "main()",
            ("gpt2", "--rows", "3"),
        ),
        (
            "@click.command()\n@click.argument('name')\n@click.option('--rows', default=8)",
            "name, rows",
            "main.main(['gpt2', '--rows', '3'])",
            (),
        ),
        (
            "@click.command()\n@click.argument('name')\n@click.option('--rows', default=8)",
            "name, rows",
            "main(standalone_mode=False)",
            ("gpt2", "--rows", "3"),
        ),
    ],
)
def test_a_command_line_is_read_as_click_and_typer_read_it(
    decorators: str, parameters: str, end: str, words: tuple[str, ...]
) -> None:
    text = COMMAND.replace("DECORATORS", decorators).replace("PARAMETERS", parameters).replace("END", end)
    run = described(text, *words)
    assert (run.model, run.micro_batch, run.problems) == ("gpt2", 3, ())


@pytest.mark.parametrize(
    ("option", "words", "expected"),
    [
        ("typer.Option(True)", ("--no-ckpt",), "none"),
        ("typer.Option(True)", (), "full"),
        ("True", ("--no-ckpt",), "none"),
        ("typer.Option(False, '--save/--keep')", ("--save",), "full"),
        ("typer.Option(True, '--save/--keep')", ("--keep",), "none"),
        ("'--ckpt/--no-ckpt', default=True", ("--no-ckpt",), "none"),
        ("'--ckpt/--no-ckpt', default=False", ("--ckpt",), "full"),
        ("'--ckpt', is_flag=True", (), "none"),
        ("'--ckpt', default=True, callback=check", (), None),
    ],
)
def test_switches_of_commands_are_turned_off(
    option: str, words: tuple[str, ...], expected: str | None
) -> None:
    of_click = option.startswith("'")
    decorators = f"@click.command()\n@click.option({option})" if of_click else "@app.command()"
    parameters = "ckpt, name='gpt2', rows=3" if of_click else f"name='gpt2', rows=3, ckpt: bool = {option}"
    text = COMMAND.replace("DECORATORS", decorators).replace("PARAMETERS", parameters).replace("END", "")
    run = described(text.replace("_size=rows", "_size=rows, gradient_checkpointing=ckpt"), *words)
    assert run.gradient_checkpointing == expected


@pytest.mark.parametrize(
    "default",
    [
        "typer.Option(settings.ROWS)",
        "typer.Option(...)",
        "typer.Option(default_factory=rows_of)",
        "typer.Option(8, prompt=True)",
        "typer.Option(8, callback=checked)",
    ],
)
def test_an_option_without_a_known_default_is_left_open(default: str) -> None:
    parameters = f"name='gpt2', rows: int = {default}"
    text = COMMAND.replace("DECORATORS", "@app.command()").replace("PARAMETERS", parameters)
    run = described(text.replace("END", ""))
    assert (run.model, run.micro_batch) == ("gpt2", None)
    assert any("per_device_train_batch_size is not read" in problem for problem in run.problems)


@pytest.mark.parametrize(
    "option", ["app.command()|rows=SIZE", "cli.command()|rows", "cli.command('tune-it')|rows"]
)
@pytest.mark.parametrize(("word", "model"), [("tune-it", "b"), ("prepare", "a")])
def test_the_word_that_names_a_command_starts_it(option: str, word: str, model: str) -> None:
    decorator, parameters = option.split("|")
    text = "import click, typer\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    for name, size in (("prepare", 2), ("tune_it", 7)):
        called = decorator.replace("tune-it", name.replace("_", "-"))
        declared = f"@click.option('--rows', default={size})\n" if called.startswith("cli") else ""
        text += f"@{called}\n{declared}def {name}({parameters.replace('SIZE', str(size))}):\n"
        text += f"    model = AutoModelForCausalLM.from_pretrained('{'a' if size == 2 else 'b'}')\n"
        text += "    Trainer(model, TrainingArguments('o', per_device_train_batch_size=rows)).train()\n"
    run = described(text, word)
    assert (run.model, run.micro_batch) == (model, 2 if model == "a" else 7)
    assert not any("commands" in problem for problem in run.problems)
    assert described(text, word, "--rows", "9").micro_batch == 9
    assert any("one of the commands" in problem for problem in described(text).problems)


def test_an_option_that_no_command_has_is_told() -> None:
    text = COMMAND.replace("DECORATORS", "@app.command()").replace("PARAMETERS", "name='gpt2', rows=4")
    run = described(text.replace("END", ""), "--row", "8")
    assert run.problems == ("the script has no option --row",)
