"""``python -m hpcomm``."""

import sys

from hpcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
