"""Signals that ask a launch to end."""

import signal

import pytest

from bigplan.launcher.stop import Stop


def test_a_patient_launch_is_asked_first_and_interrupted_then() -> None:
    with Stop() as stop:
        stop.patient = True
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        stop.look()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_a_library_has_dropped_is_raised_at_the_next_look() -> None:
    with Stop() as stop:
        stop.look()
        with pytest.raises(KeyboardInterrupt):  # as Python drops it in a finaliser
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.look()


def test_handlers_are_those_of_before_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert signal.getsignal(signal.SIGINT) == stop._signalled
    assert signal.getsignal(signal.SIGINT) is before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
