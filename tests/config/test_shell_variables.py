"""Variables of a shell script: what its assignments say of a command, against what bash makes of it."""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path

import pytest

from fsdptool.config.command_lines import NamedFiles
from fsdptool.config.described import describe_run
from fsdptool.config.here_documents import here_documents
from fsdptool.config.shell import without_lists, words_of
from fsdptool.config.shell_variables import step_of_srun, substituted
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun

SOURCED = 'A=8\nB=${A}0; if [ -z "$C" ]; then C=set; fi\nexport D="two words"\ntouch ran\n'


def words(script: str, files: NamedFiles | None = None) -> list[str]:
    """Return the words of the last line of a script, after substitution."""
    text = substituted(script, files)
    last = text.rstrip("\n").rpartition("\n")[2]
    return [str(word.value) for word in words_of(last, 0, len(last))]


@pytest.mark.parametrize(
    "script",
    [
        "A=8\necho x $A ${A}0",
        'A=(\n  x=1 \n  y="a b"\n)\necho x ${A[@]} ${A[*]} z',
        'A=" \\\n --b 1 \\\n --c"\necho x $A',
        'A=3\nif [ "$A" -ge 3 ]; then B=1; else B=2; fi\nif [[ $A -lt 3 ]]; then B=4; fi\necho x $B',
        "A=true\nif $A; then B=1; else B=2; fi\necho x $B",
        'B=1\nwhile getopts "b:" o; do B=$OPTARG; done\nfor a in "$@"; do B=$a; done\necho x $B',
        "N=${N:-4}\necho x --n=$N --m ${M:-$((N * 2 + 1))}",
        'A="a b"\necho x $A "$A" \'$A\'',
        "LEN=$((1024 * 2))\nSUM=$(((LEN + 512) * 2 / 3 % 1000))\necho x $SUM $((LEN - -1))",
        'ARGS=(--bf16 "two words" k=$((2 + 3)))\nARGS+=(--lr 1e-5)\necho x "${ARGS[@]}" "${ARGS[0]}"',
        "OPTS='--a 1'\nOPTS=\"$OPTS --b 2\"\necho x $OPTS",
        'ARGS=(--a 1 "b c")\nX="${ARGS[*]}"; Y="${ARGS[@]}"\nZ="$X end"\necho x $X "$Y" $Z',
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
        'L=(a)\nif [ "${U:-1}" != 0 ]; then L=(b c); fi\necho x "${L[@]}" -m d',
        'U=0\nif [[ "${U:-1}" == "1" ]]; then K=one; else K="two $U"; fi\necho x $K',
        "N=2\necho x $(expr 16 / $N) `expr $N \\* 3`",
        "G=0,1,5\nN=$(echo $G | tr ',' '\\n' | wc -l)\necho x $N $(echo \"$G\" | awk -F',' '{print NF}')",
        "G=4,6\nN=$(awk -F',' '{print NF}' <<< \"$G\")\necho x $N",
        "G=0,1,5\nIFS=',' read -r -a L <<< \"$G\"\necho x ${#L[@]} ${L[2]}",
        "G=0,1\nIFS=, read -ra L <<< \"$G\"\nN=${N:-${#L[@]}}\necho x $N",
        "echo x $(( -7 / 2 )) $(( -7 % 4 )) $(( 7 / -2 ))",
        'G="0,1,2,3"\necho x $(printf %s "$G" | tr "," "\\n" | wc -l) $(echo "$G" | tr "," "\\n" | wc -l)',
        'IFS=, read -ra G <<< "0,1,"\necho x ${#G[@]}',
        "A=1; unset A\necho x ${A:-2}",
        "A=1\n(A=2; true)\necho x $A",
        "A=1\nf() { A=2; }\necho x $A",
        "A=1\nf() { A=2; }\nf\necho x $A",
        "A=1\nfunction f { A=2; }\nf\necho x $A",
        'A=2\nmain() { A=${1:-4}; }\nmain "$@"\necho x $A',
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
        ("A=$((10#08+1))", "$A"),
        ("N=010; A=$((N+1))", "$A"),
        ("A=$(expr 8/2)", "$A"),
        ('B=1; A=1\nif [ "$B" = 1 ] && nvidia-smi; then A=2; fi', "$A"),
        ('B=1; A=1\nif [ "$B" = 2 ] || true; then A=2; fi', "$A"),
        ("A=1\nif nvidia-smi; then unset A; fi", "$A"),
        ("f() { A=${1:-8}; }\nf 4", "$A"),
        ("f() { local A=8; }\nA=$(date)\nf", "$A"),
        ("A=(1 2)\nA[0]=3", "$A"),
        ("A=(1 2)\nA[1]+=3", "$A"),
        ("A=(1 2)\nunset 'A[0]'", "$A"),
        ("A=(1 2)\nunset A[0]", "$A"),
        ("A=(1 2)\nreadarray -t A < f", "$A"),
        ("A=(1 2)\nmapfile A < <(ls)", "$A"),
        ("A=(1 2)\nA[0]=3\nA=(${A[@]} 4)", "$A"),
        ("declare -A A=([b]=4 [c]=d)", "$A"),
        ("A=(" + "w " * 9000 + ")\nA=(${A[@]} ${A[@]})", "$A"),
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


@pytest.mark.parametrize(
    "line", ["source ./env.sh", ". env.sh", "F=env.sh\nsource $F", 'cd . && true; source "env.sh"']
)
def test_a_sourced_file_is_read_and_not_run(line: str, tmp_path: Path) -> None:
    script = f'A=1\n{line}\necho x $A $B $C "$D"'
    (tmp_path / "env.sh").write_text(SOURCED)
    assert words(script, NamedFiles((tmp_path,)))[2:] == ["8", "80", "set", "two words"]
    assert not (tmp_path / "ran").exists()
    bash = ["bash", "-c", script.replace("echo x", "printf '%s\\n'")]
    out = subprocess.run(
        bash, capture_output=True, text=True, check=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
    )
    assert out.stdout.splitlines() == ["8", "80", "set", "two words"]


def test_a_file_that_is_not_there_or_sources_itself_leaves_variables(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("source env.sh\nA=1\n")
    files = NamedFiles((tmp_path,))
    assert words("source other.sh\nsource ~/.bashrc\nsource venv/bin/activate\necho x $A", files)[2:] == [
        "$A"
    ]
    assert words("source env.sh\necho x $A", files)[2:] == ["1"]
    assert words("[ -f env.sh ] && source env.sh\necho x $A", files)[2:] == ["$A"]


WRITTEN = """\
M=org/m
cat > ./a.yaml <<EOF
model: $M
it: isn't quoted
EOF
cat <<'END' > out/b.json
{"x": "$M"}
END
tee -a log.txt <<EOF
not known before
EOF
\tsudo tee "c d.yml" <<-EOF
\tx: 1
\tEOF
cat >> a.yaml << EOF
more: 1
EOF
cat > twice.yaml <<EOF
x: 1
EOF
cat > twice.yaml <<EOF
x: 2
EOF
cat > edited.yaml <<EOF
x: 1
EOF
sed -i 's/1/2/' edited.yaml
python - <<EOF > made.yaml
print("x: 1")
EOF
cat > open.yaml <<EOF
x: 1
"""


def test_here_documents_are_the_files_that_bash_writes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    script = WRITTEN.replace("sudo ", "")
    subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
    )
    found = here_documents(WRITTEN, substituted(WRITTEN))
    assert {name for name, text in found.items() if text is None} == {"twice.yaml", "edited.yaml", "log.txt"}
    read = {name: text for name, text in found.items() if text is not None}
    assert set(read) == {"a.yaml", "out/b.json", "c d.yml", "open.yaml"}
    assert read == {name: (tmp_path / name).read_text() for name in read}


def test_a_here_document_drops_the_backslash_as_bash_does() -> None:
    script = "A=1\ncat > a.yaml <<EOF\na: $A \\$A \\\\ \\`x\\`\nEOF\n"
    assert here_documents(script, substituted(script)) == {"a.yaml": "a: 1 $A \\ `x`\n"}


def test_only_the_mark_itself_ends_a_here_document() -> None:
    script = (
        "cat > a.yaml <<EOF\nx: 1\n EOF\nEOF\ncat > b.yaml <<-EOF\n\tx: 2\n\tEOF\nsed -i s/1/2/ data.yaml\n"
    )
    assert here_documents(script, script) == {"a.yaml": "x: 1\n EOF\n", "b.yaml": "x: 2\n"}


@pytest.mark.parametrize(
    "script",
    [
        "cat <<A " * 600 + "\n" + "x\n" * 4_000,
        "cat > f <<EOX\n" * 4_000,
        "cat > f <<A\n" * 4_000 + "\tA\n" * 4_000,
        "".join(f"cat > f{at} <<A\nx: 1\nA\n" for at in range(4_000)) + "sed -i s/1/2/ f7\n",
    ],
    ids=["one line", "never closed", "closed otherwise", "many names"],
)
def test_many_here_documents_are_read_in_a_short_time(script: str) -> None:
    before = time.process_time()
    written = here_documents(script, substituted(f"{script}A=$B\n"))
    assert written.get("f7") is None
    assert time.process_time() - before < 10


@pytest.mark.parametrize("name", ["LARGE_SET", "TARGET_CONFIG", "OPTIM", "PARAMETER"])
def test_other_words_in_a_name_make_no_list_of_arguments(name: str) -> None:
    assert without_lists([f"${name}", f"${{{name}}}", "$EXTRA_ARGS", "${OPTS}"])[0] == [
        f"${name}",
        f"${{{name}}}",
    ]


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        ("#SBATCH --nodes=2 --ntasks-per-node 1 # one launcher each\n#SBATCH --gpus-per-node=8", "2 8 2"),
        ("#SBATCH -N4\n\n# a comment\n#SBATCH -n 16 --gres=gpu:a100:4", "4 4 16"),
        ("#SBATCH --gres gpu:2", "1 2 $SLURM_NTASKS"),
        ("#SBATCH --gres=nvme:1,gpu:8", "1 8 $SLURM_NTASKS"),
        ("#SBATCH --gres=shard:4", "1 $SLURM_GPUS_ON_NODE $SLURM_NTASKS"),
        ("#SBATCH -N 2-4 --gpus-per-node=h100:8", "$SLURM_NNODES 8 $SLURM_NTASKS"),
        ("#SBATCH -N 2\nset -e\n#SBATCH -N 9", "2 $SLURM_GPUS_ON_NODE $SLURM_NTASKS"),
        ("set -e\n#SBATCH -N 9", "$SLURM_NNODES $SLURM_GPUS_ON_NODE $SLURM_NTASKS"),
    ],
)
def test_slurm_sets_what_a_batch_script_asks_for(asked: str, value: str) -> None:
    said = words(f"#!/bin/bash\n{asked}\necho $SLURM_NNODES $SLURM_GPUS_ON_NODE $SLURM_NTASKS")
    assert " ".join(said[1:]) == value


