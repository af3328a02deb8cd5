"""The one part of the build that `pyproject.toml` cannot say: which folder becomes which package.

`train/`, `serving/`, `demo/` and `configs/` lie beside the library and are installed inside it: a top-level
package called `train` would be shadowed by any `train.py` in a user's folder.
"""

from setuptools import find_packages, setup

ROOMS = ("train", "serving", "demo", "configs")

packages = find_packages(include=["worldmodel", "worldmodel.*"])
for room in ROOMS:
    packages += [f"worldmodel.{room}", *(f"worldmodel.{room}.{name}" for name in find_packages(room))]

setup(packages=packages, package_dir={f"worldmodel.{room}": room for room in ROOMS})
