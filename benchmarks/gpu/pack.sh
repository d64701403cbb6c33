#!/bin/sh
# Collect the wheels that a GPU machine without network lacks, into a folder outside git (about 52 MiB).
#
#   sh benchmarks/gpu/pack.sh FOLDER      PYTHON_VERSION (default 3.12) selects the target's Python
#
# The target is expected to have torch, transformers, accelerate, huggingface_hub, tokenizers, peft, typer, rich,
# PyYAML, numpy and pyarrow. Copy FOLDER there, next to the checkout, and give it to session.sh as WHEELS.
set -eu
folder=${1:?usage: pack.sh FOLDER}
mkdir -p "$folder"
platforms=""
for each in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms="$platforms --platform ${each}_x86_64"
done
# One call per package: each is pinned, without its own requirements, which the target has or the list names.
for package in \
    jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 \
    datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 \
    diffusers==0.42.1 importlib_metadata zipp lazy-importer \
    torchao==0.18.0 bitsandbytes==0.50.2; do
    # shellcheck disable=SC2086
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
        --implementation cp $platforms --dest "$folder" "$package"
done
du -sh "$folder"
