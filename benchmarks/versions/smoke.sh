#!/bin/sh
# Install the oldest or the newest versions of the libraries that fsdptool supports, and run its main paths on
# them: detect, plan, emit-config, validate, and training on two CPU processes with a stop, a resume and an export.
#
#   sh benchmarks/versions/smoke.sh oldest|newest [FOLDER]      default FOLDER: a temporary one
#
# Downloads several gigabytes (the CUDA builds of PyTorch) unless FOLDER/venv exists already. FSDPTOOL_PYTHON
# selects the interpreter. Writes benchmarks/results/versions_oldest.json or versions_newest.json.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
kind=${1:?oldest or newest}
folder=${2:-$(mktemp -d)}
case $kind in
oldest)
    # No diffusers, bitsandbytes or torchao: language models must work without them.
    libraries="torch==2.11.0 transformers==5.17.0 accelerate==1.15.0 peft==0.21.* datasets==4.* huggingface_hub==1.*"
    ;;
newest)
    libraries="torch transformers accelerate diffusers peft datasets huggingface_hub"
    ;;
*)
    echo "error: $kind is neither oldest nor newest" >&2
    exit 2
    ;;
esac
if [ ! -x "$folder/venv/bin/python" ]; then
    "${FSDPTOOL_PYTHON:-python3}" -m venv "$folder/venv"
    # shellcheck disable=SC2086
    "$folder/venv/bin/python" -m pip install --quiet $libraries safetensors typer rich jsonschema PyYAML filelock \
        packaging psutil
fi
"$folder/venv/bin/python" "$root/benchmarks/gpu/install.py" "$folder/site"
PYTHONPATH="$root:$root/plugins:$folder/site" "$folder/venv/bin/python" "$root/benchmarks/versions/smoke.py" \
    "$root/benchmarks/results/versions_$kind.json"
