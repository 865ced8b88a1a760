"""`python -m paceline` is `paceline`. It imports nothing more from the current folder, which Python put first."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]

from paceline.cli import main

main()
