"""``python -m zbcompile`` and the command ``zbcompile``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run one command and return the exit code; Ctrl-C while the command line is loaded ends it, too."""
    try:
        from zbcompile.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("zbcompile: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
