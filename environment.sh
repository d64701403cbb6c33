# Sourced by run.sh and test.sh: creates .venv next to this file on the first call and puts it on PATH.
# Set group=dev first to install the tools that the tests need. FSDPTOOL_VENV selects another place,
# FSDPTOOL_PYTHON another interpreter (3.11 or newer).

set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
venv=${FSDPTOOL_VENV:-$root/.venv}
python=${FSDPTOOL_PYTHON:-python3}
group=${group:-}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "error: $python is missing or older than Python 3.11" >&2
    echo "help: install Python 3.11 or newer, or select one: FSDPTOOL_PYTHON=/path/to/python3.12" >&2
    exit 2
}

# The installation depends only on these files: install again only if one of them has changed.
stamp="$venv/.fsdptool-${group:-user}"
wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into $venv (the first time downloads PyTorch) ..." >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
    # Constraints pin the versions that the tests ran with; --group adds the tools that the tests need.
    # Of all installed modules a few are ever imported. Python compiles those when it first meets them.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$root/constraints.txt" --editable "$root[train]" ${group:+--group "$root/pyproject.toml:$group"}
    printf '%s' "$wanted" >"$stamp"
fi
# Without its bytecode each of a run's processes would compile the same modules again.
unset PYTHONDONTWRITEBYTECODE
PATH="$venv/bin:$PATH"
export PATH
