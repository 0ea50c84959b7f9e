"""Build the wheel, with compiled C libraries if a compiler is available and the processor is supported."""

import runpy
import shutil
import sys

if sys.version_info < (3, 11):  # noqa: UP036  (pip checks it after downloading all packages)
    sys.exit("tot needs Python 3.11 or newer, and this is Python {}.{}".format(*sys.version_info))

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

COMPILING = runpy.run_path("decoders/kernels/native/compiling.py")
COMPILER = shutil.which("cc") if COMPILING["LEVELS"] and sys.platform == "linux" else None


class Build(build_py):
    def run(self) -> None:
        super().run()
        if COMPILER and not self.editable_mode:
            COMPILING["build"](Path(self.build_lib) / "tot/decoders/kernels/native" / COMPILING["BUILT"], COMPILER)


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = self.root_is_pure and COMPILER is None

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
