"""``python -m fsdptool`` is the ``fsdptool`` command."""

import sys
from pathlib import Path

if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
    # ``-m`` puts the working directory first: a ``torch.py`` that lies there must not be imported.
    del sys.path[0]

from fsdptool.cli.app import main

if __name__ == "__main__":
    main()
