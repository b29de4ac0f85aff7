"""Build step beyond pyproject.toml: put the message definitions of msg/ into the vla_common package.

ROS tools want them in msg/ at the root, an installed wheel needs them inside the package. Copying at build time keeps
one set of files; an editable install reads msg/ directly.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithMessages(build_py):
    """Copy msg/*.msg to vla_common/msg/ of the build."""

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return
        target = Path(self.build_lib) / "vla_common" / "msg"
        self.mkpath(str(target))
        for source in sorted(Path("msg").glob("*.msg")):
            self.copy_file(str(source), str(target / source.name))


setup(cmdclass={"build_py": BuildWithMessages})
