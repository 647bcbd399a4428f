"""Wheels of a package registry that is made up."""

import hashlib
import zipfile
from pathlib import Path


def add_wheel(wheels, requirement, files):
    """Put a wheel into the registry; returns its sha256."""
    with zipfile.ZipFile("made.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    data = Path("made.whl").read_bytes()
    Path("made.whl").unlink()
    wheels[requirement.replace("==", "-") + "-py3-none-any.whl"] = data
    return hashlib.sha256(data).hexdigest()
