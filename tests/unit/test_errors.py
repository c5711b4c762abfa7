from __future__ import annotations

import pickle

import pytest

from kvadmit import errors
from kvadmit.errors import (
    CapacityError,
    ConfigError,
    DeviceOutOfMemoryError,
    DriverError,
    InvariantViolation,
    KvAdmitError,
    PeerTimeoutError,
)


def classes() -> list[type[KvAdmitError]]:
    found = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, KvAdmitError)
    ]
    assert len(found) > 10
    return found


EXAMPLES = [
    (ConfigError("cap", "1X", "a size"), "kvadmit.cap: got '1X'; allowed: a size"),
    (
        PeerTimeoutError("rank 2", "no answer to order 7", 2.0),
        "rank 2: no answer to order 7 (waited 2.0 s)",
    ),
    (PeerTimeoutError("rank 2", "no answer"), "rank 2: no answer"),
    (
        DriverError("cuMemMap", "GPU-1", "CUDA_ERROR_INVALID_VALUE", "invalid argument"),
        "cuMemMap on GPU-1 failed with CUDA_ERROR_INVALID_VALUE: invalid argument",
    ),
    (
        DeviceOutOfMemoryError("cuMemCreate", "GPU-1", "CUDA_ERROR_OUT_OF_MEMORY"),
        "cuMemCreate on GPU-1 failed with CUDA_ERROR_OUT_OF_MEMORY",
    ),
    (CapacityError("instance b holds 3GiB"), "instance b holds 3GiB"),
]


@pytest.mark.parametrize(("error", "text"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_an_error_says_what_it_carries_and_survives_pickling(
    error: KvAdmitError, text: str
) -> None:
    assert str(error) == text
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - ours
    assert type(copy) is type(error)
    assert str(copy) == text
    assert vars(copy) == vars(error)


def test_codes_are_unique_and_follow_the_tree() -> None:
    codes = {kind.code: kind for kind in classes()}
    assert len(codes) == len(classes())
    for code, kind in codes.items():
        parent = kind.__mro__[1]
        if "." in code and issubclass(parent, KvAdmitError):
            assert code.startswith(parent.code + ".")


def test_codes_are_stable() -> None:
    """They travel on the wire and in --json output: a changed one breaks its readers."""
    assert {kind.__name__: kind.code for kind in classes()} == {
        "KvAdmitError": "kvadmit",
        "ConfigError": "config",
        "UnsupportedError": "unsupported",
        "ProtocolError": "protocol",
        "RemoteProtocolError": "protocol.remote",
        "LocalProtocolError": "protocol.local",
        "VersionError": "protocol.version",
        "StaleEpochError": "protocol.stale_epoch",
        "PeerError": "peer",
        "PeerLostError": "peer.lost",
        "PeerTimeoutError": "peer.timeout",
        "CapacityError": "capacity",
        "DriverError": "driver",
        "DeviceOutOfMemoryError": "driver.out_of_memory",
        "GroupDivergedError": "group_diverged",
    }


def test_a_violation_is_not_caught_with_the_rest_and_tells_its_story() -> None:
    violation = InvariantViolation("I1", "12 of 10 extents", ["grant", "grant"])
    assert not isinstance(violation, KvAdmitError)
    assert isinstance(violation, AssertionError)
    assert str(violation) == "I1: 12 of 10 extents\nstory: ['grant', 'grant']"
    assert str(InvariantViolation("I1", "12 of 10 extents")) == "I1: 12 of 10 extents"
