"""What a worker's silence means, second by second."""

from __future__ import annotations

from headrace.engine.core.pulse import Pulse, Vital


def listen(pulse: Pulse, *instants: float) -> list[Vital]:
    return [pulse.listen(instant) for instant in instants]


def test_a_worker_that_speaks_now_and_then_works() -> None:
    pulse = Pulse(period_s=1.0, stall_s=3.0, lost_s=6.0)
    for instant in range(100):
        assert pulse.listen(float(instant)) is Vital.WORKING
        if instant % 3 == 0:
            pulse.heard()


def test_silence_is_a_stall_then_a_loss_and_a_word_ends_it() -> None:
    pulse = Pulse(period_s=1.0, stall_s=3.0, lost_s=6.0)
    seen = listen(pulse, *(float(instant) for instant in range(8)))
    assert seen == [Vital.WORKING] * 4 + [Vital.STALLED] * 3 + [Vital.LOST]
    pulse.heard()
    assert listen(pulse, 8.0, 9.0) == [Vital.WORKING] * 2


def test_an_announced_long_step_is_no_stall_before_its_time_is_over() -> None:
    pulse = Pulse(period_s=1.0, stall_s=3.0, lost_s=6.0)
    pulse.heard(silent_s=10.0)
    seen = listen(pulse, *(float(instant) for instant in range(18)))
    assert seen == [Vital.WORKING] * 14 + [Vital.STALLED] * 3 + [Vital.LOST]
    pulse.heard()  # the next step is an ordinary one
    assert listen(pulse, *(18.0 + instant for instant in range(4))) == [Vital.WORKING] * 3 + [Vital.STALLED]


def test_time_in_which_nobody_listened_is_not_silence() -> None:
    pulse = Pulse(period_s=1.0, stall_s=3.0, lost_s=6.0)
    assert listen(pulse, 0.0, 1000.0) == [Vital.WORKING] * 2
    assert pulse.silent_s == 2.0
