"""The edge as a ROS 2 lifecycle node: ``ros2 run vla_runtime vla_edge_node``, or ``python -m vla_edge.ros_main``.

| transition | what happens |
|---|---|
| configure | the settings are checked; motor and policy process start, io runs in this one. Nothing moves: not armed |
| activate | re-arms and goals are accepted |
| deactivate | damped stop, the robot holds; re-arms and goals are refused |
| cleanup | the motor process brakes to rest if it moves, then everything ends |
| shutdown, SIGINT, SIGTERM | as cleanup |
| the motor process dies, or io fails | everything ends, the node is unconfigured again and says why |

A stop is accepted in every state. If this process is killed the kernel tells its children: the motor brakes and ends.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions
from std_srvs.srv import Trigger

from vla_common.clock import NS_PER_S, SystemClock
from vla_common.config import ConfigError
from vla_common.logging_setup import setup_logging
from vla_common.manifest import ManifestError
from vla_common.process import end_with_parent, stop_on_signals
from vla_common.zenoh_session import BusError
from vla_edge.adapters import ros_parameters
from vla_edge.adapters.ros_goal import STOP_TIMEOUT_S, GoalServer
from vla_edge.adapters.ros_log import log_to_node
from vla_edge.child import main_exit
from vla_edge.config import load_edge_config
from vla_edge.core.diagnosis import Finding, Level
from vla_edge.edge_main import EXIT_OK, EXIT_USAGE, check
from vla_edge.session import EdgeSession

LOG = logging.getLogger(__name__)

NODE_NAME: Final = "vla_edge"
SPIN_S: Final = 0.02
WATCH_NS: Final = NS_PER_S // 20
GOAL_NS: Final = NS_PER_S // 10
DIAGNOSTICS_NS: Final = NS_PER_S
SUCCESS, FAILURE, ERROR = (TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE,
                           TransitionCallbackReturn.ERROR)

Transition = Callable[[Any, Any], TransitionCallbackReturn]


def _logged(transition: Transition) -> Transition:
    """rclpy swallows what a transition raises."""
    @functools.wraps(transition)
    def wrapped(self: Any, state: Any) -> TransitionCallbackReturn:
        try:
            return transition(self, state)
        except Exception:
            LOG.exception("%s failed", transition.__name__)
            return ERROR
    return wrapped


class EdgeNode(LifecycleNode):
    """The node. Transitions, services and :meth:`turn` run in the main thread."""

    def __init__(self, remap: Sequence[str] = ()) -> None:
        """Declare parameters, services, the action and diagnostics.

        Args:
            remap: rules from the command line, for the children too.

        Raises:
            ConfigError: the file of parameter ``config`` or a parameter is wrong.
        """
        super().__init__(NODE_NAME)
        self._clock_ns = SystemClock()
        self.declare_parameter("config", "", ParameterDescriptor(
            description="Settings file such as config/edge.yaml; the other parameters override it", read_only=True))
        path = str(self.get_parameter("config").value)
        base = load_edge_config(Path(path) if path else None, [])
        self._base = base if base.is_ros else replace(base, bus="ros")
        self._remap = tuple(remap)
        ros_parameters.declare(self, self._base)
        ros_parameters.read(self, self._base)
        self.add_on_set_parameters_callback(self._on_set)
        self._session: EdgeSession | None = None
        self._fault = ""
        self._due_ns = {"watch": 0, "goal": 0, "diagnostics": 0}
        self._diagnostics_out = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self.create_service(Trigger, "~/rearm", self._on_rearm)
        self.create_service(Trigger, "~/estop", self._on_estop)
        self._goals = GoalServer(self)

    def _on_set(self, changes: list[Any]) -> SetParametersResult:
        ours = [parameter for parameter in changes if parameter.name in ros_parameters.DESCRIPTIONS]
        if not ours:
            return SetParametersResult(successful=True)
        if self._session is not None:
            return SetParametersResult(successful=False, reason="the node is configured: cleanup it first")
        try:
            ros_parameters.read(self, self._base, ours)
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    # ------------------------------------------------------------------ transitions

    @_logged
    def on_configure(self, state: Any) -> TransitionCallbackReturn:
        """Check the settings and start the processes."""
        self._fault = ""
        try:
            config = ros_parameters.read(self, self._base)
            config = replace(config, ros=replace(config.ros, remap=(*config.ros.remap, *self._remap)))
            limits = check(config)
            self._session = EdgeSession(config, limits, self._clock_ns)
        except (ConfigError, ManifestError, BusError, OSError) as error:
            LOG.error("not configured: %s", error)
            return FAILURE
        self._config = config
        self._session.start()
        return SUCCESS

    @_logged
    def on_activate(self, state: Any) -> TransitionCallbackReturn:
        """Accept re-arms and goals."""
        assert self._session is not None
        self._session.accept_rearms(True)
        self._goals.attach(self._session, self._config)
        return SUCCESS

    @_logged
    def on_deactivate(self, state: Any) -> TransitionCallbackReturn:
        """Damped stop; the robot holds."""
        assert self._session is not None
        self._session.accept_rearms(False)
        if self._fault:
            return ERROR
        stopped = self._session.stop_damped(STOP_TIMEOUT_S, "the node was deactivated")
        self._goals.detach("the node was deactivated")
        return SUCCESS if stopped else ERROR

    @_logged
    def on_cleanup(self, state: Any) -> TransitionCallbackReturn:
        """End the processes, the motor's after a damped stop."""
        if self._fault:
            return ERROR
        self._end("the node was cleaned up")
        return SUCCESS

    @_logged
    def on_shutdown(self, state: Any) -> TransitionCallbackReturn:
        """As cleanup."""
        self._end("the node shuts down")
        return SUCCESS

    @_logged
    def on_error(self, state: Any) -> TransitionCallbackReturn:
        """Everything ends; the node can be configured again when the cause is found."""
        self._fault = self._fault or "a transition failed"
        LOG.critical("the edge stopped: %s. Configure the node again when the cause is found", self._fault)
        self._end(f"the edge failed: {self._fault}")
        self._publish_diagnostics()
        return SUCCESS

    def _end(self, why: str) -> None:
        session = self._session
        if session is not None:
            self._goals.detach(why)
            self._session = None
            session.stop()

    # ------------------------------------------------------------------ services

    def _on_rearm(self, request: Any, response: Any) -> Any:
        response.success, response.message = (
            (False, "refused: the node is not active") if self._session is None else self._session.rearm())
        LOG.info("re-arm: %s", response.message)
        return response

    def _on_estop(self, request: Any, response: Any) -> Any:
        response.success, response.message = (
            (True, "nothing runs that could move the robot") if self._session is None else self._session.estop())
        LOG.warning("emergency stop by service: %s", response.message)
        return response

    # ------------------------------------------------------------------ periodic work

    @property
    def is_busy(self) -> bool:
        """A goal is under way; the executor then polls it and does not wait."""
        return self._goals.is_busy

    def turn(self) -> None:
        """Do what is due: watch the children, look after the goal, publish diagnostics."""
        now_ns = self._clock_ns.monotonic_ns()
        if self._due("goal", now_ns, GOAL_NS):
            self._goals.turn()
        if self._session is not None and self._due("watch", now_ns, WATCH_NS):
            fault = self._session.look()
            if fault:
                self._fail(fault)
        if self._due("diagnostics", now_ns, DIAGNOSTICS_NS):
            self._publish_diagnostics()

    def _due(self, what: str, now_ns: int, period_ns: int) -> bool:
        if now_ns < self._due_ns[what]:
            return False
        self._due_ns[what] = now_ns + period_ns
        return True

    def _fail(self, fault: str) -> None:
        """Into the error path from whatever state."""
        self._fault = fault
        if self._state_machine.current_state[1] == "active":
            self.trigger_deactivate()
        else:
            self.trigger_cleanup()

    def _publish_diagnostics(self) -> None:
        found = [] if self._session is None else self._session.findings()
        label = self._state_machine.current_state[1]
        found.append(Finding("node", Level.ERROR if self._fault else Level.OK, self._fault or str(label)))
        name, robot = self.get_fully_qualified_name().strip("/"), str(self.get_parameter("robot_id").value)
        message = DiagnosticArray(status=[
            DiagnosticStatus(level=bytes([finding.level]), name=f"{name}: {finding.name}", hardware_id=robot,
                             message=finding.message,
                             values=[KeyValue(key=key, value=value) for key, value in finding.values.items()])
            for finding in found])
        message.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics_out.publish(message)

    def finish(self) -> None:
        """Shut down from whatever state."""
        if self._state_machine.current_state[1] in ("unconfigured", "inactive", "active"):
            self.trigger_shutdown()
        self._end("the node ends")


