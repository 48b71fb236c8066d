"""The `remtta` script; `python -m remtta` is the same."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def main() -> None:
    """Run the command line, and exit; an interrupt before a command has its own handlers ends it quietly."""
    code: object = 0
    try:
        from remtta.cli.application import main as run  # takes a moment

        run()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code or 0
    if isinstance(code, int) and any(thread.daemon for thread in threading.enumerate()):
        # The reader of a camera may be in a call of OpenCV, which aborts a process that shuts down as usual.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
