"""The command: `ebbtide`, or `python -m ebbtide`."""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    # OpenMP reads this once, when torch is loaded. Threads that spin after each parallel region take the
    # core from the thread that moves chunks beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ebbtide.cli.app import run, said_plainly

    warnings.formatwarning = said_plainly
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
