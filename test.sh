#!/bin/sh
# Formatting, lint, types, then the tests, in the same environment as run.sh. Arguments go to pytest.
group=dev
. "$(dirname -- "$0")/environment.sh"
cd "$root"
ruff format --check .
ruff check .
mypy
exec python -m pytest -n 2 --dist loadgroup "$@"
