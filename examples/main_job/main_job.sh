#!/bin/sh
# From a model name to a trained checkpoint, on two CPU processes and without network access:
# detect, plan, emit-config, validate, train, export, and loading the export with transformers.
#
#   sh examples/main_job/main_job.sh [FOLDER]      default: runs/main_job in the working directory
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
work=${1:-runs/main_job}
export HF_HUB_OFFLINE=1

if [ -e "$work" ]; then
    echo "error: $work already exists" >&2
    echo "help: remove it, or pass another folder as the first argument" >&2
    exit 2
fi
mkdir -p "$work"

step() {
    printf '\n$ %s\n' "$*"
    "$@"
}

step fsdptool detect qwen3:tiny --world-size 2
step fsdptool plan --recipe "$here/recipe.yaml" --profile cpu-gloo --processes 2 --precision fp32 \
    --no-search -o "$work/plan.json"
step fsdptool emit-config --plan "$work/plan.json" -o "$work/fsdp.yaml"
step fsdptool validate "$work/fsdp.yaml"
step fsdptool train "$here/recipe.yaml" --config "$work/fsdp.yaml" -o "$work/run"
step fsdptool export "$work/run" -o "$work/exported"
step python "$here/load_export.py" "$work/exported"
