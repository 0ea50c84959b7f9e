"""`python -m tot`: the command line."""

import sys

from tot.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
