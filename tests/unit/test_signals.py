"""Signals inside a block: handled or recorded, and afterwards as before."""

import contextlib
import signal
import threading

from worldmodel import signals


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in signals.STOP]


def test_signals_are_recorded_and_put_back() -> None:
    before = handlers()
    with signals.recorded() as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGTERM, signal.SIGINT]
    assert handlers() == before


def test_signals_are_put_back_after_an_error() -> None:
    before = handlers()
    with contextlib.suppress(ZeroDivisionError), signals.recorded():
        raise ZeroDivisionError
    assert handlers() == before


def test_blocks_may_be_nested() -> None:
    with signals.recorded() as outer:
        with signals.recorded() as inner:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (outer, inner) == ([signal.SIGINT], [signal.SIGTERM])


def test_only_the_named_signals_are_handled() -> None:
    before, handled = signal.getsignal(signal.SIGINT), []
    with signals.handled(handled.append, [signal.SIGTERM]):
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is before
    assert handled == [signal.SIGTERM]


def test_another_thread_changes_nothing() -> None:
    before, seen = handlers(), []

    def block() -> None:
        with signals.recorded() as received:
            seen.append((handlers(), received))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [(before, [])]
    assert handlers() == before
