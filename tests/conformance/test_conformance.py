"""Every backend reproduces the golden traces. A new backend passes by adding one line."""

import pytest

from dflash.backends import find_backend
from dflash.conformance.cases import CASES, Case
from dflash.conformance.run import run_case
from dflash.errors import BackendError
from dflash.interfaces import Backend

BACKENDS = {
    "torch": ("torch", {}),
    "torch through transformers": ("torch", {"native": False}),
    "mlx": ("mlx", {}),
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    name, settings = BACKENDS[request.param]
    try:
        found = find_backend(name)
    except BackendError as error:
        pytest.skip(str(error))
    for setting, value in settings.items():
        assert hasattr(found, setting)
        setattr(found, setting, value)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reproduces_the_golden_trace(backend: Backend, case: Case) -> None:
    result = run_case(backend, case)
    assert result.ok, "\n".join(result.report())
    assert result.worst > 0  # something was compared
    for tally in (result.proposals, result.verdicts, result.output):
        assert tally.agreed == tally.compared > 0
        assert case.dtype != "float32" or not tally.unclear
