"""The forecast of the time of a training, with a clock that the test sets."""

from warpi.training.progress import Forecast

STEPS = 100  # per epoch


def train(seconds: list[float], evaluation: float = 0.0) -> list[tuple[int, int]]:
    """Steps that take `seconds` in the epochs. Returns the forecasts in minutes, each with its epoch."""
    now = 0.0
    forecast = Forecast(len(seconds) * STEPS, lambda: now)
    made = []
    for epoch, each in enumerate(seconds):
        for _ in range(STEPS):
            now += each
            made.append((epoch, forecast.after_step()))
        now += evaluation
        made.append((epoch, forecast.after_epoch()))
    return [(epoch, round(minutes)) for epoch, minutes in made if minutes is not None]


def test_steps_of_equal_length_have_one_forecast() -> None:
    assert train([0.6] * 10) == [(0, 10)]


def test_later_phases_correct_it() -> None:
    """Two epochs of a warm-up, then steps that take four times as long."""
    assert train([1.0] * 2 + [4.0] * 8) == [(0, 16), (2, 47)]


def test_evaluations_count() -> None:
    assert train([0.5] * 10, evaluation=100.0)[:2] == [(0, 8), (0, 23)]


def test_a_resumed_epoch_may_have_one_step() -> None:
    forecast = Forecast(2, lambda: 0.0)
    assert forecast.after_step() is None
    assert forecast.after_epoch() is None
