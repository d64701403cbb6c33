"""The process that runs one reproduction: ``python benchmarks/advisories/run_case.py NAME``.

It prints what is seen as JSON; ``RANK``, ``WORLD_SIZE`` and ``STORE`` are in the environment.
``reproduce.py`` starts it with other releases in front of the installed ones.
"""

from __future__ import annotations

import json
import os
import sys

import of_accelerate  # noqa: F401  (each module registers its cases)
import of_others  # noqa: F401
from reproductions import CASES

print(json.dumps({"seen": CASES[sys.argv[1]].show()}), flush=True)
# What the libraries do on leaving is not looked at.
os._exit(0)
