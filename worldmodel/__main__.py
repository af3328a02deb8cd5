"""`python -m worldmodel`: the command line."""

import sys

from worldmodel.cli import main

if __name__ == "__main__":
    sys.exit(main())
