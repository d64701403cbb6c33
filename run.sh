#!/bin/sh
# Run the main job: detect, plan, emit-config, validate and train a small decoder on two CPU processes.
. "$(dirname -- "$0")/environment.sh"
exec sh "$root/examples/main_job/main_job.sh" "$@"
