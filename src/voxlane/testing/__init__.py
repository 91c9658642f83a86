"""An object-store emulator for tests, benchmarks and demos; needs ``pip install 'voxlane[testing]'`` to run.

Importing this module needs only the standard library, because the server runs in a separate process. The path of a
request::

    request_parsing -> faults (delay, fail) -> access -> xml_api | json_api -> objects, bodies
                    -> responses -> faults (cut, truncate, stall)
"""

from __future__ import annotations

from voxlane.testing.access import Access
from voxlane.testing.bodies import synthetic
from voxlane.testing.counters import Counters, Kind, Tally
from voxlane.testing.emulator import Emulator, EmulatorError, OpenUpload
from voxlane.testing.faults import Faults

__all__ = ["Access", "Counters", "Emulator", "EmulatorError", "Faults", "Kind", "OpenUpload", "Tally", "synthetic"]
