"""The repository as a whole: packaging that ROS and pip accept."""

import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"vla_common", "vla_models", "vla_cloud", "vla_edge", "vla_sim", "vla_cli"}


def test_package_xml_is_what_catkin_accepts():
    package = ET.parse(ROOT / "package.xml").getroot()
    assert package.get("format") == "3" and package.findtext("name") == "vla_runtime"
    assert package.findtext("license") == "Apache-2.0" and package.findtext("export/build_type") == "ament_cmake"
    mail = package.find("maintainer").get("email")
    assert re.fullmatch(r"[-a-zA-Z0-9_%+]+(\.[-a-zA-Z0-9_%+]+)*@[-a-zA-Z0-9%]+(\.[-a-zA-Z0-9%]+)*\.[a-zA-Z]{2,}", mail)
    assert package.findtext("member_of_group") == "rosidl_interface_packages"


def test_versions_agree():
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE).group(1)
    assert ET.parse(ROOT / "package.xml").getroot().findtext("version") == version


def test_the_ros_name_is_no_python_package():
    """It is the generated message module's name (ros2/rosidl_python#141)."""
    assert "vla_runtime" not in PACKAGES and not (ROOT / "vla_runtime").exists()


def test_packages_and_tests_are_complete():
    for package in PACKAGES:
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
        assert not missing, f"folders without __init__.py would be left out of the wheel: {missing}"


def test_no_generated_files_are_tracked():
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):  # a source archive
        return
    bad = [
        line for line in listed.splitlines() if re.search(r"__pycache__|\.pyc$|\.egg-info/|^(runs|build|data)/", line)
    ]
    assert not bad
