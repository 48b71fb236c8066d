"""The `remtta` script; `python -m remtta` is the same."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an interrupt before a command has its own handlers ends it quietly."""
    try:
        from remtta.cli import main as run  # takes a moment

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