def remap_rules(argv: Sequence[str]) -> list[str]:
    """Topic remapping rules of a ROS command line, such as ``-r a:=b``; those of names and namespaces are left out."""
    rules: list[str] = []
    inside = False
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--ros-args":
            inside = True
        elif word == "--":
            inside = False
        elif inside and word in ("-r", "--remap") and ":=" in following:
            if not following.split(":=")[0].rpartition(":")[2].startswith("__"):
                rules.append(following)
    return rules


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the node until SIGINT or SIGTERM, and end the process with 0 (stopped) or 2 (wrong settings)."""
    main_exit(_run(argv))  # a library's thread that is not done would be torn apart by Python's end: SIGABRT


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv if argv is None else argv)
    setup_logging("edge")
    end_with_parent()
    stop = stop_on_signals(grace_s=5.0)
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    try:
        node = EdgeNode(remap_rules(arguments))
    except Exception as error:  # rclpy's own errors name the parameter
        LOG.error("%s", error)
        rclpy.try_shutdown()
        return EXIT_USAGE
    before = logging.getLogger().handlers[:]
    log_to_node(node)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        while not stop.is_set():
            # rclpy polls a coroutine that waits; without the pause below it would do so without rest.
            executor.spin_once(timeout_sec=0.0 if node.is_busy else SPIN_S)
            if node.is_busy:
                stop.wait(SPIN_S / 4)
            node.turn()
    finally:
        node.finish()
        for _ in range(5):  # results of goals go out
            executor.spin_once(timeout_sec=0.01)
        logging.getLogger().handlers[:] = before
        executor.shutdown(timeout_sec=1.0)
        node.destroy_node()
        rclpy.try_shutdown()
    return EXIT_OK


if __name__ == "__main__":
    main()
