"""``python -m offload``, the same as the ``offload`` command."""

import sys

from offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
