#!/bin/sh
# Measure on a machine with a GPU (or rehearse on the CPU): every row is a process of its own with a time limit,
# a line is written after every row, and rows that are already there are skipped.
#
#   sh benchmarks/gpu/session.sh [options] STAGE...     STAGE: smoke memory train paired variants
#
#   --out FOLDER      where rows go, one STAGE.jsonl each (default: $OUT, or benchmarks/results/gpu)
#   --seconds N       stop starting rows after N seconds, and end a row that runs past them (default 570)
#   --small           tiny models on the CPU: a rehearsal of every row
#   --only TEXT       rows whose name contains TEXT
#   --retry           run rows again that ended with an error
#   --list            print the rows
#
# WHEELS names a folder that pack.sh filled; PYTHON an interpreter. An example of half an hour in three calls:
#
#   WHEELS=.wheels sh benchmarks/gpu/session.sh smoke memory
#   WHEELS=.wheels sh benchmarks/gpu/session.sh memory train
#   WHEELS=.wheels sh benchmarks/gpu/session.sh train paired variants
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
python=${PYTHON:-python3}
site=${SITE:-${TMPDIR:-/tmp}/fsdptool-site-$(id -u)}
"$python" "$root/benchmarks/gpu/install.py" "$site" ${WHEELS:+"$WHEELS"}
PYTHONPATH="$root:$root/plugins:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NO_COLOR=1
# The rest of the session after its time limit is lost, so the script itself ends in time.
exec "$python" "$root/benchmarks/gpu/session.py" "$@"
