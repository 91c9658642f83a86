"""`python -m voxlane`, for launchers that start modules: torchrun ... -m -- voxlane train ..."""

import sys

from voxlane.cli.main import main

sys.exit(main())