def test_a_shell_that_slurm_starts_has_its_variables() -> None:
    for written in ("$SLURM_NNODES", "${SLURM_NNODES}", "${SLURM_NNODES:-1}"):
        text = f"#SBATCH -N 2\nsrun bash -c 'torchrun --nnodes={written} --node_rank=$SLURM_PROCID t.py'\n"
        assert "--nnodes=2 --node_rank=$SLURM_PROCID" in substituted(text)
    branch = "#SBATCH -N 2\nif [ -f small ]; then SLURM_NNODES=1; fi\ntorchrun --nnodes $SLURM_NNODES t.py\n"
    assert "--nnodes $SLURM_NNODES" in substituted(branch)


@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("srun python t.py", (16, 2)),
        ("srun --ntasks=4 \\\n  --mem=0 \\\n  python t.py", (4, 2)),
        ("srun --nodes=1 --ntasks=4 python t.py", (4, 1)),
        ("srun --ntasks-per-node 1 bash -c 'cd x && python t.py'", (2, 2)),
        ("srun --nodes=1 hostname; python t.py", None),
        ("python t.py", None),
    ],
)
def test_srun_starts_a_command_once_for_each_task(
    command: str, step: tuple[int | None, int | None] | None
) -> None:
    text = f"#SBATCH -N2 --ntasks-per-node=8\n{command}"
    assert step_of_srun(text, text.index("python")) == step


