"""`moonpool` on the command line, and `python -m moonpool`."""

import signal
import sys


def main() -> int:
    """Run a command and return its exit code."""
    try:
        from moonpool.runtime.cli.main import main as run
    except KeyboardInterrupt:
        # The import takes a while on a busy machine.
        sys.stderr.write("moonpool: interrupted\n")
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
