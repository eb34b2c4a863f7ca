"""What `evalign fit` trains: ours, by --model, then what it is held against."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from evalign.cli.console import Interrupt
from evalign.cli.options import Settings

ROUNDS = 1000  # of boosted trees at most; what the progress bar counts to


def train(
    judge: Any, settings: Settings, development: Any, test: Any, output: Any, interrupt: Interrupt
) -> tuple[list[Any], str, str | None]:
    """Trials, ours first; which model is kept; and why, where there was a choice.

    Ours come first, so that Ctrl-C leaves something to keep.
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
    """Passes epochs on, and after its time is over ends training as Ctrl-C would: the best so far is kept."""

    def __init__(self, listener: Callable[[Any], None] | None, seconds: float | None) -> None:
        self.listener, self.seconds = listener, seconds
        self.started, self.over = time.monotonic(), False

    def __call__(self, epoch: Any) -> None:
        if self.listener is not None:
            self.listener(epoch)
        if self.seconds is not None and time.monotonic() - self.started > self.seconds:
            self.over = True
            raise KeyboardInterrupt


def _models(settings: Settings, note: Callable[[str], None]) -> list[str]:
    """In the order in which they are trained: trees are done first mostly, and leave the network their time."""
    if settings.model != "auto":
        return [settings.model]
    from evalign.boosting.libraries import is_installed

    if is_installed("lightgbm"):
        return ["boost", "network", "blend"]
    note("only a network was trained: LightGBM is not installed; pip install 'evalign[boost]' brings it")
    return ["network"]


def _epochs(settings: Settings, model: str) -> int:
    from evalign.training.recipes import find_recipe

    if model in ("boost", "blend"):
        return settings.epochs or ROUNDS
    return find_recipe(settings.recipe).limited(settings.epochs).epochs


def _ours(judge: Any, settings: Settings, model: str) -> Any:
    from evalign.comparison import contenders as c

    if model == "boost":
        ours = c.ours_boosted(judge, recipe=settings.recipe, **settings.for_trees())
    elif model == "blend":
        ours = c.ours_blended(judge, recipe=settings.recipe, **settings.for_blend())
    else:
        ours = c.ours(judge, recipe=settings.recipe, **settings.for_network())
    return replace(ours, decisions=(settings.decision_of(model),))


def _rivals(judge: Any, settings: Settings, model: str) -> list[Any]:
    """Cross-entropy with the same model, and the majority class."""
    from evalign.comparison import contenders as c

    own = settings.decision_of(model)
    if model == "boost":
        rival = c.boosted_cross_entropy(judge, **settings.for_trees())
    elif model == "blend":
        rival = c.blended_cross_entropy(judge, **settings.for_blend())
    else:
        rival = c.cross_entropy(judge, rival_of=settings.recipe, **settings.for_network())
    return [replace(rival, decisions=tuple(dict.fromkeys(("argmax", "plug_in", own)))), c.majority(judge)]