def read(text: str) -> DescribedRun:
    """Return the run of a script, which starts one."""
    run = describe_run(SourceText(text))
    assert run is not None
    return run


def test_lines_that_go_on_within_quotes_are_one_text() -> None:
    run = read("""#!/bin/bash
#SBATCH --nodes=2
export GPUS=4
export LAUNCHER="accelerate launch \\
    --num_processes $((SLURM_NNODES * GPUS)) \\
    "
export ARGS=" \\
    --model_name_or_path a/b \\
    --per_device_train_batch_size 2 \\
    --max_length 512 --packing \\
    "
srun $LAUNCHER trl/scripts/sft.py $ARGS
""")
    assert (run.model, run.micro_batch, run.packing, run.processes) == ("a/b", 2, True, 8)
    assert run.problems == ()


def test_a_script_is_read_as_it_is_called_without_arguments() -> None:
    run = read("""
MODEL=a/b
RANK=8
LONG=false
EXTRA=()
while getopts ":m:r:l" option; do
  case ${option} in
    m) MODEL="$OPTARG" ;;
    r) RANK="$OPTARG" ;;
  esac
done
for argument in "$@"; do
  MODEL=$argument
done
if [[ "$RANK" -gt 16 ]]; then
  EXTRA+=(--load_in_4bit)
fi
if $LONG; then
  EXTRA+=(--max_length 9999)
fi
if [ $RANK -eq 8 ]; then
  EXTRA+=(--packing)
fi
trl sft --model_name_or_path "$MODEL" --dataset_name d --use_peft --lora_r "$RANK" "${EXTRA[@]}"
""")
    assert (run.model, run.lora_rank, run.method, run.sequence_length) == ("a/b", 8, "lora", 1024)
    assert run.packing and run.problems == ()
