import mujoco
import numpy as np

from vla_sim.config import HOME
from vla_sim.expert import DOWN, orientation_error
from vla_sim.kinematics import ASSETS, forward, forward_and_jacobian, load_chain
from vla_sim.layout import solve_pose


def test_forward_kinematics_and_jacobian_equal_mujoco():
    model = mujoco.MjModel.from_xml_path(str(ASSETS / "panda_2f85" / "model.xml"))
    data = mujoco.MjData(model)
    chain = load_chain()
    q = np.random.default_rng(0).uniform(chain.lower_rad, chain.upper_rad, (20, 7))
    pos, rot, jac = forward_and_jacobian(q)
    linear, angular = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for i in range(len(q)):
        data.qpos[:7] = q[i]
        mujoco.mj_forward(model, data)
        mujoco.mj_jacSite(model, data, linear, angular, model.site("tcp").id)
        np.testing.assert_allclose(pos[i], data.site("tcp").xpos, atol=1e-6)
        np.testing.assert_allclose(rot[i].ravel(), data.site("tcp").xmat, atol=1e-6)
        np.testing.assert_allclose(jac[i], np.vstack([linear, angular])[:, :7], atol=1e-6)


def test_forward_takes_any_leading_shape():
    q = np.zeros((2, 3, 7))
    pos, rot = forward(q)
    assert pos.shape == (2, 3, 3) and rot.shape == (2, 3, 3, 3)


def test_chain_limits_are_those_of_the_model():
    model = mujoco.MjModel.from_xml_path(str(ASSETS / "panda_2f85" / "model.xml"))
    chain = load_chain()
    for i in range(7):
        assert tuple(model.joint(f"joint{i + 1}").range) == (chain.lower_rad[i], chain.upper_rad[i])


def test_home_is_over_the_table_centre_pointing_down():
    pos, rot = forward(np.array(HOME[:7]))
    np.testing.assert_allclose(pos, [0.51, 0.0, 0.30], atol=1e-3)
    np.testing.assert_allclose(rot, DOWN, atol=1e-3)


def test_inverse_kinematics_reaches_the_workspace():
    rng = np.random.default_rng(1)
    for goal in rng.uniform([0.36, -0.26, 0.03], [0.66, 0.26, 0.36], (20, 3)):
        np.testing.assert_allclose(forward(solve_pose(goal)[:7])[0], goal, atol=1e-6)


def test_orientation_error_turns_the_tool_towards_down():
    angle = 0.1
    turn = np.array([[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]])
    error = orientation_error((turn.T @ DOWN)[None])[0]
    np.testing.assert_allclose(error, [np.sin(angle), 0, 0], atol=1e-12)
