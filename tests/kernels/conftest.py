"""Modules with a global `OPS` run once for each implementation: the reference, native code for each instruction set."""

import pytest

from build import native
from qwen35.kernels.cpu import CpuOps
from qwen35.kernels.cpu.library import find_library, load_library
from qwen35.kernels.cpu.recipe import instruction_sets
from qwen35.kernels.reference import ReferenceOps


def pytest_generate_tests(metafunc):
    if hasattr(metafunc.module, "OPS"):
        metafunc.fixturenames.append("implementation")
        metafunc.parametrize("implementation", ["reference", *instruction_sets()], indirect=True, scope="module")


@pytest.fixture(scope="session")
def native_library():
    try:
        native.build(find_library())
    except RuntimeError as error:
        pytest.skip(str(error))
    return load_library(find_library())


@pytest.fixture(scope="module")
def implementation(request):
    """Sets the module's `OPS`."""
    if request.param == "reference":
        request.module.OPS = ReferenceOps()
        yield request.module.OPS
        return
    library = request.getfixturevalue("native_library")
    if library.qwen35_select(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    request.module.OPS = CpuOps()
    yield request.module.OPS
    library.qwen35_select(b"")
