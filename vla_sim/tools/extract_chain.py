"""Write `assets/panda_chain.json` from the MuJoCo model (run after changing the model)."""

from __future__ import annotations

import json

import mujoco
import numpy as np

from vla_sim.kinematics import ASSETS, CHAIN_FILE


def main() -> None:
    """Read the arm's constant transforms and limits out of the model."""
    model = mujoco.MjModel.from_xml_path(str(ASSETS / "panda_2f85" / "model.xml"))
    joints = []
    for number in range(1, 8):
        body, joint = model.body(f"link{number}"), model.joint(f"joint{number}")
        assert not joint.pos.any(), "joint anchors must sit at the body origin"
        joints.append(
            {
                "name": f"panda_joint{number}",
                "pos_m": body.pos.tolist(),
                "quat_wxyz": body.quat.tolist(),
                "axis": joint.axis.tolist(),
                "lower_rad": float(joint.range[0]),
                "upper_rad": float(joint.range[1]),
            }
        )
    base, site = model.body("base"), model.site("tcp")
    offset = np.zeros(3)
    mujoco.mju_rotVecQuat(offset, site.pos, base.quat)
    quat = np.zeros(4)
    mujoco.mju_mulQuat(quat, base.quat, site.quat)
    tcp = {"pos_m": (base.pos + offset).tolist(), "quat_wxyz": quat.tolist()}
    text = json.dumps({"joints": joints, "tcp": tcp}, indent=1)
    CHAIN_FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
