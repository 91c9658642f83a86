"""`dataflux_core.user_agent`."""

from voxlane.compat.dataflux.clients import USER_AGENT as user_agent_string  # noqa: N811 - Dataflux's name
from voxlane.compat.dataflux.clients import add_user_agent as add_dataflux_user_agent

__all__ = ["add_dataflux_user_agent", "user_agent_string"]
