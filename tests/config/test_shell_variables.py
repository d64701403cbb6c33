"""Variables of a shell script: what its assignments say of a command, against what bash makes of it."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from fsdptool.config.shell import words_of
from fsdptool.config.shell_variables import substituted


def words(script: str) -> list[str]:
    """Return the words of the last line of a script, after substitution."""
    text = substituted(script)
    last = text.rstrip("\n").rpartition("\n")[2]
    return [str(word.value) for word in words_of(last, 0, len(last))]


@pytest.mark.parametrize(
    "script",
    [
        "A=8\necho x $A ${A}0",
        "N=${N:-4}\necho x --n=$N --m ${M:-$((N * 2 + 1))}",
        'A="a b"\necho x $A "$A" \'$A\'',
        "LEN=$((1024 * 2))\nSUM=$(((LEN + 512) * 2 / 3 % 1000))\necho x $SUM $((LEN - -1))",
        'ARGS=(--bf16 "two words" k=$((2 + 3)))\nARGS+=(--lr 1e-5)\necho x "${ARGS[@]}" "${ARGS[0]}"',
        "OPTS='--a 1'\nOPTS=\"$OPTS --b 2\"\necho x $OPTS",
        "A=1; export B=2 C=3\necho x $A$B$C",
        'MODE=async\nif [ "$MODE" = "async" ]; then K=one; else K=two; fi\necho x $K',
        "if [ -z \"$X\" ]; then X=set; fi\necho x $X",
        "P=/a/b/c.yaml\necho x ${P##*/}",
        "N=2\nB=$[$N * 2 + 1]\necho x $B $[N + B]",
        'if [[ "$UNSET" == "" ]]; then K=; else K="--flag $UNSET"; fi\nC="run $K --n 1"\necho x $C',
        "E=\necho x $E --next \"$E\"",
        'J=\'{"use": false}\'\necho x --json "$J" "$@" end',
        ": ${D:=deflt}\necho x $D",
        "T=${1:-dpo}\necho x $T",
        "A=1\nA=2\necho x ${A:+yes} ${NONE:+no}end",
    ],
)  # fmt: skip
def test_a_command_has_the_words_that_bash_gives_it(script: str) -> None:
    printing = script.replace("echo x", "printf '%s\\n' x")
    out = subprocess.run(
        ["bash", "-c", printing], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    ).stdout.removesuffix("\n")
    assert words(script)[1:] == out.split("\n")


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ('A=$(nvidia-smi -L | wc -l)', "$A"),
        ("if grep -q x f; then A=1; fi", "$A"),
        ("A=1\nif grep -q x f; then A=2; fi", "$A"),
        ("A=1\n[ -d y ] || { A=2; }", "$A"),
        ("for A in 1 2; do echo; done", "$A"),
        ("read A", "$A"),
        ("case $1 in\n a) A=1 ;;\n b) A=2 ;;\nesac", "$A"),
        ("A=$((2 ** 80))", "$A"),
        ("A=$((1 / 0))", "$A"),
        ("", "$A"),
    ],
)  # fmt: skip
def test_what_only_a_run_decides_stays_a_variable(before: str, kept: str) -> None:
    assert words(f"{before}\necho x $A")[2:] == [kept]


def test_a_branch_that_agrees_with_what_was_before_changes_nothing() -> None:
    assert words("A=1\nif grep -q x f; then A=1; fi\necho x $A")[2:] == ["1"]


def test_options_are_not_read_without_arguments() -> None:
    script = (
        'M=org/a\nwhile [ $# -gt 0 ]; do\ncase "$1" in\n--model) M="$2"; shift 2 ;;\nesac\ndone\necho x $M'
    )
    assert words(script)[2:] == ["org/a"]


def test_folders_of_the_script_and_of_its_user_are_paths() -> None:
    assert words('D=$(cd "$(dirname "$0")" && pwd)\necho x $D/m $HOME/n ${PWD}')[2:] == ["./m", "~/n", "."]


def test_a_loop_over_one_value_has_that_value() -> None:
    assert "train.py --model org/one\n" in substituted("for M in org/one; do\ntrain.py --model $M\ndone\n")


def test_values_cannot_grow_without_end() -> None:
    script = "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A\n" * 40 + "echo x $A"
    assert len(substituted(script)) < 400_000


@pytest.mark.parametrize("piece", ["$(", "${", '"$(', "$((", "`", "$(' ", "A=("])
def test_brackets_that_never_close_are_text(piece: str) -> None:
    text = f"A=1\npython train.py {piece * 5_000} $A\n"
    assert substituted(text).startswith("A=1\npython train.py")


def test_quoting_survives() -> None:
    value = 'it\'s "so" $5 \\ `x`'
    script = f'A={shlex.quote(value)}\necho x "$A"'
    assert words(script)[2:] == [value]
