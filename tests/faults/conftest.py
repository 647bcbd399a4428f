import pytest
from faults.outside import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("faults").resolve())
