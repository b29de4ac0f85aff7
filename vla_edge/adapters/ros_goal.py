"""The action RunTask: one goal at a time; every end but success is a damped stop."""

from __future__ import annotations

import logging
from typing import Any, Final

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.task import Future
from vla_runtime.action import RunTask

from vla_edge.config import EdgeConfig
from vla_edge.core.task_goal import Outcome, TaskGoal
from vla_edge.session import EdgeSession

LOG = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 2.0
MAX_INSTRUCTION: Final = 1000


class GoalServer:
    """Serves ``~/run_task`` while a session is attached. For the executor's thread."""

    def __init__(self, node: Any) -> None:
        """Create the action server; goals are rejected until :meth:`attach`."""
        self._session: EdgeSession | None = None
        self._config = EdgeConfig()
        self._running: tuple[Any, TaskGoal, Future] | None = None
        self._server = ActionServer(node, RunTask, "~/run_task", self._execute, goal_callback=self._on_goal,
                                    handle_accepted_callback=self._on_accepted, cancel_callback=self._on_cancel)

    @property
    def is_busy(self) -> bool:
        """A goal is under way."""
        return self._running is not None

    def attach(self, session: EdgeSession, config: EdgeConfig) -> None:
        """Goals are accepted from now on."""
        self._session, self._config = session, config

    def detach(self, why: str) -> None:
        """Goals are rejected from now on; one under way is aborted. The caller stops the robot."""
        self._end(Outcome(False, why), stop=False)
        self._session = None

    def _on_goal(self, request: Any) -> GoalResponse:
        text = str(request.instruction)
        why = ("the node is not active" if self._session is None else
               "another goal is under way: cancel it first" if self._running is not None else
               "the instruction is empty" if not text.strip() else
               f"the instruction is longer than {MAX_INSTRUCTION} characters" if len(text) > MAX_INSTRUCTION else "")
        if why:
            LOG.warning("goal %.60r rejected: %s", text, why)
        return GoalResponse.REJECT if why else GoalResponse.ACCEPT

    def _on_cancel(self, _: Any) -> CancelResponse:
        return CancelResponse.ACCEPT

    def _on_accepted(self, handle: Any) -> None:
        assert self._session is not None
        goal = TaskGoal(str(handle.request.instruction), self._config.policy.home_phrases, self._session.limits.ready)
        self._running = (handle, goal, Future())
        self._session.say(goal.instruction)
        LOG.info("goal %r", goal.instruction)
        handle.execute()

    async def _execute(self, handle: Any) -> Any:
        assert self._running is not None
        outcome = await self._running[2]
        self._running = None
        if handle.is_cancel_requested:
            handle.canceled()
        elif outcome.success:
            handle.succeed()
        else:
            handle.abort()
        LOG.info("goal ended: %s", outcome.message)
        return RunTask.Result(success=outcome.success, message=outcome.message)

    def turn(self) -> None:
        """Look after the goal under way and tell how it goes; call about ten times a second."""
        if self._running is None or self._session is None:
            return
        handle, goal, future = self._running
        if future.done():
            return
        view = self._session.goal_view()
        if handle.is_cancel_requested:
            self._end(Outcome(False, "cancelled"), stop=True)
            return
        outcome = goal.look(view)
        if outcome is not None:
            self._end(outcome, stop=not outcome.success)
            return
        policy = self._session.policy()
        age_s = None if policy is None else policy.context_age_s
        handle.publish_feedback(RunTask.Feedback(
            shield_state=int(view.state), reason=view.reason, context_age_s=-1.0 if age_s is None else age_s,
            progress=goal.progress))

    def _end(self, outcome: Outcome, stop: bool) -> None:
        if self._running is None or self._running[2].done():
            return
        assert self._session is not None
        if stop and not self._session.stop_damped(STOP_TIMEOUT_S, f"the goal ended: {outcome.message}"):
            outcome = Outcome(False, f"{outcome.message}; THE ROBOT DID NOT COME TO REST: use its own stop")
        self._session.say(None)
        self._running[2].set_result(outcome)
