"""The mapping of folders to packages, which `pyproject.toml` cannot express.

`train/`, `serving/`, `demo/` and `configs/` are top-level folders of the repository and subpackages of
`worldmodel`: a top-level package `train` would be shadowed by a `train.py` in the user's folder.
"""

from setuptools import find_packages, setup

FOLDERS = ("train", "serving", "demo", "configs")

packages = find_packages(include=["worldmodel", "worldmodel.*"])
for folder in FOLDERS:
    packages += [f"worldmodel.{folder}", *(f"worldmodel.{folder}.{name}" for name in find_packages(folder))]

setup(packages=packages, package_dir={f"worldmodel.{folder}": folder for folder in FOLDERS})
