#!/bin/sh
# Check formatting, lint and types, then run the tests, in the same environment as run.sh.
# --quick (the first argument) omits the tests that are marked distributed or slow and takes about three minutes
# on two cores. --sweeps adds the tests that try further settings of what others hold; run it before a release.
# Other arguments are passed to pytest.
group=dev
. "$(dirname -- "$0")/environment.sh"
cd "$root"
# Twice as many workers as cores: tests of several processes spend half of their time waiting for one another.
workers=4
if [ "${1:-}" = --quick ]; then
    shift
    workers=2
    set -- -m "not distributed and not slow" "$@"
fi
ruff format --check .
ruff check .
lint-imports
# mypy runs beside the first tests; its output is printed after theirs.
output=$(mktemp)
trap 'rm -f "$output"' EXIT
mypy >"$output" 2>&1 &
types=$!
status=0
# In a new clone each worker would compile the same modules: collecting once before them costs less in all.
[ -d tests/__pycache__ ] || python -m pytest --collect-only -q >/dev/null 2>&1 || true
# A test that hangs fails by its name, with the stacks of its threads; the slowest takes three minutes beside others.
python -m pytest -n $workers --dist loadgroup --timeout 600 --timeout-method signal "$@" || status=$?
wait "$types" || status=$?
cat "$output"
exit "$status"
