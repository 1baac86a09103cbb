"""`python -m flowrl`, also as `torchrun ... -m flowrl train RECIPE`."""

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
