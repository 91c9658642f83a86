"""`python -m voxlane`, for launchers that start modules: torchrun ... -m -- voxlane train ..."""

import sys

try:
    from voxlane.cli.main import main
except KeyboardInterrupt:  # Ctrl-C before the command line could handle it
    sys.exit(130)

sys.exit(main())
