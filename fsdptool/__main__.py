"""``python -m fsdptool`` is the ``fsdptool`` command."""

from fsdptool.cli.app import main

if __name__ == "__main__":
    main()
