"""`python -m fabricx` is the command `fabricx`."""

from __future__ import annotations

from fabricx.cli.main import main

if __name__ == "__main__":
    main()
