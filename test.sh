#!/bin/sh
# Check formatting, lint and types, then run the tests, in the same environment as run.sh.
# --quick (the first argument) omits the tests that are marked distributed or slow and takes about four
# minutes on two cores. Other arguments are passed to pytest.
group=dev
. "$(dirname -- "$0")/environment.sh"
cd "$root"
if [ "${1:-}" = --quick ]; then
    shift
    set -- -m "not distributed and not slow" "$@"
fi
ruff format --check .
ruff check .
mypy
exec python -m pytest -n 2 --dist loadgroup "$@"
