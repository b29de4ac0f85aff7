"""Log records of this process to the node's logger: console and /rosout, at the level given to ROS."""

from __future__ import annotations

import logging
from typing import Any


class RosLogHandler(logging.Handler):
    """Passes records on. rclpy allows one severity per line of code, hence the branches."""

    def __init__(self, logger: Any) -> None:
        """``logger``: of the node."""
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        try:
            text = self.format(record)
            if record.levelno >= logging.CRITICAL:
                self._logger.fatal(text)
            elif record.levelno >= logging.ERROR:
                self._logger.error(text)
            elif record.levelno >= logging.WARNING:
                self._logger.warning(text)
            elif record.levelno >= logging.INFO:
                self._logger.info(text)
            else:
                self._logger.debug(text)
        except Exception:
            self.handleError(record)


def log_to_node(node: Any) -> RosLogHandler:
    """From now on, what this process logs goes to the node's logger only; undo it before the node is destroyed."""
    handler = RosLogHandler(node.get_logger())
    logging.getLogger().handlers[:] = [handler]
    return handler
