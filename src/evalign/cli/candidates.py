"""Train the models of `evalign fit`: those named by --model, then the baselines."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from evalign.cli.console import Interrupt
from evalign.cli.options import Settings

ROUNDS = 1000  # maximum of boosting rounds, the end of the progress bar


def train(
    judge: Any, settings: Settings, development: Any, test: Any, output: Any, interrupt: Interrupt
) -> tuple[list[Any], str, str | None]:
    """Train all candidates; returns the trials, the kept model's name, and the reason if there was a choice.

    Our models are trained first, so that Ctrl-C leaves a model to save.
    """
    from evalign.comparison.run import choose, evaluate

    models = _models(settings, output.note)
    epochs = max(_epochs(settings, model) for model in models)
    seconds = settings.budget / len(models) if settings.model == "auto" else None
    with output.progress(len(models) + 2, epochs) as step:

        def run(contender: Any, seconds: float | None = None) -> Any:
            before, clock = interrupt.pressed, Clock(step(contender.title, 0), seconds)
            trial = evaluate(contender, development, test, judge, seed=settings.seed, on_epoch=clock)
            if interrupt.pressed and not before:
                if not trial.estimator.history_:
                    raise KeyboardInterrupt
                output.note(f"Ctrl-C ended the training of {contender.title}; its best weights so far were kept")
            elif clock.over:
                output.note(f"{contender.title} was stopped after {seconds:.0f} s, its share of --budget")
            return trial

        trials: list[Any] = []
        for model in models:
            if trials and interrupt.pressed:
                output.note("the other models were not trained, after Ctrl-C")
                break
            trials.append(run(_ours(judge, settings, model), seconds))
        choice = choose(trials, judge)
        why = choice.reason(trials, judge.aim.name) if settings.model == "auto" else None
        kept = models[choice.best]
        trials.insert(0, trials.pop(choice.best))
        for place, trial in enumerate(trials):
            name = ("ours", "ours_other", "ours_third")[place]
            trial.contender = replace(trial.contender, name=name)
        for contender in _rivals(judge, settings, kept):
            if interrupt.pressed and contender.name == "cross_entropy":
                output.note("cross-entropy was not trained for comparison, after Ctrl-C")
                continue
            trials.append(run(contender))
    return trials, kept, why


class Clock:
    """Epoch callback with a time limit; ends training like Ctrl-C, which keeps the best state so far."""

    def __init__(self, listener: Callable[[Any], None] | None, seconds: float | None) -> None:
        self.listener, self.seconds = listener, seconds
        self.started, self.over = time.monotonic(), False

    def expect(self, seconds: float) -> None:
        """Pass a model's own estimate of its time on."""
        if self.listener is not None and hasattr(self.listener, "expect"):
            self.listener.expect(min(seconds, self.seconds or math.inf))

    def __call__(self, epoch: Any) -> None:
        if self.listener is not None:
            self.listener(epoch)
        if self.seconds is not None and time.monotonic() - self.started > self.seconds:
            self.over = True
            raise KeyboardInterrupt


def _models(settings: Settings, note: Callable[[str], None]) -> list[str]:
    """Names of the models to train, in order: trees first, because they rarely use up their time."""
    if settings.model != "auto":
        return [settings.model]
    from evalign.boosting.libraries import is_installed

    if is_installed("lightgbm"):
        return ["boost", "network", "blend"]
    note("only a network was trained, because LightGBM is not installed; run pip install 'evalign[boost]'")
    return ["network"]


def _epochs(settings: Settings, model: str) -> int:
    from evalign.training.recipes import find_recipe

    if model in ("boost", "blend"):
        return settings.epochs or ROUNDS
    return find_recipe(settings.recipe_of(model)).limited(settings.epochs).epochs


def _ours(judge: Any, settings: Settings, model: str) -> Any:
    from evalign.comparison import contenders as c

    if model == "boost":
        ours = c.ours_boosted(judge, recipe=settings.recipe_of("boost"), **settings.for_trees())
    elif model == "blend":
        ours = c.ours_blended(judge, recipe=settings.recipe_of("blend"), **settings.for_blend())
    else:
        ours = c.ours(judge, recipe=settings.recipe_of("network"), **settings.for_network())
    return replace(ours, decisions=(settings.decision_of(model),))


def _rivals(judge: Any, settings: Settings, model: str) -> list[Any]:
    """Baselines: boosted trees beside a blend, else the same model trained on cross-entropy; the majority class."""
    from evalign.boosting.libraries import is_installed
    from evalign.comparison import contenders as c

    own = settings.decision_of(model)
    if model == "boost":
        rival = c.boosted_cross_entropy(judge, **settings.for_trees())
    elif model == "blend":
        rival = (c.stock_lightgbm if is_installed("lightgbm") else c.gradient_boosting)(judge)
    else:
        rival = c.cross_entropy(judge, rival_of=settings.recipe_of("network"), **settings.for_network())
    return [replace(rival, decisions=tuple(dict.fromkeys(("argmax", "plug_in", own)))), c.majority(judge)]
