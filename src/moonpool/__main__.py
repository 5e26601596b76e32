"""`moonpool` on the command line, and `python -m moonpool`."""

import sys

from moonpool.runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
